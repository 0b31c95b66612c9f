"""Functions that JAX has traced for this process's rank and for the job's size.

``hvd.size()`` is a constant of a function that is being traced, and shapes may depend on the number of ranks. JAX does
not know of this, and would go on with what it has compiled. So where a function depends on such a number, JAX forgets
its compiled functions as soon as this process is in a Context with other numbers: in the next epoch of an elastic job,
or after ``shutdown()`` and ``init()``.
"""

from __future__ import annotations

from collections.abc import Hashable

import jax

from hvdgloo._job import process
from hvdgloo._job.context import Context
from hvdgloo.jax._primitive import is_traced

_depends = False
_numbers: Hashable = None
"""The numbers of the latest Context."""


def depends_on_size() -> None:
    """Record that the function that is being traced depends on this process's rank, or on the number of ranks."""
    global _depends
    _depends = True


def _read() -> None:
    if is_traced(()):
        depends_on_size()


def _entered(context: Context) -> None:
    global _depends, _numbers
    numbers = (
        context.rank,
        context.size,
        context.local_rank,
        context.local_size,
        context.cross_rank,
        context.cross_size,
        context.is_homogeneous,
        context.plan is None,  # otherwise these are the numbers of the epoch to come, and collectives have one rank
    )
    if _depends and numbers != _numbers:
        jax.clear_caches()
        _depends = False
    _numbers = numbers


process.when_asked_for_ranks(_read)
process.when_in_a_new_context(_entered)
