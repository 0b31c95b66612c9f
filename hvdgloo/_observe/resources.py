"""What this process takes of its host: processor time and memory, from the system itself."""

from __future__ import annotations

import os
import sys


def cpu_seconds() -> float:
    """User and system time of this process, and of those of its children that have ended."""
    return sum(os.times()[:4])


def resident_bytes() -> int:
    """Memory that this process has in use; where the system does not say, the most that it ever had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
