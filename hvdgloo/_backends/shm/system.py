"""The system calls for which Python has no functions; each is documented by the manual page of its name, section 2.

What is missing on a system (another kernel, a seccomp filter) raises OSError or Unsupported when it is first used;
where the ranks meet (``exchange``), that means that shared memory is unavailable.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import Any

_FUTEX_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1
_MFD_NOEXEC_SEAL = 0x8
_MAP_NORESERVE = 0x4000
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
# Calls that take less time than reacquiring the interpreter's lock keep it.
_brief = ctypes.PyDLL(None, use_errno=True)


class Unsupported(Exception):  # noqa: N818 - a fact about this system, not a failure
    """The reason why this system cannot do it, in a few words."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def has_strong_order() -> bool:
    """True if stores become visible to other cores in program order, as on x86 (Intel SDM vol. 3, 9.2.2)."""
    return os.uname().machine in ("x86_64", "AMD64")


def _futex_function(library: ctypes.CDLL) -> Any:
    function = library["syscall"]  # by index: an object of its own, whose types are its own
    function.restype = ctypes.c_long
    function.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    return function


_number = _FUTEX_NUMBERS.get(os.uname().machine, -1)
_wait = _futex_function(_libc)
_wake = _futex_function(_brief)


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``expected``, until it is woken, but no longer than ``seconds``.

    Returns early for any reason; callers look again. The word may be shared between processes.
    """
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    if _wait(_number, address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, f"futex: {os.strerror(code)}")


def futex_wake(address: int) -> None:
    """Wake all who sleep on the word at ``address``."""
    if _wake(_number, address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"futex: {os.strerror(code)}")


_SEALS = 0
if hasattr(fcntl, "F_ADD_SEALS"):
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_memory(name: str, nbytes: int) -> int:
    """Return the descriptor of anonymous memory of a size that is sealed (memfd_create).

    It lies neither in /dev/shm nor in any directory, takes real memory only where it is written, and ends with the last
    process that has it open or mapped.

    Raises:
        Unsupported: this system has no such memory.
        OSError: no descriptor is left, or a limit forbids it.
    """
    if not hasattr(os, "memfd_create") or not _SEALS:
        raise Unsupported("this system has no memfd_create")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3
            raise
        descriptor = os.memfd_create(name, flags)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_mmap = _libc["mmap"]
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def map_memory(descriptor: int, nbytes: int, offset: int = 0) -> int:
    """The address at which the shared memory of a descriptor appears in this process, from a page's ``offset`` on.

    Raises:
        Unsupported: it is smaller than that, or another process could shrink it and thereby crash its readers.
        OSError: there is no room for it (ENOMEM).
    """
    if os.fstat(descriptor).st_size < offset + nbytes:
        raise Unsupported("the shared segment is smaller than announced")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise Unsupported("the shared segment is not sealed")
    flags = mmap.MAP_SHARED | _MAP_NORESERVE
    address = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)


def unmap_memory(address: int, nbytes: int) -> None:
    """Undo ``map_memory``."""
    _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def free_memory(descriptor: int, offset: int, nbytes: int) -> None:
    """Give a stretch of shared memory back to the system; it reads as zeros then (fallocate).

    Raises:
        OSError: the system cannot.
    """
    _fallocate = _libc["fallocate"]
    flags = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    if _fallocate(descriptor, flags, ctypes.c_long(offset), ctypes.c_long(nbytes)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
