"""Named subsets of the ranks, which every collective can be given.

A set is a description until it is registered (``init(process_sets=...)``, ``add_process_set``), which is a collective
of all ranks: it then has a number that stands for it in messages, and its members have a process group of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hvdgloo._collectives.naming import names_of
from hvdgloo._engine.messages import Request
from hvdgloo._job import process
from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import Collective

logger = logging.getLogger(__name__)


class ProcessSet:
    """Some of a job's ranks, among which a collective runs.

    Args:
        ranks_or_comm: global ranks; they are sorted.

    Raises:
        InvalidArgumentError: (a ValueError) for members that are not whole numbers, are negative, or occur twice, and
            for a set without members.
    """

    mpi_comm = None
    """There is no MPI communicator; the attribute exists for programs that check it."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise InvalidArgumentError(f"a process set is made of ranks, whole numbers from 0; got {ranks_or_comm!r}")
        given: list[Any] = list(ranks_or_comm)
        if any(not isinstance(rank, (int, np.integer)) or isinstance(rank, bool) or rank < 0 for rank in given):
            raise InvalidArgumentError(f"a process set is made of ranks, whole numbers from 0; got {given}")
        members = [int(rank) for rank in given]
        if len(set(members)) != len(members):
            raise InvalidArgumentError(f"a rank occurs twice in the process set {sorted(members)}")
        if not members:
            raise InvalidArgumentError("a process set needs at least one rank")
        self._ranks: tuple[int, ...] | None = tuple(sorted(members))
        self._number: int | None = None
        self._context: Context | None = None

    @property
    def process_set_id(self) -> int | None:
        """None while the set is not registered; 0 for ``global_process_set``."""
        if self._ranks is None:
            return 0
        return None if self._context is None or self._context.closed else self._number

    @process_set_id.setter
    def process_set_id(self, number: object) -> None:
        raise InvalidArgumentError(
            f"process_set_id cannot be set to {number!r}: add_process_set() and init(process_sets=[...]) number sets"
        )

    @property
    def ranks(self) -> list[int]:
        """The members in ascending order. The global set has members only between ``init()`` and ``shutdown()``."""
        if self._ranks is None:
            process.asked_for_ranks()
            return list(range(process.current().size)) if process.is_initialized() else []
        return list(self._ranks)

    def size(self) -> int | None:
        """Number of members; None while the set is not registered."""
        process.asked_for_ranks()
        return None if self.process_set_id is None else len(self._registered()[1])

    def rank(self) -> int:
        """This process's place among the members.

        Raises:
            InvalidArgumentError: the set is not registered, or this process is not a member.
        """
        mine, ranks = self._registered()
        if mine not in ranks:
            raise InvalidArgumentError(f"rank {mine} is not a member of {self}")
        return ranks.index(mine)

    def included(self) -> bool:
        """Return whether this process is a member.

        Raises:
            InvalidArgumentError: the set is not registered.
        """
        mine, ranks = self._registered()
        return mine in ranks

    def __repr__(self) -> str:
        # Horovod's, which programs print and compare.
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def __reduce__(self) -> tuple[Callable[[tuple[int, ...] | None], ProcessSet], tuple[tuple[int, ...] | None]]:
        return _of_ranks, (self._ranks,)

    def _registered(self) -> tuple[int, list[int]]:
        """This process's global rank, and the members."""
        process.asked_for_ranks()
        if self._ranks is None:
            return process.current().rank, self.ranks
        process_set_id(self)
        assert self._context is not None
        return self._context.rank, self.ranks

    @classmethod
    def _global(cls) -> ProcessSet:
        everyone = cls((0,))
        everyone._ranks = None
        return everyone


global_process_set = ProcessSet._global()
"""All ranks of the job."""


def _of_ranks(ranks: tuple[int, ...] | None) -> ProcessSet:
    """A set from a pickle: registered if this process's job has a set with these ranks."""
    if ranks is None:
        return global_process_set
    made = ProcessSet(ranks)
    if process.is_initialized():
        job = process.current()
        for number, members in job.engine.process_sets.items():
            if members == ranks:
                made._number, made._context = number, job
    return made


def process_set_id(process_set: ProcessSet) -> int:
    """The number that stands for a set in messages.

    Raises:
        InvalidArgumentError: for anything but a registered set.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgumentError(
            f"process_set must be a ProcessSet, not {type(process_set).__name__}; leave it out for all ranks"
        )
    number = process_set.process_set_id
    if number is None:
        raise InvalidArgumentError(
            f"{process_set} is not registered (any more); add_process_set() or init(process_sets=[...]) does that"
        )
    return number


def add(ctx: Context, process_set: ProcessSet | Iterable[int], number: int = 0) -> ProcessSet:
    """Register a set; see ``Frontend.add_process_set``. Under a ``number`` that is free, or 0 for any."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.process_set_id is not None:
        raise InvalidArgumentError(f"{added} is already registered")
    ranks = tuple(added.ranks)
    if ranks[-1] >= ctx.size:
        raise InvalidArgumentError(f"{added} has ranks that do not exist; the job's are 0 to {ctx.size - 1}")
    if ctx.plan is not None:  # what a set does acts on this worker alone, as everything else does
        added._number, added._context = 0, ctx
        return added
    known = {members: number for number, members in ctx.engine.process_sets.items()}
    # The set of all ranks in this epoch may be one of some ranks in the next.
    if ranks in known and not (number and ctx.config.elastic and known[ranks] == 0):
        raise InvalidArgumentError(f"process set {known[ranks]} has the same ranks {list(ranks)}; use that one")
    added._number = _negotiate(ctx, Collective.ADD_PROCESS_SET, ranks, number)
    added._context = ctx
    names_of(ctx).restart(added._number)
    return added


def add_first(ctx: Context, sets: Sequence[ProcessSet]) -> None:
    """Register the sets that ``init()`` was given, each under the number of its place in the list, from 1.

    In an elastic job that happens in each epoch, and a set some of whose ranks do not exist there is left out.
    """
    missing = []
    for number, process_set in enumerate(sets, start=1):
        if ctx.config.elastic and process_set.ranks[-1] >= ctx.size:
            process_set._context = process_set._number = None
            missing.append(str(process_set.ranks))
        else:
            add(ctx, process_set, number)
    if missing and ctx.rank == 0:
        logger.warning(
            "there are %d ranks now, so these process sets of init() cannot be used: %s", ctx.size, ", ".join(missing)
        )


def remove(ctx: Context, process_set: ProcessSet) -> bool:
    """Forget a set; see ``Frontend.remove_process_set``."""
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgumentError(f"expected a ProcessSet, not {type(process_set).__name__}")
    if not process_set.process_set_id:
        return False
    _negotiate(ctx, Collective.REMOVE_PROCESS_SET, tuple(process_set.ranks), process_set.process_set_id)
    process_set._context = process_set._number = None
    return True


def _negotiate(ctx: Context, change: Collective, ranks: tuple[int, ...], number: int = 0) -> int:
    # Numbered, not named after the ranks, so that ranks that disagree get an error instead of waiting for each other.
    request = Request(names_of(ctx).next(0, change.value), change, ranks=ranks, number=number)
    handle = ctx.engine.submit(request)
    handle.wait()
    return handle.value
