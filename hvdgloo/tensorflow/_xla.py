"""XLA, which cannot compile collectives: they run Python.

A model that Keras would compile trains without it, whether its optimizer reduces the gradients, or an optimizer or a
tape of its own in its ``train_step``. The former is seen before anything is traced. For the latter the first step is
traced without XLA; if no collective was met then, the function is made again, and compiled.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdgloo.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

_STEPS = {"train_function": "trains", "test_function": "is evaluated", "predict_function": "predicts"}


class _Met(threading.local):
    """Count the operators running collectives that this thread has made so far."""

    count = 0


_met = _Met()


def meet() -> None:
    """Note that an operator is about to be made that runs Python.

    Raises:
        InvalidArgumentError: it is in a function that XLA is to compile, which would fail when it runs.
    """
    _met.count += 1
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise InvalidArgumentError(
                    "XLA cannot compile collectives: call them in a tf.function without jit_compile=True, or outside "
                    "the one that has it"
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)


def spare(models: Any) -> None:
    """Have a Keras's models train, and be evaluated, without XLA where they call collectives, and say so."""
    if not hasattr(models.make_train_function, "hvdgloo"):
        for step in _STEPS:
            setattr(models, f"make_{step}", _sparing(getattr(models, f"make_{step}"), step))


def _sparing(plain: Any, step: str) -> Any:
    @functools.wraps(plain)
    def make(self: Any, force: bool = False) -> Any:
        if not self.jit_compile or (getattr(self, step) is not None and not force):
            return plain(self, force)
        self._jit_compile = False  # whose setter, in tf_keras, would drop the model's other functions
        returned = plain(self, force)
        optimizer = getattr(self, "optimizer", None)
        if step == "train_function" and hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_hvd"):
            _say(self, step)
            return returned
        setattr(self, step, _first(self, step, plain, getattr(self, step)))
        return None if returned is None else getattr(self, step)

    make.hvdgloo = True  # type: ignore[attr-defined]
    return make


def _first(model: Any, step: str, make: Any, uncompiled: Callable[..., Any]) -> Callable[..., Any]:
    chosen: list[Callable[..., Any]] = []  # after the first step

    def run(*args: Any) -> Any:
        if chosen:  # evaluate() of tf_keras holds on to this function
            return chosen[0](*args)
        before = _met.count
        result = uncompiled(*args)
        if _met.count > before:
            setattr(model, step, uncompiled)
            _say(model, step)
        else:
            model._jit_compile = True
            make(model, force=True)
        chosen.append(getattr(model, step))
        return result

    return run


def _say(model: Any, step: str) -> None:
    logger.warning("XLA cannot compile collectives: %s %s without it (jit_compile=False)", model.name, _STEPS[step])
