"""A checksum of variables' values, for ``hvdgloo._training.weights``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdgloo._training.weights import checksum, samples_of

logger = logging.getLogger(__name__)

REMEDY = (
    "Call hvd.broadcast_variables(model.variables, root_rank=0) on all ranks, at the latest after the first step; with "
    "fit(), pass hvd.keras.callbacks.BroadcastGlobalVariablesCallback(0)"
)


def checksum_of(variables: Iterable[Any]) -> int | None:
    """Return the checksum of a few elements of each variable; None where none can be read.

    It is called while a function runs, too, in a thread that executes eagerly. Variables of a TensorFlow 1 graph, which
    have values in a session only, are left out, and so is what is no variable.
    """
    if not tf.executing_eagerly():
        return None
    try:
        found = [_samples(variable) for variable in variables if _is_readable(variable)]
    except Exception as error:  # noqa: BLE001 - the check warns, and never fails
        logger.debug("weights are not compared: %s: %s", type(error).__name__, error)
        return None
    return checksum(np.concatenate(found)) if found else None


def _is_readable(variable: Any) -> bool:
    return (
        isinstance(variable, tf.Variable)
        and isinstance(getattr(variable, "handle", None), tf.__internal__.EagerTensor)
        and (variable.dtype.is_floating or variable.dtype.is_complex)
        and variable.shape.num_elements() not in (None, 0)
    )


def _samples(variable: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    # Read by its handle: the gradient of what is being computed does not depend on it.
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    elements = tf.reshape(value, [-1])[samples_of(variable.shape.num_elements())]
    if elements.dtype.is_complex:
        elements = tf.concat([tf.math.real(elements), tf.math.imag(elements)], 0)
    samples: np.ndarray[Any, np.dtype[np.float64]] = tf.cast(elements, tf.float64).numpy()
    return samples
