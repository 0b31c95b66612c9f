"""The data sets that this process has written, so that the same DataFrame is not written twice."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import threading
from collections.abc import Callable, Hashable, Iterator, Set
from typing import Any

from hvdgloo.errors import ConfigError
from hvdgloo.spark.common._claims import Release

Properties = tuple[int, int, dict[str, dict[str, Any]], float]
"""Number of training rows and of validation rows, metadata of columns, average size of a row in bytes."""


@dataclasses.dataclass
class _Entry:
    """A data set.

    Attributes:
        key: identity of the content and its options. It holds the objects that it identifies, so that no id in it is
            reused.
        users: number of training runs that use the data set now.
        lock: held while the data set is claimed, written and released.
        release: releases it to other programs; None while it is unused here.
        token: token of the last content written, which another program may have replaced since.
        properties: None until the data set is written.
    """

    key: Hashable
    users: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    release: Release | None = None
    token: str = ""
    properties: Properties | None = None


class TrainingDataCache:
    """Data sets of all stores by their numbers: 0, 1, and so on.

    An unused data set stays until its number is needed for another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    @contextlib.contextmanager
    def use(
        self,
        key: Hashable,
        write: Callable[[int, str], Properties],
        *,
        is_there: Callable[[int, str], bool],
        claim: Callable[[int], Release | None],
    ) -> Iterator[int]:
        """Provide the number of the data set with this key, writing the data set first if necessary.

        While the context lasts the number belongs to no other data set. Other threads that ask for the same key
        meanwhile share the data set, and wait until it is written.

        Args:
            write: writes the data set with this number and a token, and returns its properties.
            is_there: returns whether the content written with the token is still in the store.
            claim: claims a number in the store for this process, and returns a function that releases it; None if
                another program uses it, in which case the next number is tried.
        """
        taken: set[int] = set()
        while True:
            number, entry = self._enter(key, taken)
            try:
                with entry.lock:
                    entry.release = entry.release or claim(number)
                    if entry.release is None:
                        taken.add(number)
                        entry.properties = None
                        continue
                    if entry.properties is None or not is_there(number, entry.token):
                        entry.properties, entry.token = None, secrets.token_hex(8)
                        entry.properties = write(number, entry.token)
                yield number
                return
            finally:
                self._leave(entry)

    def _enter(self, key: Hashable, taken: Set[int]) -> tuple[int, _Entry]:
        with self._lock:
            known = [n for n, entry in self._entries.items() if entry.key == key and n not in taken]
            if known:  # several, if another program used one of them in between
                number = min(known, key=lambda n: (self._entries[n].properties is None, n))
            else:
                free = (n for n in itertools.count() if n not in self._entries or not self._entries[n].users)
                number = next(n for n in free if n not in taken)
                self._entries[number] = _Entry(key)
            entry = self._entries[number]
            entry.users += 1
            return number, entry

    def _leave(self, entry: _Entry) -> None:
        with entry.lock:
            with self._lock:
                entry.users -= 1
                is_last = not entry.users
            if is_last and entry.release is not None:
                entry.release()
                entry.release = None

    def properties(self, number: int) -> Properties:
        """Return the properties of a data set.

        Raises:
            ConfigError: there is no data set with this number.
        """
        with self._lock:
            entry = self._entries.get(number)
        if entry is None or entry.properties is None:
            raise ConfigError(f"no data set {number} has been prepared: use the number that prepare_data() provides")
        return entry.properties

    def clear(self) -> None:
        """Forget unused data sets. Their files stay."""
        with self._lock:
            self._entries = {number: entry for number, entry in self._entries.items() if entry.users}
