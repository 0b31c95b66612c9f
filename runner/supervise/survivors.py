"""The policy of elastic jobs: what ends does not end the rest. Who goes on is decided elsewhere, by the elastic job."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.protocol.frames import Exited, SpawnFailed


class Survivors:
    """Which workers run, until the elastic job is over.

    Args:
        outcome: to be filled in.
        stop: ends all workers.

    Attributes:
        running: numbers of workers that have not ended.
        settled: whether everything that ends from now on ends because it was told to.
        statuses: of each worker that has ended: exit status, or minus the signal; None if its host was lost.
    """

    def __init__(self, outcome: JobOutcome, stop: Callable[[], None]) -> None:
        self.running: set[int] = set()
        self.settled = False
        self.statuses: dict[int, int | None] = {}
        self._outcome = outcome
        self._stop = stop

    @property
    def over(self) -> bool:
        """Whether no worker runs, and none will be started: until the job is over, others may come."""
        return self.settled and not self.running

    @property
    def next(self) -> float | None:
        """Nothing here depends on time."""
        return None

    def started(self, number: int) -> None:
        """A worker was told to start."""
        self.running.add(number)

    def exited(self, host: str, frame: Exited) -> None:
        """A worker has ended."""
        self.running.discard(frame.number)
        self.statuses[frame.number] = frame.status

    def not_started(self, host: str, frame: SpawnFailed) -> None:
        """A worker could not be started."""
        self.running.discard(frame.number)
        self.statuses[frame.number] = frame.status

    def gone(self, numbers: Iterable[int]) -> None:
        """Workers whose host was lost: nothing will report how they ended."""
        for number in numbers:
            self.running.discard(number)
            self.statuses.setdefault(number, None)

    def fail(self, failure: Failure) -> None:
        """The job cannot go on, whoever is left."""
        if not self.settled:
            self._outcome.first = failure
            self._stop()

    def keep_time(self, now: float) -> None:
        """Nothing here depends on time."""
