"""Pickling of what other processes are to call: cloudpickle's, except that code keeps the name of its file.

Since version 3.1.3, cloudpickle calls every file ``<dynamic-code>``, so that equal functions have equal pickles. A
traceback, a stall report or a profile of a worker would then say neither where a line is nor what it says.

For what is sent, not for what is stored: reading such a pickle needs this module.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


def naming_files(pickler: type[Any]) -> type[Any]:
    """One of cloudpickle's picklers (Ray has a copy of its own), with files named."""
    reduce = pickler.dispatch_table[CodeType]

    def reduced(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
        make, arguments = reduce(code)
        return _named, (code.co_filename, make, arguments)

    class Naming(pickler):  # type: ignore[misc]
        dispatch_table = pickler.dispatch_table.new_child({CodeType: reduced})

    return Naming


def _named(filename: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


Pickler = naming_files(cloudpickle.Pickler)
"""cloudpickle's, with files named."""


def dumps(value: Any, *, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Return a value's pickle; ``pickle.loads`` reads it.

    Args:
        buffer_callback: called with each large buffer that is left out (PEP 574).

    Raises:
        Exception: whatever an object raises that cannot be pickled.
    """
    file = io.BytesIO()
    Pickler(file, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()
