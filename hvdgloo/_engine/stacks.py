"""The stacks of a rank's threads, for the ranks that wait for it."""

from __future__ import annotations

import logging
import sys
import threading
import traceback

from hvdgloo._platform import stall_causes
from hvdgloo._platform.own_frames import without_own

logger = logging.getLogger(__name__)

THREAD_PREFIX = "hvdgloo-"
"""Names of the engine's own threads begin with this; their stacks are of no interest to users."""

_FRAMES_SHOWN = 12


def python_stacks() -> str:
    """The stacks of this process's Python threads except the engine's own, innermost call last, up to where the program
    called hvdgloo. Before them, what is known about why this rank may be late.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, stack in sys._current_frames().items():
        name = names.get(ident, "?")
        if not name.startswith(THREAD_PREFIX):
            frames = traceback.extract_stack(stack)
            shown = frames if logger.isEnabledFor(logging.DEBUG) else without_own(frames)
            parts.append(f"thread {name}:\n{''.join(traceback.format_list(shown[-_FRAMES_SHOWN:])).rstrip()}")
    return "\n".join([*stall_causes.known(), *(parts or ["no Python thread but the engine's"])])
