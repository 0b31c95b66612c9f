"""The search for the cause of a job's end: the first failure that does not merely echo another one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hvdgloo._platform.spelling import followed_by
from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.protocol.frames import Exited, SpawnFailed
from hvdgloo.runner.supervise.policy import Policy, describe_end

ECHO_TIME = 2.0
"""Seconds that a worker has to end on its own after another worker's error named it as the reason for its failure."""


@dataclass(frozen=True)
class _Echo:
    """A failure that is explained by another worker's end, which has not been seen yet."""

    failure: Failure
    culprit: int
    deadline: float


class Verdict(Policy):
    """The policy of jobs of a fixed size: the first failure stops the remaining workers, whose numbers are ranks."""

    _echo: _Echo | None = None

    @property
    def next(self) -> float | None:
        """Time at which ``keep_time`` has something to do, on the monotonic clock."""
        times = [super().next, self._echo.deadline if self._echo is not None else None]
        return min((when for when in times if when is not None), default=None)

    @property
    def over(self) -> bool:
        """True if no worker runs any more: in such a job, all are started at once."""
        return not self.running and (self.settled or bool(self._outcome.statuses))

    def exited(self, host: str, frame: Exited) -> None:
        """Record that a worker has ended."""
        super().exited(host, frame)
        if frame.status != 0:
            self._fail_unless_echo(Failure(frame.number, host, frame.status, describe_end(frame)))
        if self._echo is not None and self._echo.culprit not in self.running:
            self._take_echo()

    def not_started(self, host: str, frame: SpawnFailed) -> None:
        """Record that a worker could not be started."""
        super().not_started(host, frame)
        self.fail(Failure(frame.number, host, frame.status, f"could not be started: {frame.reason}"))

    def fail(self, failure: Failure) -> None:
        """Stop the job at the first failure; later failures are consequences of it."""
        if self.settled:
            return
        if self._outcome.first is None:
            self._outcome.first = failure
            if self.running:
                who = f"rank {failure.rank} on host {failure.host} " if failure.rank is not None else ""
                self._stopping(who + followed_by(failure.reason, "stopping the other workers"))
        self._stop()

    def keep_time(self, now: float) -> None:
        """Treat an echo whose cause does not appear as a failure like any other."""
        super().keep_time(now)
        if self._echo is not None and now >= self._echo.deadline:
            self._take_echo()

    def _fail_unless_echo(self, failure: Failure) -> None:
        """Report a failure, unless it echoes another worker's. A worker that ends with an error tells its peers on its
        way out, and they may exit before it does.

        The culprit gets a moment to end on its own, so that its exit status becomes the job's.
        """
        assert failure.rank is not None
        culprit = self._observer.culprit(failure.rank)
        if self.settled or culprit is None or culprit not in self.running:
            self.fail(failure)
        elif self._echo is None:
            self._echo = _Echo(failure, culprit, time.monotonic() + ECHO_TIME)

    def _take_echo(self) -> None:
        echo, self._echo = self._echo, None
        if echo is not None:
            self.fail(echo.failure)
