"""State that all ranks must start from: variables, in eager programs, functions and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdgloo._collectives.arrays import broadcast_arrays
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo._training.labels import path_of
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.tensorflow._frontend import TensorFlowFrontend, is_ordered, operator, unique_in_graph


def broadcast_variables(
    frontend: TensorFlowFrontend,
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Any:
    """Assign one rank's values to the other ranks' variables; all are under way before the first is waited for.

    Returns:
        the variables; in a graph of TensorFlow 1 a list of their new values, which are assigned where one is computed.

    Raises:
        InvalidArgumentError: (a ValueError) something is not a variable.
    """
    given = list(variables)
    targets = [variable_of(variable) for variable in given]
    for variable, target in zip(given, targets, strict=True):
        if frontend.adapter.owns(target):  # not the kind that TensorFlow 1 made at first
            frontend.check(path_of(variable), target)
    number = process_set_id(process_set)

    def exchange(*arrays: Any) -> list[Any]:
        label = frontend.automatic_name("broadcast_variables", number) if base is None else base
        return list(broadcast_arrays(frontend, arrays, root_rank, label, process_set))

    if tf.executing_eagerly():
        base = name
        for target, array in zip(targets, exchange(*(np.asarray(target) for target in targets)), strict=True):
            target.assign(array)
        return given
    ordered = is_ordered()
    base = name if name is not None or ordered else unique_in_graph("broadcast_variables")
    if not targets:
        return given
    read = [tf.convert_to_tensor(target) for target in targets]
    received = operator(exchange, read, [tensor.dtype for tensor in read], [tensor.shape for tensor in read])
    if ordered:
        for target, value in zip(targets, received, strict=True):
            target.assign(value)
        return given
    assigned = [tf.compat.v1.assign(target, value) for target, value in zip(targets, received, strict=True)]
    return [tf.identity(value) for value in assigned]


def variable_of(variable: Any) -> Any:
    """The ``tf.Variable`` of what programs call a variable: itself, or the one inside Keras's.

    Raises:
        InvalidArgumentError: (a ValueError) it is not a variable.
    """
    inside = variable if is_variable(variable) else getattr(variable, "value", None)
    if not is_variable(inside):
        raise InvalidArgumentError(f"expected a variable, not {type(variable).__name__}")
    return inside


def is_variable(value: object) -> bool:
    """Tell whether an object is a TensorFlow variable, of either kind."""
    return isinstance(value, (tf.Variable, tf.compat.v1.Variable))
