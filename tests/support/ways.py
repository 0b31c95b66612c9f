"""Ways to run TensorFlow code: eagerly, in a function, in a session. Ranks are threads, each with its own graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdgloo._job.context import Context
from hvdgloo.tensorflow._adapter import TensorFlowAdapter
from hvdgloo.tensorflow._frontend import TensorFlowFrontend

WAYS = ("eager", "function", "session")


def frontend_of(context: Context) -> TensorFlowFrontend:
    """A rank's front-end."""
    return TensorFlowFrontend(TensorFlowAdapter(), lambda: context)


def session_config() -> Any:
    """One thread for each rank's operators: those that wait must not need it."""
    return tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1, intra_op_parallelism_threads=1, use_per_session_threads=True
    )


def run(way: str, function: Callable[..., Any], *arrays: Any, shapes_known: bool = True) -> list[np.ndarray]:
    """``function`` of tensors with some values; the tensors that it returns, as arrays."""
    if way == "session":
        with tf.Graph().as_default():
            placeholders = [
                tf.compat.v1.placeholder(np.asarray(a).dtype, np.shape(a) if shapes_known else None) for a in arrays
            ]
            outputs = tf.nest.flatten(function(*placeholders))
            with tf.compat.v1.Session(config=session_config()) as session:
                received: Sequence[Any] = session.run(outputs, dict(zip(placeholders, arrays, strict=True)))
            return [np.asarray(each) for each in received]
    tensors = [tf.constant(array) for array in arrays]
    if way == "function":
        signature = [tf.TensorSpec(t.shape if shapes_known else None, t.dtype) for t in tensors]
        function = tf.function(function, input_signature=signature, autograph=False)
    return [np.asarray(each) for each in tf.nest.flatten(function(*tensors))]


def gradients(outputs: Sequence[Any], inputs: Sequence[Any], arriving: Sequence[Any], tape: Any = None) -> list[Any]:
    """Return the gradients at the inputs: by the tape, or by the graph of a session."""
    if tape is None:
        return list(tf.gradients(outputs, inputs, arriving))
    return list(tape.gradient(outputs, inputs, arriving))
