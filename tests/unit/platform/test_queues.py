"""Waiting for a queue with a deadline."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

import pytest

from hvdgloo._platform.queues import take_within
from tests.support.threads import Task


def test_a_deadline_holds_however_short_it_is_and_whatever_came_before() -> None:
    """A ``get`` of Python's own hangs after some thousands of these, up to Python 3.12."""
    items: queue.SimpleQueue[int] = queue.SimpleQueue()

    def use() -> None:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            items.put(1)
            assert items.get() == 1  # which did not have to wait
            with contextlib.suppress(queue.Empty):
                take_within(items, 1e-9)
                pytest.fail("nothing was there")

    Task(use).result()


def test_what_is_there_and_what_comes_in_time_is_taken() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    items.put(1)
    assert take_within(items, 0.0) == 1
    timer = threading.Timer(0.01, items.put, (2,))
    timer.start()
    assert take_within(items, 30.0) == 2
    timer.join(10)
