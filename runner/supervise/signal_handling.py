"""The effects of signals to the launcher on its job.

The first signal that requests the end is passed on, and leaves workers time to save their work; a second one kills
them. Ctrl-Z stops the launcher like any program, but not the workers.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Protocol

from hvdgloo.runner.job.outcome import JobOutcome
from hvdgloo.runner.protocol.frames import Frame, Signal, Suspend

_FLUSH_TIME = 1.0  # seconds that telling the agents of Ctrl-Z may take


class Job(Protocol):
    """The part of the supervisor that signals need."""

    outcome: JobOutcome

    @property
    def running(self) -> bool:
        """True if there are workers that have not ended."""

    def notice(self, text: str) -> None:
        """Show a notice to the user."""

    def notice_unless_over(self, text: str) -> None:
        """Show a notice, unless all workers end within a moment: for a job that ends at once, the summary suffices."""

    def interrupted(self) -> None:
        """Prepare for the interruption of the workers by Ctrl-C."""

    def tell_all(self, frame: Frame) -> None:
        """Send a frame to all agents."""

    def flush(self, seconds: float) -> None:
        """Wait until all frames to agents have been sent, for at most this many seconds."""

    def stop(self, signum: int, grace: float) -> None:
        """End the workers with a signal, and kill the rest after ``grace`` seconds."""

    def kill(self) -> None:
        """End everything now."""


class SignalHandling:
    """The handling of signals in the loop; signal handlers only leave a note.

    Args:
        grace: seconds that workers have to end after the first signal.
        suspend: called before the launcher stops itself.
    """

    def __init__(self, job: Job, grace: float, suspend: Callable[[], None]) -> None:
        self._job = job
        self._grace = grace
        self._before_suspension = suspend
        self._killing = False

    def came(self, signum: int) -> None:
        """Act on a signal."""
        if signum == signal.SIGTSTP:
            self._suspend()
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self._job.tell_all(Signal(signum))
        elif self._job.outcome.interrupted is not None:
            if not self._killing:
                self._job.notice("killing the workers")
            self._killing = True
            self._job.kill()
        elif self._job.outcome.first is not None:
            self._job.kill()  # they have been stopped already
        else:
            self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        self._job.outcome.interrupted = signum
        if self._job.running:
            if signum == signal.SIGINT:
                self._job.interrupted()
            self._job.notice_unless_over(
                f"{signal.Signals(signum).name} is passed on to the workers, which have {self._grace:g} s to end; "
                f"{'Ctrl-C again' if signum == signal.SIGINT else 'a second signal'} kills them at once"
            )
        # The reader of a pipe has gone; that signal means nothing to workers.
        self._job.stop(signal.SIGTERM if signum == signal.SIGPIPE else signum, self._grace)

    def _suspend(self) -> None:
        """Stop like any program at Ctrl-Z, after telling the agents that silence will follow."""
        self._job.tell_all(Suspend(True))
        self._before_suspension()
        self._job.flush(_FLUSH_TIME)
        previous = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
        signal.raise_signal(signal.SIGTSTP)
        # Execution continues here at SIGCONT.
        signal.signal(signal.SIGTSTP, previous)
        self._job.tell_all(Suspend(False))
