"""The policy of elastic jobs: the end of a worker does not end the rest. The elastic job decides who continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.protocol.frames import Exited, SpawnFailed
from hvdgloo.runner.supervise.policy import Policy


class Survivors(Policy):
    """The running workers, until the elastic job is over.

    Attributes:
        statuses: exit status of each worker that has ended, or minus the signal; None if its host was lost.
    """

    def __init__(self, outcome: JobOutcome, notice: Callable[[str], None], stop: Callable[[], None]) -> None:
        super().__init__(outcome, notice, stop)
        self.statuses: dict[int, int | None] = {}

    @property
    def over(self) -> bool:
        """True if no worker runs, and none will be started: until the job is over, others may follow."""
        return self.settled and not self.running

    def exited(self, host: str, frame: Exited) -> None:
        """Record that a worker has ended."""
        super().exited(host, frame)
        self.statuses[frame.number] = frame.status

    def not_started(self, host: str, frame: SpawnFailed) -> None:
        """Record that a worker could not be started."""
        super().not_started(host, frame)
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
