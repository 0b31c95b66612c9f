"""The interpreter's effort, as a number that is the same on every machine and under every load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def effort(work: Callable[[], object]) -> int:
    """The number of bytecodes that a call executes in this thread: calls count, and every turn of a loop. What a single
    built-in function does inside itself does not."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    # Python 3.12 looks only now whether any frame wants to know of bytecodes.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
