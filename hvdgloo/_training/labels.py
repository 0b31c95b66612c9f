"""Names of gradients in a job's messages, where ranks find each other's gradients by their variables.

A gradient's name tells the variable's, so that models of the same shapes are told apart, whatever the order in which a
rank reduces their gradients. But Keras numbers what has no name of its own, and a rank that has built something else
counts on: the same variable is ``dense/kernel`` here and ``dense_2/kernel`` there. So before the first step ranks
compare their names. If these differ and some rank has no variables of the other ranks' names, it is the numbers that
differ, and the first rank's names are used; if all ranks have all of them, ranks are about to mix two models.
"""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, process_set_id
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._platform import interrupts
from hvdgloo.errors import MismatchError
from hvdgloo.types import Collective, ReduceOp


class _Names:
    """The names that the ranks of one Context have agreed on.

    Attributes:
        agreed: labels.
        asked: comparisons under way.
        turn: held while ranks compare names: two threads may ask for the same.
    """

    def __init__(self) -> None:
        self.agreed: dict[Any, list[str]] = {}
        self.asked: dict[Any, Callable[[], npt.NDArray[Any]]] = {}
        self.turn = threading.Lock()


_names: weakref.WeakKeyDictionary[Any, _Names] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def path_of(variable: Any) -> str:
    """Return a variable's name; an empty text if it has none."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "")).removesuffix(":0")


def agreed_labels(
    frontend: Frontend[Any],
    begin: str,
    variables: Sequence[Any],
    process_set: ProcessSet,
    kinds: Sequence[str] | None = None,
) -> list[str]:
    """Name the gradients of some variables in this job; collective when called for the first time.

    Args:
        frontend: where collectives are submitted.
        begin: the same on all ranks, as shapes and types are: see ``hvdgloo._training.options.label``.
        variables: of these shapes and types.
        process_set: the ranks that share gradients.
        kinds: what each variable's gradient is: "dense", "sparse", or "none" if there is none.

    Raises:
        MismatchError: kinds differ, or it is different variables that ranks mean.
    """
    paths = [path_of(variable) for variable in variables]
    key = begin, tuple(paths), process_set_id(process_set)
    with _lock:
        names = _names.setdefault(frontend.context, _Names())
    if key not in names.agreed:
        with names.turn:
            if key not in names.agreed:
                try:
                    chosen = _compared(frontend, names, begin, variables, paths, process_set, list(kinds or ()))
                except Exception:
                    names.asked.pop(begin, None)
                    raise
                held = interrupts.hold()
                try:
                    names.agreed[key] = labels(begin, chosen)
                    names.asked.pop(begin, None)
                finally:
                    interrupts.release(held)
    return names.agreed[key]


def labels(begin: str, paths: Sequence[str]) -> list[str]:
    """Return names of gradients, each of which contains its variable's name."""
    return [f"{begin}.{index}.{path}" if path else f"{begin}.{index}" for index, path in enumerate(paths)]


def _compared(
    frontend: Frontend[Any],
    names: _Names,
    begin: str,
    variables: Sequence[Any],
    paths: list[str],
    process_set: ProcessSet,
    kinds: list[str],
) -> list[str]:
    digest = hashlib.sha256(repr((paths, kinds)).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    highest = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.MAX, process_set=process_set_id(process_set))
    if begin not in names.asked:  # a wait that was interrupted goes on
        # A few bytes, and ranks that have joined need not answer.
        held = interrupts.hold()
        try:
            names.asked[begin] = frontend.start_array(highest, np.array([number, -number], np.int64), f"names.{begin}")
        finally:
            interrupts.release(held)
    extremes = names.asked[begin]()
    if extremes[0] == -extremes[1]:
        return paths
    everyones = frontend.allgather_object((paths, kinds), f"names.{begin}", process_set)
    ranks = frontend.context.engine.process_sets[highest.process_set]
    _check_kinds(ranks, everyones)
    others = {path for theirs, _ in everyones for path in theirs}
    if all(frontend.allgather_object(_exist(others, variables), f"exist.{begin}", process_set)):
        rank, path, other = next(
            (rank, here, there)
            for rank, (several, _) in zip(ranks, everyones, strict=True)
            for here, there in zip(everyones[0][0], several, strict=True)
            if here != there
        )
        raise MismatchError(
            f"gradients of different variables of one shape meet: of {path} on rank {ranks[0]} and of {other} on rank "
            f"{rank}. Reduce the gradients of several models in the same order on all ranks; if these are one model, "
            "give its layers names, since Keras counts those without, also of models that one rank alone has built",
            name=begin,
        )
    return list(everyones[0][0])


def _check_kinds(ranks: Sequence[int], everyones: Sequence[tuple[list[str], list[str]]]) -> None:
    for index, path in enumerate(everyones[0][0]):
        several = [kinds[index] for _, kinds in everyones if kinds]
        if len(set(several)) <= 1:
            continue
        told = ", ".join(f"{kind} on rank {rank}" for rank, kind in zip(ranks, several, strict=False))
        advice = (
            "a variable that the loss does not use has none: use it on all ranks, or "
            "tape.gradient(..., unconnected_gradients='zero')"
            if "none" in several
            else "sparse_as_dense=True makes all of them dense"
        )
        raise MismatchError(f"the gradient of {path or f'variable {index}'} is {told}; {advice}", name=path)


def _exist(paths: set[str], variables: Sequence[Any]) -> bool:
    """Tell whether this process has variables of all these names."""
    classes = tuple({type(variable) for variable in variables})
    return paths <= {path_of(each) for each in gc.get_objects() if issubclass(type(each), classes)}
