"""One thread's loop over descriptors and deadlines, which other threads and signal handlers can wake."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


class WakeUp:
    """Ends a thread's wait in a selector with which this is registered for reading."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        # So that a descriptor is not closed, and its number reused, while it is written to. Reentrant, since a signal
        # handler may interrupt the thread that holds it.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Return the end that becomes readable."""
        return self._reading

    @property
    def writing_fd(self) -> int:
        """The other end, for ``signal.set_wakeup_fd``."""
        return self._writing

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must not keep open."""
        return [self._writing, self._reading]

    def wake(self) -> None:
        """End the wait, or the next one. Safe in a signal handler and in any thread, even after ``close``."""
        with self._lock:
            if self._writing >= 0:
                try:
                    os.write(self._writing, b"\0")
                except BlockingIOError:
                    pass  # full: it is awake already

    def clear(self) -> None:
        """Forget the wake-up. The woken thread calls this before it looks for the reason."""
        try:
            os.read(self._reading, 4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the descriptors. May be called again."""
        with self._lock:
            for descriptor in self.descriptors:
                if descriptor >= 0:
                    os.close(descriptor)
            self._reading = self._writing = -1


class Writer(Protocol):
    """Keeps bytes that its descriptor does not accept yet, and writes them in ``flush``."""

    send_fd: int

    def flush(self) -> None: ...


class EventLoop:
    """A selector whose registered data are called.

    Attributes:
        selector: for descriptors to be served; their data is called without arguments.
        wake_up: has the thread check for work.
    """

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.wake_up = WakeUp()
        self.selector.register(self.wake_up, selectors.EVENT_READ, self.wake_up.clear)
        self._notes: deque[Callable[[], None]] = deque()
        self._urgent: deque[Callable[[], None]] = deque()
        self._writers: set[Writer] = set()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Have the loop call a function. Safe in a signal handler and in any thread; does nothing after ``close``."""
        self._notes.append(action)
        self.wake_up.wake()

    def call_first(self, action: Callable[[], None]) -> None:
        """Do as ``call_soon``, before everything that was left there, which may be much and no longer needed."""
        self._urgent.append(action)
        self.wake_up.wake()

    def watch_writes(self, writer: Writer, *, wanted: bool) -> None:
        """Call the writer's ``flush`` whenever its descriptor accepts bytes, as long as ``wanted``."""
        if wanted == (writer in self._writers):
            return
        if wanted:
            self.selector.register(writer.send_fd, selectors.EVENT_WRITE, writer.flush)
            self._writers.add(writer)
        else:
            self.selector.unregister(writer.send_fd)
            self._writers.remove(writer)

    def turn(self, until: float) -> None:
        """Serve what is ready; if nothing is, wait for it until a time on the monotonic clock."""
        for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
            key.data()
        while notes := self._urgent or self._notes:
            notes.popleft()()

    def close(self) -> None:
        self.selector.close()
        self.wake_up.close()
