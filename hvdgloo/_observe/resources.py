"""Processor time and memory of this process, from the system itself."""

from __future__ import annotations

import os
import sys


def cpu_seconds() -> float:
    """Return the user and system time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def resident_bytes() -> int:
    """Return the memory that this process has in use; where the system does not tell, the most it ever used."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
