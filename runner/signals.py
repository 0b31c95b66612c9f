"""The signals that a launcher handles while its job runs."""

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
"""Signals that end a job."""
LIBRARY_SIGNALS = (signal.SIGINT, signal.SIGTSTP)
"""Signals that ``hvdgloo.run.run`` handles while it runs: the others are up to the calling program."""


@contextmanager
def passed_on(signals: Sequence[signal.Signals], note: Callable[[int], None]) -> Iterator[Callable[[], bool]]:
    """Handle signals for a while, passing them to ``note``.

    Signals that are ignored (nohup, a shell's background job) stay so, and so do handlers that the calling program has
    installed. Only a main thread can do this; elsewhere nothing changes. Afterwards everything is as before, except
    that ``COMMAND_LINE_SIGNALS`` are ignored if one of them has ended the job: the command ends by that signal, with
    the corresponding exit status.

    Yields:
        a function that tells whether a signal has arrived since its first call.
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
"""A context that watches another system in which agents live. It calls its argument, from any thread, if that system
reports that the job cannot go on.
"""


def no_outside_system(note: Callable[[Failure], None]) -> AbstractContextManager[None]:
    """Return a context that watches nothing, because agents live in no other system."""
    return nullcontext()


class Interrupts:
    """A switch that passes signals on to the current attempt.

    Attributes:
        ending: the last signal that was to end the job; None if there was none.
    """

    def __init__(self) -> None:
        self.ending: int | None = None
        self._to: Callable[[int], None] | None = None

    def came(self, signum: int) -> None:
        """Record a signal, and pass it on."""
        if signum in ENDING:
            self.ending = signum
        if self._to is not None:
            self._to(signum)

    @contextmanager
    def passed_to(self, note: Callable[[int], None]) -> Iterator[None]:
        """Pass signals to ``note`` for a while, including one that arrived between this attempt and the last."""
        self._to = note
        if self.ending is not None:
            note(self.ending)
        try:
            yield
        finally:
            self._to = None
