"""Errors that pass through a framework's native code, which preserves only a text.

``mark`` remembers an error and returns a text to put into its message; ``recall`` finds the error by such a text.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import OrderedDict

from hvdgloo.errors import HvdglooError

_MARK = re.compile(r"\[hvdgloo error (\d+)\]")
_KEPT = 64

_errors: OrderedDict[int, HvdglooError] = OrderedDict()
_numbers = itertools.count(1)
_lock = threading.Lock()


class ForeignError(RuntimeError):
    """The error that our code raises into a framework's: its text names our error's class and contains the mark."""

    def __init__(self, error: HvdglooError) -> None:
        super().__init__(f"{type(error).__name__}: {error} {mark(error)}")


def mark(error: HvdglooError) -> str:
    """Remember an error (only the last few are kept) and return its mark."""
    number = next(_numbers)
    with _lock:
        _errors[number] = error.with_traceback(None)  # the traceback's frames hold tensors
        while len(_errors) > _KEPT:
            _errors.popitem(last=False)
    return f"[hvdgloo error {number}]"


def recall(text: object) -> HvdglooError | None:
    """Return the error whose mark is in a text; None if there is none."""
    found = _MARK.search(text) if isinstance(text, str) else None
    if found is None:
        return None
    with _lock:
        return _errors.get(int(found[1]))
