"""Which signals a launcher takes over while its job runs, and for how long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import TypeAlias

from hvdgloo.runner.job.outcome import Failure

COMMAND_LINE_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Those of them that end a job."""
LIBRARY_SIGNALS = (signal.SIGINT, signal.SIGTSTP)
"""What ``hvdgloo.run.run`` takes over while it runs: the others are up to the calling program."""


@contextmanager
def passed_on(signals: Sequence[signal.Signals], note: Callable[[int], None]) -> Iterator[Callable[[], bool]]:
    """Take over signals for a while, passing them to ``note``.

    Signals that are ignored (nohup, a shell's background job) stay so, and so do handlers that the calling program has
    installed. Only a main thread can do this; elsewhere nothing changes. Afterwards everything is as before, except
    that ``COMMAND_LINE_SIGNALS`` are ignored if one of them has ended the job: the command ends by that signal, with
    the corresponding exit status.

    Yields:
        a function that says whether a signal has come since its first call.
    """
    came: list[int] = []

    def handler(signum: int, _frame: FrameType | None) -> None:
        came.append(signum)
        note(signum)

    previous: dict[signal.Signals, object] = {}
    if threading.current_thread() is threading.main_thread():
        for signum in signals:
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                previous[signum] = signal.signal(signum, handler)
    asked: list[int] = []

    def signal_came() -> bool:
        if not asked:
            asked.append(len(came))
        return len(came) > asked[0]

    try:
        yield signal_came
    finally:
        ending = signals is COMMAND_LINE_SIGNALS and not ENDING.isdisjoint(came)
        for signum, old in previous.items():
            signal.signal(signum, signal.SIG_IGN if ending else old)  # type: ignore[arg-type]


Outside: TypeAlias = Callable[[Callable[[Failure], None]], AbstractContextManager[None]]
"""Given what is to be called, from any thread, when another system in which agents live says that the job cannot go on;
it is as long as the context lasts.
"""


def nobody(note: Callable[[Failure], None]) -> AbstractContextManager[None]:
    """Agents live in no other system."""
    return nullcontext()


class Interrupts:
    """Passes signals on to the attempt that is being made.

    Attributes:
        ending: the last signal that was to end the job; None if there was none.
    """

    def __init__(self) -> None:
        self.ending: int | None = None
        self._to: Callable[[int], None] | None = None

    def came(self, signum: int) -> None:
        """A signal has come."""
        if signum in ENDING:
            self.ending = signum
        if self._to is not None:
            self._to(signum)

    @contextmanager
    def passed_to(self, note: Callable[[int], None]) -> Iterator[None]:
        """Pass them to ``note`` for a while, and also one that came between this attempt and the last."""
        self._to = note
        if self.ending is not None:
            note(self.ending)
        try:
            yield
        finally:
            self._to = None
