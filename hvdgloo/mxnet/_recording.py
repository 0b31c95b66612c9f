"""A collective as a node of MXNet's autograd.

``mx.autograd.Function`` would be the ordinary way. It loses gradients, though: those that are to be added to what is
there (``grad_req="add"``), and all of a group as soon as one input needs none. So this is done here with the function
of MXNet's C interface that ``Function`` also calls.

MXNet runs the backward callback in threads of its own, several at a time: rules must not rely on an order. If several
fail at once, it reports one; the log has all.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_int, c_void_p
from typing import Any

from mxnet.base import _LIB, MXCallbackList, MXNetError, NDArrayHandle, c_handle_array, check_call
from mxnet.ndarray import NDArray, waitall

from hvdgloo.errors import HvdglooError
from hvdgloo.mxnet._shapes import numpy_shapes

_log = logging.getLogger(__name__)

Rule = Callable[[Sequence[Any]], Sequence[Any]]

_NOTHING, _ADD = 0, 3
"""Requests for a gradient; anything else means to write it."""
_MARK = "kCustomFunctionBackward"
"""A part of the text of MXNet's error when a backward callback has reported failure."""

_numbers = itertools.count(1)
_nodes: dict[int, tuple[Rule, Any, Any]] = {}
"""For nodes that MXNet may still call: the rule, and memory that MXNet reads."""
_last_failure: HvdglooError | None = None


def record(inputs: Sequence[Any], outputs: Sequence[Any], rule: Rule) -> None:
    """Tell autograd, which must be recording, that ``outputs`` were computed from ``inputs``.

    Args:
        inputs, outputs: arrays; outputs are new ones.
        rule: gradients of the outputs to gradients of the inputs, as classic arrays. Cannot be differentiated itself.
    """
    number = next(_numbers)
    contexts = (c_void_p * 2)(number, number)
    callbacks = MXCallbackList(2, _CALLBACKS, ctypes.cast(contexts, POINTER(c_void_p)))
    _nodes[number] = rule, callbacks, contexts
    check_call(
        _LIB.MXCustomFunctionRecord(
            c_int(len(inputs)),
            c_handle_array(inputs),
            c_int(len(outputs)),
            c_handle_array(outputs),
            ctypes.byref(callbacks),
        )
    )


def failure_behind(error: Exception) -> HvdglooError | None:
    """Return the error of a rule, if that is why MXNet raised ``error``. MXNet passes on only that something failed."""
    return _last_failure if _MARK in str(error) else None


def settle() -> None:
    """Wait until MXNet has computed all that the program has asked for, rules among it.

    The program's end is the time for it: MXNet skips what it has not begun when it ends itself, and if that is what
    would report the end of a rule, it waits for the report forever.

    Raises:
        MXNetError: something failed that is no rule; what rules raised has been logged.
    """
    try:
        waitall()
    except MXNetError as error:
        if failure_behind(error) is None:
            raise


def _on_backward(outputs: int, inputs: int, handles: Any, requests: Any, is_train: int, number: int) -> bool:
    global _last_failure
    # All are ours to free, whether they are used or not.
    arrays = [NDArray(ctypes.cast(handles[i], NDArrayHandle), writable=i >= outputs) for i in range(outputs + inputs)]
    try:
        with numpy_shapes():
            gradients = _nodes[number][0](arrays[:outputs])
            for target, gradient, request in zip(arrays[outputs:], gradients, requests[:inputs], strict=True):
                if request == _NOTHING or target.size == 0:
                    continue
                if request == _ADD:
                    target += gradient
                else:
                    target[:] = gradient
    except Exception as error:  # noqa: BLE001 - nothing may leave a callback; the wait for the gradient raises it
        _log.error("the gradient of a collective failed: %s: %s", type(error).__name__, error)
        if isinstance(error, HvdglooError):
            _last_failure = error.with_traceback(None)  # whose frames hold arrays
        return False
    return True


def _on_delete(number: int) -> bool:
    _nodes.pop(number, None)
    return True


_PLAIN = CFUNCTYPE(c_int)
_on_backward_c = CFUNCTYPE(c_int, c_int, c_int, POINTER(c_void_p), POINTER(c_int), c_int, c_void_p)(_on_backward)
_on_delete_c = CFUNCTYPE(c_int, c_void_p)(_on_delete)
_CALLBACKS = (_PLAIN * 2)(ctypes.cast(_on_backward_c, _PLAIN), ctypes.cast(_on_delete_c, _PLAIN))
