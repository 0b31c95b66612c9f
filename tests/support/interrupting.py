"""Ctrl-C at any line of the library, one after the other."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hvdgloo

_FOLDER = str(Path(hvdgloo.__file__).parent)


def at_each_line(trial: Callable[[int], bool], stride: int = 1) -> None:
    """Try it with Ctrl-C at each ``stride``-th line, until there is none any more.

    Args:
        trial: given the line for ``interrupted_at``, returns its answer.
    """
    line = 0
    while trial(line):
        line += stride
    assert line > 10, "hardly any line was run"


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    """Call something on the main thread, and have Ctrl-C come before the library's ``line``-th line that runs in it.

    Returns:
        whether it came, and raised.
    """
    left = line
    came = False

    def within(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left, came
        if event == "line" and not came:
            code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if code.startswith("with "):
                return within  # also traced just before __exit__ is called, where Python never runs a handler
            left -= 1
            if left < 0:
                came = True
                signal.raise_signal(signal.SIGINT)
        return within

    def look(frame: FrameType, event: str, argument: object) -> Any:
        return within if frame.f_code.co_filename.startswith(_FOLDER) and not came else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert not came, "Ctrl-C came, and was lost"
    return False
