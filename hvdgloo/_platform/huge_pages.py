"""Large pages for large new tensors.

The system hands out memory page by page, at the first access to each: for 20 MB in pages of 4 KiB, that takes longer
than filling them. Where it gives large pages on request (Linux: transparent_hugepage/enabled is "madvise"), numpy
requests them for its arrays, and this module does for other frameworks' tensors.
"""

from __future__ import annotations

import ctypes
import mmap

LARGE_BYTES = 4 << 20
"""Size in bytes from which a tensor is worth a system call; numpy's limit is the same."""

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_libc = ctypes.CDLL(None)


def advise_large_pages(address: int, nbytes: int) -> None:
    """Ask for large pages in new memory (madvise(2)); a hint, which may be ignored."""
    if _ADVICE is None:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _ADVICE)
