"""This process's environment as C code reads it."""

from __future__ import annotations

import ctypes

LIBC = ctypes.CDLL(None)
LIBC.getenv.restype = ctypes.c_char_p


def seen_by_c(name: str) -> str | None:
    """Return what ``getenv`` returns."""
    value = LIBC.getenv(name.encode())
    return None if value is None else value.decode()


def entries() -> list[int]:
    """Return where the variables are, in the array that ``getenv`` reads."""
    array = ctypes.POINTER(ctypes.c_void_p).in_dll(LIBC, "environ")
    found: list[int] = []
    while address := array[len(found)]:
        found.append(address)
    return found
