"""hvdgloo's own frames at the end of a stack, which say nothing about the program's mistake and hide its own line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from traceback import FrameSummary

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Where hvdgloo is."""


def without_own(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    """A stack, outermost frame first, up to where the program called hvdgloo.

    One without any of the program's frames, such as that of a thread of ours, is kept: there is nothing else.
    """
    stack = list(frames)
    kept = list(stack)
    while kept and kept[-1].filename.startswith(FOLDER):
        kept.pop()
    return kept or stack
