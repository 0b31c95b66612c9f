"""``hvdgloo.keras``'s functions for programs of ``tf.keras``: collectives return tensors to those that run eagerly,
and errors are TensorFlow's as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo.keras import _functions as functions
from hvdgloo.keras import _legacy as legacy
from hvdgloo.keras._distributed_optimizer import KerasOptions
from hvdgloo.tensorflow._frontend import public
from hvdgloo.types import ReduceOp

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "load_model",
    "reducescatter",
]


@public
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor[Any] = NoneCompressor,
) -> Any:
    """``hvdgloo.keras.allreduce`` as a tensor; while a graph of TensorFlow 1 is the default one, as an array.

    Args:
        value, name, average, prescale_factor, postscale_factor, op, compression: see there.
    """
    return _tensor(functions.allreduce(value, name, average, prescale_factor, postscale_factor, op, compression))


@public
def allgather(value: Any, name: str | None = None) -> Any:
    """``hvdgloo.keras.allgather``, which returns a tensor as ``allreduce`` does."""
    return _tensor(functions.allgather(value, name))


@public
def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """``hvdgloo.keras.broadcast``, which returns a tensor as ``allreduce`` does."""
    return _tensor(functions.broadcast(value, root_rank, name))


@public
def reducescatter(value: Any, name: str | None = None, op: int = ReduceOp.AVERAGE) -> Any:
    """``hvdgloo.keras.reducescatter``, which returns a tensor as ``allreduce`` does."""
    return _tensor(functions.reducescatter(value, name, op))


broadcast_object = public(functions.broadcast_object)
allgather_object = public(functions.allgather_object)


def _tensor(array: Any) -> Any:
    return tf.convert_to_tensor(array) if tf.executing_eagerly() else array


@public
def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Compressor[Any] = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """``hvdgloo.keras.load_model``; where ``tf.keras`` is tf_keras (TF_USE_LEGACY_KERAS=1), for what that has saved.

    Args:
        filepath: of a ``.keras`` or ``.h5`` file; with tf_keras, also of a SavedModel's directory.
        custom_optimizers, custom_objects, compression, legacy_opts: see there.
    """
    if not tf.keras.Model.__module__.startswith("tf_keras."):
        return functions.load_model(filepath, custom_optimizers, custom_objects, compression, legacy_opts)
    names = functions.names_in_file(custom_optimizers, custom_objects)
    return legacy.load_model(filepath, names, KerasOptions(compression=compression))
