"""Collectives on values, variables, objects and models, under the names that Horovod's programs use with Keras.

Values are numbers and arrays, not tensors of a graph: what is to be part of a model takes the collectives of the
backend's own front-end, ``hvdgloo.tensorflow`` or ``hvdgloo.torch``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdgloo._collectives.arrays import broadcast_arrays
from hvdgloo._collectives.compression import Compressor, NoneCompressor, wire_of
from hvdgloo._training.labels import path_of
from hvdgloo.errors import EagerExecutionError, InvalidArgumentError
from hvdgloo.keras import _distributed_optimizer as distributed
from hvdgloo.keras._compression import Compression
from hvdgloo.keras._distributed_optimizer import KerasOptions
from hvdgloo.numpy._adapter import Array
from hvdgloo.numpy._compression import Compression as NumpyCompression
from hvdgloo.numpy._frontend import FRONTEND
from hvdgloo.types import ReduceOp, WireFormat

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "load_model",
    "reducescatter",
]

logger = logging.getLogger(__name__)

_VALUES = (
    "hvdgloo.keras's collectives take values: inside a step, use hvdgloo.tensorflow's or hvdgloo.torch's (with JAX, "
    "call them outside it), or pass a detached tensor"
)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor[Any] = NoneCompressor,
) -> Array:
    """The average (or another reduction) of the ranks' values.

    Args:
        value: a number, an array or a tensor, of the same shape and type on every rank.
        name: what matches the ranks' calls.
        average: True for ``op=Average``, False for ``op=Sum``.
        prescale_factor, postscale_factor: multiply each rank's value before, and the result after.
        op: Average (default), Sum, Min, Max or Product.
        compression: with ``Compression.fp16`` floating-point values travel as float16, and ``Compression.int8`` and
            ``Compression.int4`` encode float32 between hosts; with others, they travel unchanged.

    Returns:
        a numpy array.

    Raises:
        InvalidArgumentError: (a ValueError) the value is part of a step under way. The other functions here raise
            it as well.
    """
    if average is not None and op is None:
        average, op = None, ReduceOp.AVERAGE if average else ReduceOp.SUM
    half: Any = Compression.fp16
    chosen: Compressor[Any] = NumpyCompression.fp16 if compression is half else NumpyCompression.none
    if wire_of(compression) not in (None, WireFormat.FULL):
        chosen = compression
    return FRONTEND.allreduce(array_of(value), average, name, chosen, op, prescale_factor, postscale_factor)


def allgather(value: Any, name: str | None = None) -> Array:
    """The ranks' arrays, one after the other along the first dimension, as a numpy array."""
    return FRONTEND.allgather(array_of(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Array:
    """The value of one (global) rank, as a numpy array."""
    return FRONTEND.broadcast(array_of(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = ReduceOp.AVERAGE) -> Array:
    """This rank's rows of the average (or sum) of the ranks' arrays, as a numpy array."""
    return FRONTEND.reducescatter(array_of(value), name, op=op)


broadcast_object = FRONTEND.broadcast_object
allgather_object = FRONTEND.allgather_object


def broadcast_global_variables(root_rank: int) -> Any:
    """The operator that assigns one rank's values to all variables of a TensorFlow 1 graph.

    Raises:
        EagerExecutionError: (a RuntimeError) the program runs eagerly, as Keras does.
    """
    if keras.backend.backend() != "tensorflow":
        raise EagerExecutionError(
            "broadcast_global_variables() is for graphs of TensorFlow; give fit() the callback "
            "BroadcastGlobalVariablesCallback(root_rank=0)"
        )
    return importlib.import_module("hvdgloo.tensorflow.functions").broadcast_global_variables(root_rank)


def broadcast_weights(variables: Sequence[Any], root_rank: int) -> None:
    """Assign one rank's values to the other ranks' Keras variables; all are under way before one is waited for."""
    arrays = [array_of(variable) for variable in variables]
    for variable, array in zip(variables, arrays, strict=True):
        FRONTEND.check(path_of(variable), array)
    label = FRONTEND.automatic_name("broadcast_weights")
    for variable, array in zip(variables, broadcast_arrays(FRONTEND, arrays, root_rank, label), strict=True):
        if not FRONTEND.context.is_root(root_rank):
            variable.assign(array)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Compressor[Any] = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """A saved model, whose optimizer is distributed; whether it was when it was saved makes no difference.

    Args:
        filepath: of a ``.keras`` file; or of an ``.h5`` file, of which Keras 3 does not read the optimizer's state, so
            that it starts afresh, with a warning.
        custom_optimizers: classes of optimizers that Keras cannot find on its own.
        custom_objects: other names in the file, as for ``keras.models.load_model``.
        compression: for ``DistributedOptimizer``.
        legacy_opts: accepted for programs that pass it.
    """
    model = keras.models.load_model(filepath, custom_objects=names_in_file(custom_optimizers, custom_objects))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if optimizer.built and not optimizer._trainable_variables and model.trainable_variables:
            # So Keras 3 leaves it after reading an .h5 file: with state for no variables at all, and it cannot step.
            model.optimizer = optimizer = type(optimizer).from_config(optimizer.get_config())
            logger.warning(
                "Keras does not read an optimizer's state from %s: %s starts afresh; save as .keras to keep it",
                filepath,
                type(optimizer).__name__,
            )
        distributed.wrap(optimizer, KerasOptions(compression=compression))
    return model


def names_in_file(custom_optimizers: Sequence[type] | None, custom_objects: dict[str, Any] | None) -> dict[str, Any]:
    """Map names in a file to the objects that ``load_model``'s arguments give for them."""
    return {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()} | (custom_objects or {})


def array_of(value: Any) -> Array:
    """Return a number, an array, a tensor or a variable of Keras's backend as an array.

    Raises:
        InvalidArgumentError: (a ValueError) it is symbolic, or has a gradient that would be lost.
    """
    if isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "shape"):
        return np.asarray(value)
    inner = value.value if isinstance(value, keras.Variable) else value
    if getattr(inner, "grad_fn", None) is not None:
        raise InvalidArgumentError(_VALUES)
    # Variables of Keras and of TensorFlow do not support numpy 2's protocol, and are asked directly.
    known = keras.backend.backend() == "tensorflow" and hasattr(inner, "numpy")
    try:
        return np.asarray(inner.numpy() if known else keras.ops.convert_to_numpy(inner))
    except (NotImplementedError, AttributeError, TypeError, ValueError) as error:  # one for each kind of symbol
        raise InvalidArgumentError(_VALUES) from error
