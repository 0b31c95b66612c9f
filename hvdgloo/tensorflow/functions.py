"""State and objects, under the names that Horovod's programs import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo.errors import EagerExecutionError
from hvdgloo.tensorflow import _state as state
from hvdgloo.tensorflow._frontend import FRONTEND, is_ordered, public

__all__ = [
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]

T = TypeVar("T")


@public
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Assign one rank's values to the other ranks' variables, usually before training.

    Args:
        variables: ``model.variables``, for example: ``tf.Variable`` or Keras variables, in the same order and of the
            same shapes on every rank.
        root_rank: global rank of the source.
        process_set: the ranks that take part.
        inplace: accepted for programs that pass it.

    Returns:
        the variables; in a graph of TensorFlow 1 the operator that assigns them.

    Raises:
        InvalidArgumentError: (a ValueError) something is not a variable.
    """
    received = state.broadcast_variables(FRONTEND, variables, root_rank, process_set)
    return received if tf.executing_eagerly() or is_ordered() else tf.group(*received)


def broadcast_global_variables(root_rank: int) -> Any:
    """The operator that assigns one rank's values to all variables of a TensorFlow 1 graph.

    Raises:
        EagerExecutionError: (a RuntimeError) the program runs eagerly, where there are no global variables.
    """
    if tf.executing_eagerly():
        raise EagerExecutionError(
            "broadcast_global_variables() is for graphs; in an eager program use "
            "broadcast_variables(model.variables, root_rank=0) once the model is built"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


@public
def broadcast_object(
    obj: T,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """The Python object of one rank, on all: ``Frontend.broadcast_object``.

    ``session`` is accepted for programs that pass it: nothing needs one.
    """
    return FRONTEND.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[T], T]:
    """A function of an object that does what ``broadcast_object`` does."""

    def broadcast(obj: T) -> T:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@public
def allgather_object(
    obj: T, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """Every rank's Python object, in rank order: ``Frontend.allgather_object``."""
    return FRONTEND.allgather_object(obj, name, process_set)
