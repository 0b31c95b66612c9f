"""Large pages for large new tensors.

The system gives out memory page by page, at the first touch of each: of 4 KiB for 20 MB, that takes longer than to fill
them. Where it gives large pages to who asks for them (Linux: transparent_hugepage/enabled is "madvise"), numpy asks
for its arrays, and this does for other frameworks' tensors.
"""

from __future__ import annotations

import ctypes
import mmap

LARGE_BYTES = 4 << 20
"""Bytes of a tensor from which it is worth a system call, as numpy finds, too."""

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_libc = ctypes.CDLL(None)


def advise_large_pages(address: int, nbytes: int) -> None:
    """Ask for large pages in new memory (madvise(2)); a hint, which may be ignored."""
    if _ADVICE is None:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _ADVICE)
