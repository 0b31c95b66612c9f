"""The consequences for a job when one of its workers ends: none for the others.

That is the policy of elastic jobs, which decide themselves who continues. ``first_failure`` has the rule that jobs of a
fixed size add.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hvdgloo.runner.job.outcome import Failure, JobOutcome, describe_status
from hvdgloo.runner.protocol.frames import Exited, SpawnFailed
from hvdgloo.runner.supervise.init_watch import InitWatch
from hvdgloo.runner.supervise.observers import SupervisionObserver


def describe_end(frame: Exited) -> str:
    """Describe the end of a worker, including its agent's account of it."""
    return describe_status(frame.status) + (f"; {frame.account}" if frame.account else "")


class Policy:
    """The running workers, and what follows from their ends.

    Args:
        outcome: filled in.
        observer: shows notices to the user.
        stop: ends all workers.
        stopping: receives a line about a failure that ends the job, if there are workers to be stopped.

    Attributes:
        running: numbers of workers that have not ended.
        settled: True if everything that ends from now on ends on request.
        init: knows which ranks the others wait for at the start; None if that is not watched.
    """

    def __init__(
        self,
        outcome: JobOutcome,
        observer: SupervisionObserver,
        stop: Callable[[], None],
        stopping: Callable[[str], None],
    ) -> None:
        self.running: set[int] = set()
        self.settled = False
        self.init: InitWatch | None = None
        self._outcome = outcome
        self._observer = observer
        self._stop = stop
        self._stopping = stopping

    @property
    def over(self) -> bool:
        """True if no worker runs, and none will be started: until the end is decided, others may follow."""
        return self.settled and not self.running

    @property
    def next(self) -> float | None:
        """Time at which ``keep_time`` has something to do, on the monotonic clock."""
        return self.init.next if self.init is not None and not self.settled else None

    def started(self, number: int) -> None:
        """Record that a worker was told to start."""
        self.running.add(number)
        self._outcome.statuses[number] = None

    def spawned(self, number: int, pid: int) -> None:
        """Record that a worker was started as this process of its host."""
        if self.init is not None:
            self.init.spawned(number, pid)

    def exited(self, host: str, frame: Exited) -> None:
        """Record that a worker has ended."""
        self._record(frame)
        if self.init is not None:
            self.init.ended(frame.number, frame.status)
            self._watch_init(time.monotonic())

    def not_started(self, host: str, frame: SpawnFailed) -> None:
        """Record that a worker could not be started."""
        self._record(frame)

    def _record(self, frame: Exited | SpawnFailed) -> None:
        self.running.discard(frame.number)
        self._outcome.statuses[frame.number] = frame.status

    def gone(self, numbers: Iterable[int]) -> None:
        """Record the loss of workers with their host: nothing will report their ends."""
        self.running.difference_update(numbers)

    def fail(self, failure: Failure) -> None:
        """End the job, which cannot continue, whichever workers are left."""
        if not self.settled:
            self._outcome.first = failure
            self._stop()

    def keep_time(self, now: float) -> None:
        """Do what is due. Called in each turn of the loop."""
        self._watch_init(now)

    def _watch_init(self, now: float) -> None:
        """Report the workers that others wait for in ``hvd.init()``, and stop the job if they will never call it."""
        if self.init is None or self.settled:
            return
        text = self.init.report(now)
        if text:
            self._observer.notice(text)
        failure = self.init.verdict()
        if failure is not None:
            self.fail(failure)
