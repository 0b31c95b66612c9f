"""hvdgloo's own frames at the end of a stack, which say nothing about the program's mistake and hide its own line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from traceback import FrameSummary

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The directory of hvdgloo."""


_INSTALLED = f"{os.sep}site-packages{os.sep}"
_HANDS_OVER = tuple(os.path.join("torch", "distributed", name) for name in ("distributed_c10d.py", "c10d_logger.py"))
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def is_of_program(filename: str) -> bool:
    """Tell whether a frame's file is the program's own: neither hvdgloo's nor Python's nor an installed package's."""
    return not (filename.startswith((FOLDER, _STDLIB, "<frozen ")) or _INSTALLED in filename)


def without_between(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    """Return a stack, outermost frame first, without hvdgloo's frames that called the program.

    What follows the program's last frame is kept.
    """
    stack = list(frames)
    last = max((at for at, frame in enumerate(stack) if is_of_program(frame.filename)), default=0)
    return [frame for at, frame in enumerate(stack) if at >= last or not frame.filename.startswith(FOLDER)]


def before_own(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    """Return a stack, outermost frame first, up to where the program, or a library that it called, called hvdgloo.

    Unlike in ``without_own``, it does not matter which modules hvdgloo has called in turn.
    """
    stack = list(frames)
    last = max((at for at, frame in enumerate(stack) if is_of_program(frame.filename)), default=-1)
    own = (at for at, frame in enumerate(stack) if at > last >= 0 and frame.filename.startswith(FOLDER))
    return stack[: next(own, len(stack))]


def without_own(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    """Return a stack, outermost frame first, up to where the program called hvdgloo.

    The frames by which torch.distributed hands a call to hvdgloo are left out as well. A stack without any of the
    program's frames, such as one of hvdgloo's threads, is kept: there is nothing else.
    """
    stack = list(frames)
    kept = list(stack)
    while kept and kept[-1].filename.startswith(FOLDER):
        kept.pop()
    while len(kept) < len(stack) and kept and kept[-1].filename.endswith(_HANDS_OVER):
        kept.pop()
    return kept or stack
