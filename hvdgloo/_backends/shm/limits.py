"""The memory that this process may still take.

A process that writes to memory beyond its control group's limit gets no error: the kernel kills a process of the group.
So the limit is checked first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

_MARGIN = 16 << 20
"""Bytes that are left to others."""


def check_room(nbytes: int) -> None:
    """Check that there is room for ``nbytes`` more of shared memory, as far as control groups can say.

    Raises:
        OSError: ENOMEM, with the limit.
    """
    for folder in _groups():
        limit, used = _number(folder, "memory.max"), _number(folder, "memory.current")
        if limit is None:
            limit, used = _number(folder, "memory.limit_in_bytes"), _number(folder, "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free = limit - used + _reclaimable(folder)
            if free < nbytes + _MARGIN:
                raise OSError(errno.ENOMEM, f"{max(0, free) >> 20} MiB are left below the memory limit in {folder}")


def _groups() -> Iterator[str]:
    """The directories of this process's memory control group and of those around it."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        # In a container the path may be one that only the host sees; what limits the container is at the root then.
        while True:
            yield root + path.rstrip("/")
            if path.strip("/") == "":
                break
            path = os.path.dirname(path)


def _number(folder: str, name: str) -> int | None:
    """Return the number in a control group's file; None if there is no such file, or no limit."""
    try:
        with open(os.path.join(folder, name), encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _reclaimable(folder: str) -> int:
    """Bytes of files that the kernel caches, and lets go of first."""
    try:
        with open(os.path.join(folder, "memory.stat"), encoding="ascii") as file:
            values = dict(line.split() for line in file)
    except (OSError, ValueError):
        return 0
    return sum(int(values.get(name, 0)) for name in ("inactive_file", "active_file"))
