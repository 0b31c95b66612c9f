"""Which data sets this process has written, so that the same DataFrame is not written twice."""

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
"""Rows to train on, rows to validate on, metadata of columns, bytes of a row on average."""


@dataclasses.dataclass
class _Entry:
    """Attributes:
    key: what was written, and how. Holds what it is about, so that no id in it is used again.
    users: how many training runs use it now.
    lock: held while it is claimed, written and given back.
    release: gives it back to other programs; None while nobody here uses it.
    token: of what was written last: another program may have taken its place since then.
    properties: None until it is written.
    """

    key: Hashable
    users: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    release: Release | None = None
    token: str = ""
    properties: Properties | None = None


class TrainingDataCache:
    """Data sets by their numbers: 0, 1, and so on, of all stores.

    A data set that nobody uses any more stays until its number is needed for another one.
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
        """The number of the data set with this key, which is written first if it has to be.

        While this lasts the number belongs to no other data set. Who asks for the same key meanwhile shares it, and
        waits until it is written.

        Args:
            write: writes the data set with this number, and a token with it, and tells its properties.
            is_there: whether what was written with the token still is in the store.
            claim: claims a number's place in the store for this process, and returns a function that gives it back;
                None if another program uses that place, in which case there is a next number.
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
            if known:  # another program may have had one of them in between; then there is a second one
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
        """Raises:
        ConfigError: there is no data set with this number.
        """
        with self._lock:
            entry = self._entries.get(number)
        if entry is None or entry.properties is None:
            raise ConfigError(f"no data set {number} has been prepared: prepare_data() tells its number")
        return entry.properties

    def clear(self) -> None:
        """Forgets the data sets that nobody uses. Their files stay."""
        with self._lock:
            self._entries = {number: entry for number, entry in self._entries.items() if entry.users}
