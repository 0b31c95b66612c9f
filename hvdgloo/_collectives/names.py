"""The names that front-ends export, and what each stands for: listed here once, bound by every front-end's package.

A name stands for the same object in all front-ends (``SHARED``), or for a method of the package's own ``Frontend``. A
package says which groups of names it has and where to find them, see ``bind``; names that only its framework has it
defines itself. Type checkers, which do not run code, see none of this: for them there is a stub (``.pyi``) next to each
module that binds names, written by docs/generate_stubs.py.

Adding a collective: a method of ``Frontend``, and its name here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvdgloo._collectives import basics
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo.errors import HorovodInternalError
from hvdgloo.types import ReduceOp

REDUCTIONS: Mapping[str, ReduceOp] = {
    "Average": ReduceOp.AVERAGE,
    "Sum": ReduceOp.SUM,
    "Adasum": ReduceOp.ADASUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}
BASICS: Mapping[str, Any] = {name: getattr(basics, name) for name in basics.__all__}
VALUES: Mapping[str, Any] = {
    "HorovodInternalError": HorovodInternalError,
    "ProcessSet": ProcessSet,
    "global_process_set": global_process_set,
}
SHARED: Mapping[str, Any] = {**REDUCTIONS, **BASICS, **VALUES}
"""Names with the same value in all front-ends."""

# Methods of a Frontend.
PLACES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
PROCESS_SETS = ("add_process_set", "remove_process_set")
COLLECTIVES = (
    "allreduce",
    "grouped_allreduce",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
    "join",
    "barrier",
)
IN_PLACE = ("allreduce_", "grouped_allreduce_", "broadcast_")
ASYNCHRONOUS = (
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "allgather_async",
    "grouped_allgather_async",
    "broadcast_async",
    "broadcast_async_",
    "alltoall_async",
    "reducescatter_async",
    "grouped_reducescatter_async",
    "poll",
    "synchronize",
)
REPORTS = ("log",)
OBJECTS = ("broadcast_object", "allgather_object")

BASE = (*REDUCTIONS, *BASICS, *PLACES, *PROCESS_SETS, *REPORTS)
"""Functions of every front-end, whatever its tensors."""

EAGER = (*BASE, *COLLECTIVES, *IN_PLACE, *ASYNCHRONOUS)
"""Functions that a front-end has in addition if its tensors can be written."""


def bind(
    namespace: dict[str, Any], homes: Sequence[object], names: Iterable[str], own: Iterable[str] = ()
) -> list[str]:
    """Put names into a module.

    Args:
        namespace: the module's ``globals()``.
        homes: where to find the names that are not ``SHARED``: modules, or a Frontend; the first that has a name
            provides it.
        names: names of the groups above.
        own: names that other front-ends lack; in the module already, or in one of ``homes``.

    Returns:
        all of them, sorted, for the module's ``__all__``.

    Raises:
        AttributeError: a name is in none of them.
    """
    given = {*names}
    for name in given | {*own} - namespace.keys():
        home = next((home for home in homes if hasattr(home, name)), homes[-1])
        namespace[name] = SHARED[name] if name in SHARED else getattr(home, name)
    return sorted(given.union(own))
