"""An engine's own threads, and the stacks of a rank's other threads, for the ranks that wait for it."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable

from hvdgloo._platform import stall_causes
from hvdgloo._platform.own_frames import without_own

logger = logging.getLogger(__name__)

_PREFIX = "hvdgloo-"
"""Names of the engine's own threads begin with this; their stacks are of no interest to users."""

_FRAMES_SHOWN = 12


class ThreadOwner:
    """A part of an engine that works on a thread of its own.

    Args:
        name: of the thread, without the prefix.
        run: what the thread does.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name=f"{_PREFIX}{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def native_id(self) -> int:
        """The system's id of the running thread."""
        assert self._thread.native_id is not None
        return self._thread.native_id

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; False if it has not ended within ``timeout`` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def python_stacks() -> str:
    """The stacks of this process's Python threads except the engine's own, innermost call last, up to where the program
    called hvdgloo. Before them, what is known about why this rank may be late.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, stack in sys._current_frames().items():
        name = names.get(ident, "?")
        if not name.startswith(_PREFIX):
            frames = traceback.extract_stack(stack)
            shown = frames if logger.isEnabledFor(logging.DEBUG) else without_own(frames)
            parts.append(f"thread {name}:\n{''.join(traceback.format_list(shown[-_FRAMES_SHOWN:])).rstrip()}")
    return "\n".join([*stall_causes.known(), *(parts or ["no Python thread but the engine's"])])
