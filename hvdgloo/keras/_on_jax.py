"""Keras on JAX: the compiled step has all gradients reduced by one call, in XLA's own memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from hvdgloo._job.context import Context
from hvdgloo._training.labels import agreed_labels
from hvdgloo._training.options import make_reducer, named_groups
from hvdgloo._training.reducer import GradientReducer
from hvdgloo._training.weights import check_late, checksum, samples_of
from hvdgloo.jax._errors import translated
from hvdgloo.jax._primitive import on_host
from hvdgloo.keras._distributed_optimizer import FINITE, REMEDY, DistributedKerasOptimizer, KerasOptions, label_of
from hvdgloo.numpy._frontend import FRONTEND
from hvdgloo.types import ReduceOp


class JaxSync:
    """See ``hvdgloo.keras._distributed_optimizer.Sync``."""

    def __init__(self, options: KerasOptions) -> None:
        self._options = options
        self.arrived: list[list[Any]] = []  # nothing, ever: Ctrl-C does not end a compiled step
        self._local = {id(variable) for variable in options.local_variables}
        make_reducer(FRONTEND, options, [])  # raises for what it cannot do

    def track(self, variables: Sequence[Any], *, changes: bool) -> None:
        """Do nothing: gradients are sent from where they are computed."""

    def complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return list(gradients)  # a compiled step is the same on all ranks

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not FRONTEND.may_share(self._options.process_set):
            return list(gradients)
        results = list(gradients)
        shared = [index for index, variable in enumerate(variables) if id(variable) not in self._local]
        chosen = [variables[index] for index in shared]
        begin = label_of(chosen)
        names = [f"{begin}.{index}" for index in range(len(chosen))]
        groups = named_groups(self._options.groups, names, chosen)
        reducers: list[tuple[Context, GradientReducer[Any]]] = []  # none, or the latest

        def exchange(arrays: Sequence[Any]) -> None:
            # The step is compiled once, for a job of any size.
            context = FRONTEND.context
            if self._ranks():
                if not reducers or reducers[0][0] is not context:
                    labels = agreed_labels(FRONTEND, begin, chosen, self._options.process_set)
                    reducers[:] = [(context, make_reducer(FRONTEND, self._options, groups, in_place=True))]
                    reducers[0][1].release(dict(zip(names, labels, strict=True)))
                reducer = reducers[0][1]
                try:
                    for name, array in reversed(list(zip(names, arrays, strict=True))):
                        if reducer.is_open(name):
                            reducer.reset()  # the previous step did not finish
                        reducer.ready(name, array)
                    reducer.wait()
                except Exception:
                    reducer.reset()  # XLA takes the memory back
                    raise
            FRONTEND.end_step()

        pairs = [self._options.compression.compress(results[index]) for index in shared]
        received = on_host(exchange, [tensor for tensor, _ in pairs])
        for index in set(range(len(results))) - set(shared):
            results[index] = self._options.local(results[index], max(1, len(self._ranks())))
        for index, tensor, (_, ctx) in zip(shared, received, pairs, strict=True):
            results[index] = self._options.compression.decompress(tensor, ctx)
        return results

    def compare(self, variables: Sequence[Any], values: Sequence[Any]) -> bool:
        """See that ranks have the same weights; tell whether there is nothing left to do."""
        if not self._ranks():
            return not FRONTEND.may_share(self._options.process_set)  # others may come
        pairs = [(v, value) for v, value in zip(variables, values, strict=True) if id(v) not in self._local]
        shared = [variable for variable, _ in pairs]
        label, *_ = agreed_labels(FRONTEND, label_of(shared), shared, self._options.process_set) or [""]
        sample = functools.partial(_checksum, [value for _, value in pairs])
        return check_late(FRONTEND, self._options.process_set, label, REMEDY, sample, object())

    def agree(self, holds: Any) -> Any:
        if not FRONTEND.may_share(self._options.process_set):
            return holds

        def exchange(arrays: Sequence[Any]) -> None:
            if self._ranks():
                process_set = self._options.process_set
                FRONTEND.allreduce_(arrays[0], op=ReduceOp.MIN, name=FINITE, process_set=process_set)

        (everywhere,) = on_host(exchange, [jnp.asarray(holds).astype(jnp.uint8)])
        return everywhere.astype(bool)

    def _ranks(self) -> tuple[int, ...]:
        return FRONTEND.sharers(self._options.process_set)


def _checksum(values: Sequence[Any]) -> int | None:
    """Return the checksum of a few elements of each array; None if there are none."""
    elements = [value.reshape(-1)[samples_of(value.size)] for value in values if value.size]
    return checksum(np.concatenate([np.asarray(each).astype(np.complex128) for each in elements])) if elements else None


def prepare() -> None:
    """Have ``fit`` and the like raise our errors: JAX turns what a callback raises into an error of its own. And have
    them compare the ranks' weights, which a compiled step could do only in each step."""
    for name in ("fit", "train_on_batch"):
        plain = getattr(keras.Model, name)
        if not hasattr(plain, "hvdgloo"):
            setattr(keras.Model, name, _translating(plain))
    if not hasattr(keras.Model.make_train_function, "hvdgloo"):
        keras.Model.make_train_function = _comparing(keras.Model.make_train_function)


def _translating(plain: Any) -> Any:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with translated():
            return plain(self, *args, **kwargs)

    call.hvdgloo = True  # type: ignore[attr-defined]
    return call


def _comparing(plain: Any) -> Any:
    @functools.wraps(plain)
    def make_train_function(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        optimizer = getattr(self, "optimizer", None)
        stepping = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(stepping, DistributedKerasOptimizer) and not isinstance(self.train_function, _FirstSteps):
            self.train_function = _FirstSteps(self, self.train_function, stepping)

    make_train_function.hvdgloo = True  # type: ignore[attr-defined]
    return make_train_function


class _FirstSteps:
    """A model's function that trains, until the ranks' weights have been compared; then Keras calls the plain one.

    A call may be several steps, after which callbacks may broadcast weights.
    """

    def __init__(self, model: Any, plain: Callable[..., Any], optimizer: Any) -> None:
        self._model = weakref.ref(model)
        self._plain = plain
        self._optimizer = optimizer

    def __call__(self, state: Any, iterator: Any) -> Any:
        model = self._model()
        if model is not None and self._optimizer._hvd.sync.compare(model.trainable_variables, state[0]):
            model.train_function = self._plain
        return self._plain(state, iterator)


def open_sync(options: KerasOptions) -> JaxSync:
    """Make the object that reduces gradients on this backend."""
    return JaxSync(options)
