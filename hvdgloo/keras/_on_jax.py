"""Keras on JAX: gradients leave the compiled step by one ordered callback, and come back reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import io_callback

from hvdgloo._collectives import compression
from hvdgloo._job.context import Context
from hvdgloo._platform.error_tokens import ForeignError, recall
from hvdgloo._training.labels import agreed_labels
from hvdgloo._training.options import make_reducer, named_groups
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.errors import HvdglooError
from hvdgloo.keras._distributed import FINITE, KerasOptions, label_of
from hvdgloo.numpy._frontend import FRONTEND
from hvdgloo.types import DType, ReduceOp, TensorSpec


class JaxSync:
    """See ``hvdgloo.keras._distributed.Sync``."""

    def __init__(self, options: KerasOptions) -> None:
        self._options = options
        self._local = {id(variable) for variable in options.local_variables}
        make_reducer(FRONTEND, options, [])  # raises for what it cannot do

    def track(self, variables: Sequence[Any], *, changes: bool) -> None:
        """Nothing to do: gradients are sent from where they are computed."""

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

        def exchange(arrays: Sequence[Any]) -> list[Any]:
            # The step is compiled once, for a job of any size.
            context, ranks = FRONTEND.context, self._ranks()
            size = np.int32(max(len(ranks), 1))
            if not ranks:
                FRONTEND.end_step()
                return [*arrays, size]
            if not reducers or reducers[0][0] is not context:
                labels = agreed_labels(FRONTEND, begin, chosen, self._options.process_set)
                reducers[:] = [(context, make_reducer(FRONTEND, self._options, groups))]
                reducers[0][1].release(dict(zip(names, labels, strict=True)))
            reducer = reducers[0][1]
            for name, array in reversed(list(zip(names, arrays, strict=True))):
                if reducer.is_open(name):
                    reducer.reset()  # the previous step did not finish
                reducer.ready(name, np.asarray(array))
            reduced = reducer.wait()
            FRONTEND.end_step()
            return [*(reduced[name] for name in names), size]

        pairs = [self._options.compression.compress(results[index]) for index in shared]
        sent = [tensor for tensor, _ in pairs]
        *received, size = _outside(exchange, sent, [*sent, jax.ShapeDtypeStruct((), np.int32)])
        for index in set(range(len(results))) - set(shared):
            results[index] = self._options.local(results[index], size.astype(results[index].dtype))
        for index, tensor, (_, ctx) in zip(shared, received, pairs, strict=True):
            results[index] = self._options.compression.decompress(tensor, ctx)
        return results

    def agree(self, holds: Any) -> Any:
        if not FRONTEND.may_share(self._options.process_set):
            return holds

        def exchange(arrays: Sequence[Any]) -> list[Any]:
            flag = np.asarray(arrays[0])
            if not self._ranks():
                return [flag]
            process_set = self._options.process_set
            return [FRONTEND.allreduce(flag, op=ReduceOp.MIN, name=FINITE, process_set=process_set)]

        flag = jnp.asarray(holds).astype(jnp.uint8)
        (everywhere,) = _outside(exchange, [flag], [flag])
        return everywhere.astype(bool)

    def _ranks(self) -> tuple[int, ...]:
        return FRONTEND.sharers(self._options.process_set)


def _outside(
    function: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any], returned: Sequence[Any]
) -> list[Any]:
    """Call ``function``, which turns arrays into arrays like those of ``returned``, from a compiled step; in the order
    of the steps."""

    def call(*arrays: Any) -> Any:
        try:
            return [np.asarray(array) for array in function(arrays)]
        except HvdglooError as error:
            raise ForeignError(error) from error

    shapes = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in returned]
    return list(io_callback(call, shapes, *tensors, ordered=True))


class _JaxCasts:
    """What compressors ask about JAX's arrays, also those of a step that is being compiled."""

    def describe(self, tensor: Any) -> TensorSpec:
        return TensorSpec(DType(tensor.dtype.name), tensor.shape)

    def cast(self, tensor: Any, dtype: DType) -> Any:
        return tensor.astype(dtype.value)


class FP16Compressor(compression.FP16Compressor[Any]):
    __doc__ = compression.FP16Compressor.__doc__
    adapter = _JaxCasts()


class BF16Compressor(compression.BF16Compressor[Any]):
    __doc__ = compression.BF16Compressor.__doc__
    adapter = _JaxCasts()


def prepare() -> None:
    """Have ``fit`` and the like raise our errors: JAX turns what a callback raises into an error of its own."""
    for name in ("fit", "train_on_batch"):
        plain = getattr(keras.Model, name)
        if not hasattr(plain, "hvdgloo"):
            setattr(keras.Model, name, _translating(plain))


def _translating(plain: Any) -> Any:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(self, *args, **kwargs)
        except Exception as error:
            ours = recall(str(error))
            if ours is None:
                raise
            raise ours from error

    call.hvdgloo = True  # type: ignore[attr-defined]
    return call


def open_sync(options: KerasOptions) -> JaxSync:
    """How gradients are reduced on this backend."""
    return JaxSync(options)
