"""The functions that every front-end has, whatever its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdgloo._collectives import process_sets
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._job import process
from hvdgloo._job.context import Context


class JobFunctions:
    """This process's numbers in its job, and the job's process sets.

    Args:
        context: returns the Context to work in, or raises NotInitializedError.
    """

    def __init__(self, context: Callable[[], Context]) -> None:
        self._context = context

    @property
    def context(self) -> Context:
        """The Context that collectives run in; raises NotInitializedError without one."""
        return self._context()

    def rank(self) -> int:
        """This process's number among all processes of the job, from 0."""
        return self._told().rank

    def size(self) -> int:
        """Number of processes in the job."""
        return self._told().size

    def local_rank(self) -> int:
        """This process's number among those on its host; for example, to choose a GPU."""
        return self._told().local_rank

    def local_size(self) -> int:
        """Number of processes on this host."""
        return self._told().local_size

    def cross_rank(self) -> int:
        """This host's number among the hosts that have a process with this local rank."""
        return self._told().cross_rank

    def cross_size(self) -> int:
        """Number of hosts that have a process with this local rank."""
        return self._told().cross_size

    def is_homogeneous(self) -> bool:
        """Return whether every host runs the same number of processes."""
        return self._told().is_homogeneous

    def _told(self) -> Context:
        process.asked_for_ranks()
        return self._context()

    def add_process_set(self, process_set: ProcessSet | Iterable[int]) -> ProcessSet:
        """Register a set of ranks. Collective over all ranks of the job, in the same order on each.

        Args:
            process_set: the set, or its global ranks.

        Returns:
            the registered set.

        Raises:
            InvalidArgumentError: (a ValueError) ranks that do not exist, or a set of the same ranks is already
                registered.
            MismatchError: the ranks disagree about the set.
        """
        return process_sets.add(self.context, process_set)

    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Forget a registered set. Collective over all ranks of the job.

        Returns:
            False, with nothing done, for a set that is not registered and for the global one.
        """
        return process_sets.remove(self.context, process_set)
