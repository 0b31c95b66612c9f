"""Named subsets of the ranks.

Only the global set can be used so far: it is every collective's default, and other sets are refused with an error that
says so. The class is here already so that signatures, defaults and annotations are the final ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdgloo import context
from hvdgloo.errors import InvalidArgumentError


class ProcessSet:
    """Some of a job's ranks, among which a collective runs.

    Args:
        ranks: global ranks; they are sorted.

    Raises:
        InvalidArgumentError: (a ValueError) for members that are not whole numbers, are negative, or occur twice.

    Attributes:
        process_set_id: None until the set is registered; 0 for ``global_process_set``.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        members = list(ranks)
        if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in members):
            raise InvalidArgumentError(f"a process set is made of ranks, whole numbers from 0; got {members}")
        if len(set(members)) != len(members):
            raise InvalidArgumentError(f"a rank occurs twice in the process set {sorted(members)}")
        self.process_set_id: int | None = None
        self._ranks: tuple[int, ...] | None = tuple(sorted(members))

    @property
    def ranks(self) -> list[int]:
        """The members in ascending order. The global set has some between ``init()`` and ``shutdown()`` only."""
        if self._ranks is None:
            return list(range(context.current().size)) if context.is_initialized() else []
        return list(self._ranks)

    def size(self) -> int | None:
        """Number of members; None while the set is not registered."""
        return None if self.process_set_id is None else len(self._registered_ranks())

    def rank(self) -> int:
        """This process's place among the members.

        Raises:
            InvalidArgumentError: the set is not registered, or this process is not a member.
        """
        ranks = self._registered_ranks()
        mine = context.current().rank
        if mine not in ranks:
            raise InvalidArgumentError(f"rank {mine} is not a member of {self}")
        return ranks.index(mine)

    def included(self) -> bool:
        """Whether this process is a member.

        Raises:
            InvalidArgumentError: the set is not registered.
        """
        ranks = self._registered_ranks()
        return context.current().rank in ranks

    def __repr__(self) -> str:
        members = "all ranks" if self._ranks is None else ", ".join(map(str, self._ranks))
        return f"ProcessSet(id {self.process_set_id}: {members})"

    def _registered_ranks(self) -> list[int]:
        if self.process_set_id is None:
            raise InvalidArgumentError(f"{self} is not registered; only global_process_set can be used so far")
        context.current()  # raises unless initialised
        return self.ranks

    @classmethod
    def _global(cls) -> ProcessSet:
        everyone = cls(())
        everyone.process_set_id = 0
        everyone._ranks = None
        return everyone


global_process_set = ProcessSet._global()
"""All ranks of the job."""


def process_set_id(process_set: ProcessSet) -> int:
    """The number that stands for a set in messages.

    Raises:
        InvalidArgumentError: for anything but a set that is registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgumentError(
            f"process_set must be a ProcessSet, not {type(process_set).__name__}; leave it out for all ranks"
        )
    if process_set.process_set_id is None:
        raise InvalidArgumentError(f"{process_set} is not registered; only global_process_set can be used so far")
    return process_set.process_set_id
