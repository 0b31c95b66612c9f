"""Exchanges that an interrupt may break off, and that are not made twice: the other ranks have this rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hvdgloo._platform import interrupts

T = TypeVar("T")


class ResumableExchanges:
    """Exchanges with all ranks. If Ctrl-C ends the wait for one, the next call waits for the same one."""

    def __init__(self) -> None:
        self._under_way: dict[str, Callable[[], Any]] = {}

    def __contains__(self, what: str) -> bool:
        return what in self._under_way

    def clear(self) -> None:
        """Wait for none that are under way."""
        self._under_way.clear()

    def make(self, what: str, start: Callable[[], Callable[[], T]], use: Callable[[T], None]) -> None:
        """Make an exchange, and use its result.

        Args:
            what: tells the exchange from others.
            start: starts it, unless it is under way; returns a function that waits for the result.
            use: called with the result. Ctrl-C does not interrupt it.
        """
        wait = self._under_way.get(what)
        if wait is None:
            held = interrupts.hold()
            try:
                wait = self._under_way[what] = start()
            finally:
                interrupts.release(held)
        try:
            result = wait()
        except Exception:
            del self._under_way[what]
            raise
        held = interrupts.hold()
        try:
            del self._under_way[what]
            use(result)
        finally:
            interrupts.release(held)
