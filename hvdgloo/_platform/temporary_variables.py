"""Environment variables for a moment, for C code that is called meanwhile, while other threads call ``getenv``.

In glibc before 2.41, ``getenv`` takes no lock: a variable that is added meanwhile may move the array that it reads, so
that the process ends with SIGSEGV. What may be done at any time is to give a variable that exists another value, since
glibc never frees the old one, and to write a byte of a variable that exists.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class TemporaryVariables:
    """Environment variables of this process that only C code sees, and only within ``set``. ``os.environ`` stays.

    A variable that the user has not set is in the environment from ``make_room`` on, under a name whose first letter
    is another one ("tORCH_..."); ``set`` exchanges this letter for as long as it lasts.

    Args:
        values: of the variables, by name.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._entries: dict[str, int] = {}
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None)
        self._libc.getenv.restype = ctypes.c_char_p
        self._libc.strdup.restype = ctypes.c_void_p
        self._libc.putenv.argtypes = [ctypes.c_void_p]

    def make_room(self) -> None:
        """Add what is missing to the environment. To be called before other threads read it, if possible."""
        with self._lock:
            for name in self._values.keys() - self._entries.keys():
                self._add(name)

    @contextmanager
    def set(self) -> Iterator[None]:
        """Have C code see the variables. A second thread waits for the first one, whose values it would restore."""
        with self._lock:
            before = {name: self._seen(name) for name in self._values}
            for name, value in self._values.items():
                self._show(name, value, before[name])
            try:
                yield
            finally:
                for name, value in self._values.items():
                    self._hide(name, value, before[name])

    def _show(self, name: str, value: str, before: str | None) -> None:
        if before is not None:
            os.putenv(name, value)
            return
        for _ in range(2):
            if name in self._entries:
                ctypes.memset(self._entries[name], ord(name[0]), 1)
            if self._seen(name) == value:
                return
            self._add(name)  # no room was made, or it was removed since

    def _hide(self, name: str, value: str, before: str | None) -> None:
        if before is None:
            ctypes.memset(self._entries[name], ord(name[0].swapcase()), 1)
        elif self._seen(name) == value:  # else the program has set it to something else meanwhile
            os.putenv(name, before)

    def _add(self, name: str) -> None:
        entry = f"{name[0].swapcase()}{name[1:]}={self._values[name]}"
        self._entries[name] = self._libc.strdup(entry.encode())  # never freed: it is part of the environment
        self._libc.putenv(self._entries[name])

    def _seen(self, name: str) -> str | None:
        value = self._libc.getenv(name.encode())
        return None if value is None else os.fsdecode(value)
