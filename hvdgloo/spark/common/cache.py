"""Which data sets this process has written, so that the same DataFrame is not written twice."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from hvdgloo.errors import ConfigError

Properties = tuple[int, int, dict[str, dict[str, Any]], float]
"""Rows to train on, rows to validate on, metadata of columns, bytes of a row on average."""


@dataclasses.dataclass
class _Entry:
    """Attributes:
    key: what was written, and how. Holds what it is about, so that no id in it is used again.
    users: how many training runs use it now.
    lock: held while it is written.
    properties: None until it is written.
    """

    key: Hashable
    users: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
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
        self, key: Hashable, write: Callable[[int], Properties], *, is_there: Callable[[int], bool]
    ) -> Iterator[int]:
        """The number of the data set with this key, which is written first if it has to be.

        While this lasts the number belongs to no other data set. Who asks for the same key meanwhile shares it, and
        waits until it is written.

        Args:
            write: writes the data set with this number, and tells its properties.
            is_there: whether it still is in the store.
        """
        with self._lock:
            number = next((n for n, entry in self._entries.items() if entry.key == key), None)
            if number is None:
                number = next(n for n in itertools.count() if n not in self._entries or not self._entries[n].users)
                self._entries[number] = _Entry(key)
            entry = self._entries[number]
            entry.users += 1
        try:
            with entry.lock:
                if entry.properties is None or not is_there(number):
                    entry.properties = None
                    entry.properties = write(number)
            yield number
        finally:
            with self._lock:
                entry.users -= 1

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
