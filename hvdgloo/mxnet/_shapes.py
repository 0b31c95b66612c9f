"""Shapes with zero rows, and of scalars, which MXNet's legacy semantics do not have."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from mxnet.base import _LIB, check_call

_OFF, _ON = 0, 1


@contextmanager
def numpy_shapes() -> Iterator[None]:
    """Have this thread make arrays with numpy's shapes inside the block.

    Like ``mx.util.np_shape``, whose first use logs a message about a switch that the user has not touched.
    """
    was_on = _switch(_ON)
    try:
        yield
    finally:
        if not was_on:
            _switch(_OFF)


def _switch(semantics: int) -> bool:
    """Switch numpy's semantics on or off; return whether they were on before."""
    before = ctypes.c_int()
    check_call(_LIB.MXSetIsNumpyShape(ctypes.c_int(semantics), ctypes.byref(before)))
    return bool(before.value)
