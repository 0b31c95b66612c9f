"""Errors on their way through TensorFlow's graphs.

A Python exception in a graph's operator reaches the caller as ``tf.errors.UnknownError`` with a text: neither the
exception's class nor its facts survive. Here ``guarded`` marks the text (see ``hvdgloo._platform.error_tokens``), and
where TensorFlow makes an UnknownError with such a mark, it gets one that is ours as well: both ``except
hvd.HorovodInternalError`` and ``except tf.errors.UnknownError`` catch it, whether a ``tf.function``, ``fit`` or a
session ran the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdgloo._platform.error_tokens import ForeignError, recall
from hvdgloo.errors import HvdglooError

_classes: dict[type, type] = {}


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A graph's operator, called with arrays, whose errors arrive as ours."""
    _install()

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*map(np.asarray, args))  # a tensor without dimensions arrives as a number
        except HvdglooError as error:
            raise ForeignError(error) from error

    return call


def _install() -> None:
    """Have ``tf.errors.UnknownError(node_def, op, message)`` look for the mark, from now on and throughout the process.

    TensorFlow's native code makes these exceptions, and keeps the class itself, so no other class can take its place.
    """
    plain = tf.errors.UnknownError.__new__
    if hasattr(plain, "hvdgloo"):
        return

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        error = recall(args[2] if len(args) > 2 else kwargs.get("message"))
        if error is None or cls is not tf.errors.UnknownError:
            return plain(cls)
        return plain(_class_of(type(error)))

    new.hvdgloo = True  # type: ignore[attr-defined]
    tf.errors.UnknownError.__new__ = staticmethod(new)


def _class_of(ours: type) -> type:
    """A class for errors that are one of ours and one of TensorFlow's."""
    if ours not in _classes:
        members = {
            "__init__": _init,
            "__str__": lambda self: str(self.hvdgloo_error),
            "__reduce__": lambda self: (_itself, (self.hvdgloo_error,)),
            "__module__": ours.__module__,
            "__qualname__": ours.__qualname__,
            "__doc__": ours.__doc__,
        }
        _classes[ours] = type(ours.__name__, (ours, tf.errors.UnknownError), members)
    return _classes[ours]


def _init(self: Any, node_def: Any, op: Any, message: str, *rest: Any) -> None:
    tf.errors.UnknownError.__init__(self, node_def, op, message, *rest)
    error = recall(message)
    if error is not None:
        self.__dict__.update(error.__dict__)  # its facts: rank, host, ...
        self.hvdgloo_error = error  # not __cause__, which TensorFlow clears


def _itself(error: HvdglooError) -> HvdglooError:
    return error
