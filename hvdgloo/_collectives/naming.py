"""Automatic names of tensors, aligned between ranks.

Ranks match their calls by name. A call without one gets the number of calls of its kind so far, which is the same on
all ranks as long as they make the same calls in the same order, whatever their timing. The counters belong to the
Context, not to a front-end: two front-ends in one program must not give one name to two tensors, and a reinitialised
job starts from 1 like a new one.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from hvdgloo._job.context import Context


class Names:
    """The automatic names of one Context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[tuple[int, str], Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._reserved: Counter[str] = Counter()

    def next(self, process_set: int, prefix: str) -> str:
        """Return a new name for an operation: counted for each process set and prefix."""
        return f"{template_of(prefix)}.{self.count(process_set, prefix)}"

    def count(self, process_set: int, prefix: str) -> int:
        """Return the number in a new name."""
        with self._lock:
            return next(self._counters[process_set, prefix])

    def restart(self, process_set: int | None = None) -> None:
        """Count from 1 again, where ranks may have counted differently so far.

        Args:
            process_set: a new set, whose number an earlier set may have had, to which not all its ranks
                belonged; None for all sets, after a join.
        """
        with self._lock:
            for counted in [key for key in self._counters if process_set in (None, key[0])]:
                del self._counters[counted]

    def reserve(self, names: Sequence[str]) -> list[str]:
        """Names for tensors that will be sent again and again; see ``Frontend.reserve_names``."""
        with self._lock:
            self._reserved.update(names)
            return [name if (n := self._reserved[name]) == 1 else f"{name}.{n}" for name in names]


def template_of(prefix: str) -> str:
    """Return what the automatic names of a kind of operation have before their numbers."""
    return f"{prefix}.noname"


_NAMES: weakref.WeakKeyDictionary[Context, Names] = weakref.WeakKeyDictionary()
_NAMES_LOCK = threading.Lock()


def names_of(context: Context) -> Names:
    """The names of a Context, made at the first call."""
    names = _NAMES.get(context)
    if names is None:
        with _NAMES_LOCK:
            names = _NAMES.setdefault(context, Names())
    return names
