"""Identity of a host: processes with the same one can share memory and an abstract Unix socket.

The host name alone is not enough. Two containers on one machine share a kernel but not a network namespace; two
machines cloned from one image may share a name. So boot id, network namespace and host name are hashed together.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket

from hvdgloo._platform.machine import boot_id
from hvdgloo._platform.spelling import in_one_line


@functools.cache
def _identity(pid: int) -> str:
    parts = [boot_id(), _network_namespace(), host_name()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def host_name(given: str | None = None) -> str:
    """Return the name of this machine in printable text: ``given``, or otherwise its own; both may be any bytes."""
    return in_one_line(given or socket.gethostname())[:255]


def host_identity() -> str:
    """Return 16 hexadecimal digits, equal in all processes that can share memory with this one.

    Outside Linux there is neither a boot id nor a network namespace; the machine's hardware address is used instead.
    """
    # By process id, since a forked child may have entered another namespace.
    return _identity(os.getpid())


def _network_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
