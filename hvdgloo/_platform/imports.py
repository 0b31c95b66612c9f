"""Importing beside a large framework."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Import without looking for garbage meanwhile.

    An import makes thousands of objects that stay, and by their number Python decides to go through all objects in
    search of garbage: 0.1 s where torch has been imported, for nothing. Does nothing where the program has switched the
    collector off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
