"""The reasons for which an elastic job's training stops: what happened, and which worker failed first."""

from __future__ import annotations

from hvdgloo.rendezvous._elastic.events import Failing, HostLost
from hvdgloo.rendezvous._elastic.pool import Pool
from hvdgloo.rendezvous._elastic.worker import Worker


class Causes:
    """The causes known so far.

    Attributes:
        failure: a member's first failure since the last training.
        why: the reason why the last training is over.
        trouble: the reason why the newest epoch is over.
    """

    def __init__(self, pool: Pool) -> None:
        self.failure: Failing | None = None
        self.why = ""
        self.trouble = ""
        self._pool = pool
        self._failed_epoch = -1  # last epoch in which a member failed
        self._other_failure: Failing | None = None  # last failure of a worker that was not a member
        self._why_is_heard = False

    def clear(self) -> None:
        """Forget why the last training is over, because the next one begins."""
        self.why, self.failure = "", None

    def note(self, why: str, *, heard: bool = False) -> None:
        """Note why the epoch ended, if that is not known yet.

        Args:
            heard: a worker reports it, which often sees only that it lost another one. How that one ended tells more,
                and becomes known later.
        """
        if not self.why or (self._why_is_heard and not heard):
            self.why, self._why_is_heard = why, heard
        self.trouble = self.trouble or why

    def blame(self, worker: Worker, status: int | None, reason: str, told: str = "") -> None:
        """Note the failure of a worker.

        Args:
            told: the cause as it is told of the worker's host; by default the worker and the reason.
        """
        failing = Failing(worker.id, worker.rank, worker.host, status or 1, reason, told or f"{worker} {reason}")
        if self._pool.is_member(worker):
            self.failure = self.failure or failing
            self._failed_epoch = self._pool.assignment.epoch
            self.note(f"{worker} {reason}")
        else:
            self._other_failure = failing

    def could_not_start(self, worker: Worker, lost: HostLost) -> None:
        """Note a worker that could not be started, which is no failure by itself: there may be enough without it."""
        reason = f"host {worker.host_name} could not be used: {lost.reason}"
        self._other_failure = Failing("", None, worker.host, lost.status, reason, lost.reason)
        if self._pool.is_member(worker):
            self.note(reason)

    def failing(self, text: str) -> Failing:
        """Return the failure to report for a job that ends for this reason."""
        return self.failure or self._other_failure or Failing(reason=text)

    @property
    def has_failed(self) -> bool:
        """True if a member of the newest epoch has failed since the last training."""
        return self.failure is not None and self._failed_epoch == self._pool.assignment.epoch
