"""The timelines that a process is writing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdgloo._engine.timeline import Timeline, Timelines


class OpenTimelines:
    """The program's own timeline, and one that an observer of the job asked for; each is independent of the other.

    Args:
        rank: of this process.
        show: called with what events go to from now on, None for nothing.
    """

    def __init__(self, rank: int, show: Callable[[Timeline | Timelines | None], None]) -> None:
        self._rank, self._show = rank, show
        self._lock = threading.Lock()
        self._open: dict[bool, Timeline] = {}  # by ``asked_for``
        self._closed = False

    def start(
        self, path: str, *, clock_offset: float = 0.0, mark_cycles: bool = False, asked_for: bool = False
    ) -> bool:
        """Trace operations into a file from now on, until ``stop`` or the end.

        Args:
            asked_for: by an observer.

        Returns:
            False if such a timeline is already being written, or no more may be: then nothing was done.

        Raises:
            ConfigError: the file cannot be written.
        """
        with self._lock:
            if self._closed or asked_for in self._open:
                return False
            from hvdgloo._engine.timeline import Timeline

            self._open[asked_for] = Timeline(path, self._rank, clock_offset, mark_cycles=mark_cycles)
            self._show_all()
            return True

    def stop(self, *, asked_for: bool = False) -> None:
        """End that timeline, if there is one; its file is complete then."""
        with self._lock:
            timeline = self._open.pop(asked_for, None)
            if timeline is not None:
                self._show_all()
                timeline.close()

    def close(self) -> None:
        """End both, and start no more."""
        with self._lock:
            self._closed = True
        for asked_for in list(self._open):
            self.stop(asked_for=asked_for)
        self._show = _nowhere  # which refers to the owner

    def after_fork_in_child(self) -> None:
        """Leave them to the parent, which has the threads that write them."""
        self._lock, self._open, self._closed = threading.Lock(), {}, True

    def _show_all(self) -> None:
        first, *others = self._open.values() or [None]
        if others:
            from hvdgloo._engine.timeline import Timelines

            self._show(Timelines(*self._open.values()))
        else:
            self._show(first)


def _nowhere(timeline: object) -> None:
    """Send events nowhere."""
