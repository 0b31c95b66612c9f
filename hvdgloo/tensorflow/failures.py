"""Errors on their way through TensorFlow's graphs.

A Python exception in a graph's operator reaches the caller as ``tf.errors.UnknownError`` with a text. ``guarded``
remembers the exception itself and marks the text; ``translated`` finds it by the mark and raises it. ``install`` makes
TensorFlow do so wherever it turns a status into an exception, so that a program's own ``tf.function`` raises
HorovodInternalError, too. That uses two functions of TensorFlow's that are not public: where a version has not got
them, the text names our class, ``fit`` translates, and programs can use ``translated`` themselves.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdgloo.errors import HorovodInternalError, HvdglooError

_MARK = re.compile(r"\[hvdgloo error (\d+)\]")
_KEPT = 64

_errors: OrderedDict[int, HvdglooError] = OrderedDict()
_numbers = itertools.count(1)
_lock = threading.Lock()


class GraphError(RuntimeError):
    """What leaves an operator of a graph: its text names our error's class and has the mark."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A graph's operator whose errors can be translated back."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except HvdglooError as error:
            raise GraphError(f"{type(error).__name__}: {error} {_remember(error)}") from error

    return call


def original(error: BaseException) -> HvdglooError | None:
    """Our error that TensorFlow's stands for; None if it is not about us."""
    found = _MARK.search(str(error))
    if found is None:
        return None
    with _lock:
        known = _errors.get(int(found[1]))
    return HorovodInternalError(str(error)) if known is None else known


@contextmanager
def translated() -> Iterator[None]:
    """Inside, TensorFlow's errors that stand for ours are ours: HorovodInternalError, for example."""
    try:
        yield
    except tf.errors.OpError as error:
        ours = original(error)
        if ours is None:
            raise
        raise ours from error


def install() -> None:
    """Have TensorFlow translate, once and for the whole process."""
    with _lock:
        _install_functions()
        _install_sessions()


def _install_functions() -> None:
    from tensorflow.python.eager import core

    plain = getattr(core, "_status_to_exception", None)
    if plain is None or hasattr(plain, "hvdgloo"):
        return

    @functools.wraps(plain)
    def status_to_exception(status: Any) -> Any:
        # Before TensorFlow's own, which writes a line to the log for each.
        message = getattr(status, "message", "")
        ours = original(RuntimeError(message)) if "[hvdgloo error" in message else None
        return plain(status) if ours is None else ours

    status_to_exception.hvdgloo = True  # type: ignore[attr-defined]
    core._status_to_exception = status_to_exception


def _install_sessions() -> None:
    from tensorflow.python.client import session

    plain = session.BaseSession.run
    if hasattr(plain, "hvdgloo"):
        return

    @functools.wraps(plain)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with translated():
            return plain(self, *args, **kwargs)

    run.hvdgloo = True  # type: ignore[attr-defined]
    session.BaseSession.run = run


def _remember(error: HvdglooError) -> str:
    number = next(_numbers)
    with _lock:
        _errors[number] = error
        while len(_errors) > _KEPT:
            _errors.popitem(last=False)
    return f"[hvdgloo error {number}]"
