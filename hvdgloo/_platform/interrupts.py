"""Ctrl-C while a command starts or ends: it is over at once, without a word, and without a traceback of imports."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def end_at_once() -> None:
    """From now on Ctrl-C ends this process, with the status that shells give; for times in which nothing has to be
    cleaned up. Whoever ignores Ctrl-C (a shell's background job), or handles it, goes on doing so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + signum)
