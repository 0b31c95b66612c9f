"""Arguments, names and groups that the optimizers, tapes and trainers of all front-ends have in common."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.common.util import split_list
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import ReduceOp

T = TypeVar("T")

Groups = int | Sequence[Sequence[Any]] | None
"""The number of groups into which gradients are divided, each sent as one, or lists of the parameters in each; 0 or
None: no groups."""


@dataclass(frozen=True)
class GradientOptions:
    """Arguments of tapes and optimizers that determine how gradients are reduced."""

    compression: Compressor[Any] = NoneCompressor
    op: int = ReduceOp.AVERAGE
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def local(self, gradient: Any, size: int) -> Any:
        """Return the gradient that this rank steps on for a variable that is not shared.

        Args:
            gradient: a framework's tensor, or a ``tf.IndexedSlices``; it is not changed.
            size: the number of ranks, by which it is divided if ``scale_local_gradients``.
        """
        if not self.scale_local_gradients:
            return gradient
        if hasattr(gradient, "dense_shape"):  # of the same indices
            return type(gradient)(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size


def label(described: Sequence[object]) -> str:
    """Return the prefix of gradients' names: the same on all ranks that have the same variables.

    It does not depend on what else a rank has built, nor in which order.

    Args:
        described: for each gradient, what ranks agree on, such as its shape and type; something with a ``repr``.
    """
    return f"gradients.{hashlib.sha256(repr(list(described)).encode()).hexdigest()[:8]}"


def make_reducer(
    frontend: Frontend[T],
    options: GradientOptions,
    groups: Iterable[Sequence[str]],
    compression: Compressor[T] = NoneCompressor,
    *,
    in_place: bool = False,
) -> GradientReducer[T]:
    """Make a reducer of gradients.

    Args:
        frontend: where collectives are submitted.
        options: how gradients are reduced.
        groups: the names of gradients that are sent together.
        compression: used instead of ``options.compression``, which may be part of a graph.
        in_place: reduce into the gradients themselves.

    Raises:
        InvalidArgumentError: an option cannot be used.
    """
    return GradientReducer(
        frontend,
        op=options.op,
        compression=compression,
        crossing=options.compression,
        predivide_factor=options.gradient_predivide_factor,
        groups=groups,
        in_place=in_place,
        process_set=options.process_set,
    )


def whichever(num_groups: int, groups: Groups) -> Groups:
    """Return ``groups``, or ``num_groups``, its older name. To be called by the function that has both arguments.

    Raises:
        InvalidArgumentError: both are given.
    """
    if not num_groups:
        return groups
    warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=3)
    if groups is not None:
        raise InvalidArgumentError("num_groups= and groups= exclude each other; leave num_groups= out")
    return num_groups


def divided(groups: Groups, members: Sequence[T], identity: Callable[[Any], int] = id) -> list[list[T]]:
    """Divide ``members`` into groups that are reduced together.

    Args:
        groups: the user's argument; items of lists that are not members (parameters that are not trained) are ignored.
        members: in the same order on all ranks.
        identity: returns the same number for the same variable.

    Raises:
        InvalidArgumentError: ``groups`` is not valid, or something is in two groups.
    """
    check(groups)
    if not groups:
        return []
    if isinstance(groups, int):
        return [list(part) for part in split_list(members, min(groups, len(members)))] if members else []
    asked = [identity(each) for group in groups for each in group]
    if len(set(asked)) != len(asked):
        raise InvalidArgumentError("groups has a parameter that is in two groups, or twice in one")
    found = {identity(member): member for member in members}
    chosen = [[found[identity(each)] for each in group if identity(each) in found] for group in groups]
    return [group for group in chosen if group]


def layers_in(local_layers: Any) -> list[Any]:
    """Return the layers given as an argument ``local_layers``: none, one or several.

    Raises:
        InvalidArgumentError: (a ValueError) something has no trainable variables.
    """
    layers: Any = [] if local_layers is None else local_layers
    several = list(layers) if isinstance(layers, Iterable) and not hasattr(layers, "trainable_variables") else [layers]
    for layer in several:
        if not hasattr(layer, "trainable_variables"):
            raise InvalidArgumentError(f"local_layers are layers, with trainable_variables; got {type(layer).__name__}")
    return several


def named_groups(
    groups: Groups, names: Sequence[str], members: Sequence[Any], identity: Callable[[Any], int] = id
) -> list[list[str]]:
    """Do what ``divided`` does, but return the members' names."""
    name_of = {identity(member): name for member, name in zip(members, names, strict=True)}
    return [[name_of[identity(each)] for each in group] for group in divided(groups, members, identity)]


def check(groups: Groups) -> None:
    """Check that ``divided`` can use this.

    Raises:
        InvalidArgumentError: it cannot.
    """
    counted = isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0
    listed = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)
    if not (groups is None or counted or listed):
        raise InvalidArgumentError(
            f"groups must be a number of groups, 0 or more, or a list of lists of parameters; not {groups!r}"
        )
