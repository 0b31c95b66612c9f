"""One thread's loop over descriptors and deadlines, which other threads and signal handlers can have do something."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable


class Loop:
    """A selector whose registered data are called.

    Attributes:
        selector: for descriptors that are to be served; their data is called without arguments.
    """

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self.selector.register(self._wakeup, selectors.EVENT_READ, self._on_wakeup)
        self._notes: deque[Callable[[], None]] = deque()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Have the loop call something. Safe in a signal handler and in any thread."""
        self._notes.append(action)
        try:
            self._waker.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # it is awake already, or has ended

    def turn(self, until: float) -> None:
        """Serve what is there; if nothing is, wait for it until a moment on the monotonic clock."""
        for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
            key.data()
        while self._notes:
            self._notes.popleft()()

    def close(self) -> None:
        self.selector.close()
        self._wakeup.close()
        self._waker.close()

    def _on_wakeup(self) -> None:
        try:
            self._wakeup.recv(4096)
        except BlockingIOError:
            pass
