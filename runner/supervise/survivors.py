"""The policy of elastic jobs: the end of a worker does not end the rest. The elastic job decides who continues."""

from __future__ import annotations

from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.supervise.policy import Policy


class Survivors(Policy):
    """The running workers, until the elastic job is over."""

    @property
    def over(self) -> bool:
        """True if no worker runs, and none will be started: until the job is over, others may follow."""
        return self.settled and not self.running

    def fail(self, failure: Failure) -> None:
        """End the job, whichever workers are left."""
        if not self.settled:
            self._outcome.first = failure
            self._stop()
