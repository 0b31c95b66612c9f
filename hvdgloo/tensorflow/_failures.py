"""Our errors as TensorFlow's: an error of the front-end is also of the class in ``tf.errors`` that programs catch.

============================ ======================================================================
``FailedPreconditionError``   ranks disagree (``MismatchError``); ``init()`` has not been called
``InvalidArgumentError``      a call is wrong on this rank (``InvalidArgumentError``)
``UnknownError``              a collective failed otherwise, for example because a peer was lost
============================ ======================================================================

A Python exception in a graph's operator reaches the caller as ``tf.errors.UnknownError`` with a text: neither the
exception's class nor its facts survive. Here ``guarded`` marks the text (see ``hvdgloo._platform.error_tokens``), and
where TensorFlow makes an UnknownError with such a mark, it gets an error of the right class, whether a
``tf.function``, ``fit`` or a session ran the graph. That class must also be an UnknownError: native code raises the
error, and Python creates it again if it is not an instance of the class asked for. So all of them are.

While a function is traced, AutoGraph and Keras replace an error by a new one of the same class, made of their own text
around ours (``in user code: ...``). It takes its facts from the error that it replaces. Errors of ours that are none of
TensorFlow's would become AutoGraph's ``StagingError``; they pass as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from hvdgloo._platform.error_tokens import ForeignError, recall
from hvdgloo.errors import HorovodInternalError, HvdglooError, InvalidArgumentError, MismatchError, NotInitializedError

F = TypeVar("F", bound=Callable[..., Any])

_COUNTERPARTS: tuple[tuple[type[HvdglooError], type, int], ...] = (
    (MismatchError, tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    (NotInitializedError, tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    (InvalidArgumentError, tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
    (HorovodInternalError, tf.errors.UnknownError, tf.errors.UNKNOWN),
)
_OTHERS = tf.errors.UnknownError, tf.errors.UNKNOWN
_classes: dict[type, type] = {}


def _passes(error: HvdglooError) -> bool:
    if isinstance(error, tf.errors.OpError):
        raise AttributeError("AutoGraph makes it again, with the user's lines in its text")
    return True


HvdglooError.ag_pass_through = property(_passes)  # type: ignore[attr-defined]  # AutoGraph looks whether it is there


def also_tensorflows(function: F) -> F:
    """Decorate a function so that its errors with a counterpart in ``tf.errors`` are of that class as well."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except HvdglooError as error:
            if isinstance(error, tf.errors.OpError) or not isinstance(error, tuple(ours for ours, *_ in _COUNTERPARTS)):
                raise
            made = _class_of(type(error))(None, None, str(error))
            _adopt(made, error)
            raise made.with_traceback(error.__traceback__) from error.__cause__

    return cast(F, call)


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of a graph's operator, which is called with arrays, so that its errors arrive as ours."""
    _install()

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*map(np.asarray, args))  # a tensor without dimensions arrives as a number
        except HvdglooError as error:
            raise ForeignError(getattr(error, "hvdgloo_error", error)) from error

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
    """Make a class for errors that are one of ours and one of TensorFlow's."""
    if ours not in _classes:
        pairs = ((theirs, code) for known, theirs, code in _COUNTERPARTS if issubclass(ours, known))
        theirs, code = next(pairs, _OTHERS)

        def init(self: Any, node_def: Any = None, op: Any = None, message: Any = None, *rest: Any) -> None:
            if message is None:
                node_def, message = None, str(node_def)  # Keras makes any class's with a text alone
            tf.errors.OpError.__init__(self, node_def, op, message, code, *rest)
            error = recall(message)
            if error is None:
                error = ours(message)
                replaced: Any = sys.exc_info()[1]  # by AutoGraph or Keras, if it is of this class
                if type(replaced) is type(self):
                    error.__dict__.update(replaced.hvdgloo_error.__dict__)
            _adopt(self, error)

        members = {
            "__init__": init,
            "__str__": lambda self: str(self.hvdgloo_error),
            "__reduce__": lambda self: (_itself, (self.hvdgloo_error,)),
            "__module__": ours.__module__,
            "__qualname__": ours.__qualname__,
            "__doc__": ours.__doc__,
        }
        _classes[ours] = type(ours.__name__, tuple(dict.fromkeys((ours, theirs, tf.errors.UnknownError))), members)
    return _classes[ours]


def _adopt(made: Any, error: HvdglooError) -> None:
    made.__dict__.update(error.__dict__)  # its facts: rank, host, ...
    made.args = error.args  # TensorFlow leaves none
    made.hvdgloo_error = error  # not __cause__, which TensorFlow clears


def _itself(error: HvdglooError) -> HvdglooError:
    return error
