"""Ctrl-C: a command that starts or ends is over at once, without a traceback of imports; what must not be left half
done is finished first.

Python runs a signal's handler, which raises KeyboardInterrupt, between any two instructions of the main thread. A
caller that catches it and goes on must find either nothing done or all of it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own functions make enums of their results, and take longer
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, cast

Held = Callable[[int, FrameType | None], Any] | None
"""The handler that ``release`` restores; None if ``hold`` had nothing to do."""

_came = False
_handler: Held = None  # that Ctrl-C had before the last ``hold``


def end_at_once() -> None:
    """From now on Ctrl-C ends this process, with the status that shells give; for times in which nothing has to be
    cleaned up. A process that ignores Ctrl-C (a shell's background job), or handles it, continues to do so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + signum)


def hold() -> Held:
    """From now on Ctrl-C waits for ``release``; a second one does not, since what is being done may have got stuck.

    Costs half a microsecond. Other signals, whose handlers may raise as well, are not held back.

    Returns:
        what ``release`` needs; None on other threads than the main one, where no handler runs, within another ``hold``,
        and where Ctrl-C raises nothing.
    """
    global _came, _handler
    if threading.get_ident() != _main_thread:
        return None
    handler = cast(Held, _signal.getsignal(_signal.SIGINT))
    if handler is _note or not callable(handler):
        return None
    _came, _handler = False, handler
    _signal.signal(_signal.SIGINT, _note)
    return handler


def release(held: Held) -> None:
    """Undo ``hold``; a Ctrl-C that came meanwhile raises here what it would have raised there."""
    if held is None:
        return
    try:
        _signal.signal(_signal.SIGINT, held)
    except BaseException:  # another signal's handler, which runs in there, has raised before anything was done
        _signal.signal(_signal.SIGINT, held)
        raise
    if _came:
        held(_signal.SIGINT, sys._getframe())


def pending() -> bool:
    """Tell whether a Ctrl-C waits for ``release``."""
    return _came and threading.get_ident() == _main_thread and _signal.getsignal(_signal.SIGINT) is _note


def _note(signum: int, frame: FrameType | None) -> None:
    global _came
    if _came and _handler is not None:
        _handler(signum, frame)
    _came = True


_main_thread = threading.main_thread().ident


def _after_fork_in_child() -> None:
    """Nothing releases what another thread of the parent, which does not exist here, has held."""
    global _main_thread
    _main_thread = threading.get_ident()
    if _signal.getsignal(_signal.SIGINT) is _note:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


os.register_at_fork(after_in_child=_after_fork_in_child)
