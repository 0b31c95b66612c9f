"""Connections between threads that stand for ranks, as a ``butterfly.Wire``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from hvdgloo._backends.butterfly import Bytes


class Line:
    """From one rank to another. A send is carried out when it is received, as late as a transport may need its memory:
    what is written too early arrives changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[deque[tuple[Bytes, threading.Event]]] = [deque(), deque()]

    def begin(self, data: Bytes, *, sends: bool) -> threading.Event:
        """Send or receive; the event is set when that has happened."""
        assert data.size
        done = threading.Event()
        with self._lock:
            self._waiting[sends].append((data, done))
            if all(self._waiting):
                (target, received), (source, sent) = (waiting.popleft() for waiting in self._waiting)
                assert source.size == target.size
                np.copyto(target, source)
                sent.set()
                received.set()
        return done

    @property
    def is_empty(self) -> bool:
        """True if everything was received."""
        return not any(self._waiting)


class Lines:
    """A line in each direction between any two of ``size`` ranks.

    Args:
        on_send: called with the sender and the number of bytes.
    """

    def __init__(self, size: int, on_send: Callable[[int, int], None] = lambda rank, nbytes: None) -> None:
        self._lines = {(a, b): Line() for a in range(size) for b in range(size)}
        self._on_send = on_send

    def wire(self, rank: int) -> LineWire:
        """Return a rank's end of its lines."""
        return LineWire(rank, self._lines, self._on_send)

    @property
    def are_empty(self) -> bool:
        """True if everything was received."""
        return all(line.is_empty for line in self._lines.values())


class LineWire:
    """One rank's end of its lines."""

    def __init__(self, rank: int, lines: dict[tuple[int, int], Line], on_send: Callable[[int, int], None]) -> None:
        self._rank, self._lines, self._on_send = rank, lines, on_send

    def send(self, data: Bytes, peer: int) -> threading.Event:
        self._on_send(self._rank, data.size)
        return self._lines[self._rank, peer].begin(data, sends=True)

    def receive(self, data: Bytes, peer: int) -> threading.Event:
        return self._lines[peer, self._rank].begin(data, sends=False)

    def wait(self, begun: threading.Event) -> None:
        assert begun.wait(10)
