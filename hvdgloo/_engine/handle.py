"""A submitted collective's future.

It is resolved exactly once, by the engine, and may be waited for from any thread. A training step makes one for every
gradient and waits for few that have not ended, so what a wait needs is created by the waiter, and one lock, held only
briefly, serves all handles.
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdgloo.errors import HorovodInternalError, WaitTimeoutError
from hvdgloo.types import Buffer

if TYPE_CHECKING:
    from hvdgloo._observe.counters import Counters

_lock = _thread.allocate_lock()


def _after_fork_in_child() -> None:
    global _lock
    _lock = _thread.allocate_lock()  # the parent's may have been held by another of its threads


os.register_at_fork(after_in_child=_after_fork_in_child)


class Handle:
    """The result of ``Engine.submit``.

    Attributes:
        value: for a join, the rank that came last; for a process set that was added or removed, its id.
        name: the tensor's full name, as messages show it.
        outputs: where the results are, once ``done()``; in the order of the submitted tensors.
        order: once ``done()`` without an error, the operation's place among all that the job has carried out, the same
            on all its ranks and never given twice; -1 before, and where ranks needed no order for it (``offers``).
        ordered: when it was given that place, on the monotonic clock; 0 before, and where nothing is counted.
        ended: the same, where its result came with the order; else 0.
        counters: where the time is counted in which threads wait for it; None for nowhere.
        follow: called with the outputs by every thread that has waited: what it does next comes after the operation,
            which may still be under way on a GPU. None where the operation has ended altogether.
        before_waiting: called with the handle by a thread that is about to wait for it without a timeout: the engine
            may use the thread for a moment.
    """

    __slots__ = (
        "_callbacks",
        "_done",
        "_error",
        "_latch",
        "before_waiting",
        "counters",
        "ended",
        "follow",
        "name",
        "order",
        "ordered",
        "outputs",
        "value",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.outputs: tuple[Buffer, ...] = ()
        self.value = -1
        self.order = -1
        self.ordered = self.ended = 0.0
        self.counters: Counters | None = None
        self.follow: Callable[[Sequence[Buffer]], None] | None = None
        self.before_waiting: Callable[[Handle], None] | None = None
        self._error: BaseException | None = None
        self._done = False
        self._callbacks: list[Callable[[Handle], None]] | None = None
        self._latch: _thread.LockType | None = None

    def done(self) -> bool:
        """True once the operation has ended, well or not."""
        return self._done

    @property
    def error(self) -> BaseException | None:
        """The reason of its failure; None while pending, and after success."""
        return self._error

    def wait(self, timeout: float | None = None) -> tuple[Buffer, ...]:
        """Block until the operation has ended.

        Args:
            timeout: seconds; None waits as long as the engine does, which fails every handle when a peer is lost, an
                operation exceeds its deadline, or the engine ends.

        Returns:
            ``outputs``.

        Raises:
            WaitTimeoutError: it has not ended within ``timeout``. It goes on, and may be waited for again.
            HvdglooError: the operation's own failure.
        """
        if not self._done:
            began = time.monotonic()
            counters = self.counters
            if counters is not None:
                if counters.blocked_in is None:
                    counters.blocked_since = began
                    counters.blocked_in = self
                else:
                    counters = None  # another thread's time is being counted
            try:
                before_waiting = self.before_waiting
                if timeout is None and before_waiting is not None:
                    before_waiting(self)
                if not self._done:
                    self._sleep(timeout)
            finally:
                if counters is not None:
                    ended = self.ended
                    if ended > began:  # with the order itself; small operations are counted in no time
                        counters.blocked_in = None
                        counters.waiting += ended - began
                    else:
                        counters.unblocked(self.ordered, time.monotonic())
            if isinstance(self._error, HorovodInternalError):
                self._error.waiting_since = min(began, self._error.waiting_since)
        if self._error is not None:
            if isinstance(self._error, HorovodInternalError):
                self._error.operation = self._error.operation or self.name
            raise self._error.with_traceback(None)
        if self.follow is not None:
            self.follow(self.outputs)
        return self.outputs

    def _sleep(self, timeout: float | None) -> None:
        with _lock:
            if self._done:
                return
            latch = self._latch
            if latch is None:
                latch = _thread.allocate_lock()
                latch.acquire()
                self._latch = latch  # held already: an interrupt may come in between
        seconds = -1 if timeout is None else min(max(0.0, timeout), _thread.TIMEOUT_MAX)  # a lock does not take inf
        if not latch.acquire(timeout=seconds):
            raise WaitTimeoutError(f"{self.name} has not completed within {timeout:g} s; it is still pending")
        latch.release()

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call ``callback(self)`` once the operation has ended: at once if it has, else on the engine's thread.

        The callback must not block and must not raise.
        """
        with _lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback(self)

    def resolve(self, outputs: Sequence[Buffer] = (), error: BaseException | None = None, *, value: int = -1) -> bool:
        """End the operation; for the engine only. If it had already ended, nothing changes and the result is False."""
        with _lock:
            if self._done:
                return False
            self.outputs = tuple(outputs)
            self.value = value
            self._error = error
            self._done = True
            self.before_waiting = None
            latch, callbacks, self._callbacks = self._latch, self._callbacks, None
        if latch is not None:
            latch.release()
        for callback in callbacks or ():
            callback(self)
        return True
