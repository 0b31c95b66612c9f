"""The policy of elastic jobs: the end of a worker does not end the rest. The elastic job decides who continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.protocol.frames import Exited, SpawnFailed


class Survivors:
    """The running workers, until the elastic job is over.

    Args:
        outcome: filled in.
        stop: ends all workers.

    Attributes:
        running: numbers of workers that have not ended.
        settled: True if everything that ends from now on ends on request.
        statuses: exit status of each worker that has ended, or minus the signal; None if its host was lost.
    """

    def __init__(self, outcome: JobOutcome, stop: Callable[[], None]) -> None:
        self.running: set[int] = set()
        self.settled = False
        self.statuses: dict[int, int | None] = {}
        self._outcome = outcome
        self._stop = stop

    @property
    def over(self) -> bool:
        """True if no worker runs, and none will be started: until the job is over, others may follow."""
        return self.settled and not self.running

    @property
    def next(self) -> float | None:
        """None, because nothing here depends on time."""
        return None

    def started(self, number: int) -> None:
        """Record that a worker was told to start."""
        self.running.add(number)

    def exited(self, host: str, frame: Exited) -> None:
        """Record that a worker has ended."""
        self.running.discard(frame.number)
        self.statuses[frame.number] = frame.status

    def not_started(self, host: str, frame: SpawnFailed) -> None:
        """Record that a worker could not be started."""
        self.running.discard(frame.number)
        self.statuses[frame.number] = frame.status

    def gone(self, numbers: Iterable[int]) -> None:
        """Record the loss of workers with their host: nothing will report their ends."""
        for number in numbers:
            self.running.discard(number)
            self.statuses.setdefault(number, None)

    def fail(self, failure: Failure) -> None:
        """End the job, whichever workers are left."""
        if not self.settled:
            self._outcome.first = failure
            self._stop()

    def keep_time(self, now: float) -> None:
        """Do nothing, because nothing here depends on time."""
