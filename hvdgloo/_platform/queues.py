"""Waiting for a queue with a deadline that holds."""

from __future__ import annotations

import queue
from typing import TypeVar

T = TypeVar("T")


def take_within(items: queue.SimpleQueue[T], seconds: float) -> T:
    """Do ``items.get(timeout=seconds)``, which up to Python 3.12 may wait until the next item is put.

    There, ``put`` leaves a lock open for a ``get`` that waits. Where the item was taken without waiting, the next
    ``get`` gets past the open lock, finds nothing, and waits for what is left of its time: if that is less than none,
    since the machine is busy or the time was short, without a limit. A ``get`` that does not wait closes the lock.

    Args:
        items: no other thread may take from it meanwhile, which would leave the lock open as well.
        seconds: how long to wait.

    Raises:
        queue.Empty: nothing was put in that time.
    """
    try:
        return items.get(block=False)
    except queue.Empty:
        return items.get(timeout=seconds)
