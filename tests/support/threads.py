"""Calls on threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """A call on a thread of its own, and what became of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: list[T] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:
            self.error = error

    def result(self, timeout: float = 20.0) -> T:
        """Return its result; raise its exception."""
        self.thread.join(timeout)
        assert not self.thread.is_alive(), f"still running after {timeout:g} s"
        if self.error is not None:
            raise self.error
        return self._result[0]

    def failure(self, timeout: float = 20.0) -> BaseException:
        """Return its exception."""
        self.thread.join(timeout)
        assert not self.thread.is_alive(), f"still running after {timeout:g} s"
        assert self.error is not None, f"returned {self._result}"
        return self.error


def at_once(*calls: Callable[[], T], timeout: float = 20.0) -> list[T]:
    """Call each on a thread of its own, all at the same time; return their results."""
    return [task.result(timeout) for task in [Task(call) for call in calls]]
