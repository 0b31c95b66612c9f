"""Descriptors: how many a process may have, and those that a forked child must not keep open.

The system's soft limit on open files is 1,024 in many places, since some old programs fail above it. A process
with one connection for each rank or host of a large job needs more, and may take more as long as the hard limit
permits. Where it does not, the job ends before any rank waits for a connection that cannot be accepted.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from hvdgloo.errors import ConfigError

_SPARE = 256
"""For whatever else the process opens, as far as the limit permits; where it does not, half of what is left."""
_LEAST_SPARE = 16

OUT_OF_DESCRIPTORS = (
    "No more files could be opened: this process has used up its limit on open files (ulimit -n); raise it"
)


def reserve_descriptors(least: int, who: str, purpose: str, wanted: int = 0) -> int:
    """Raise this process's soft limit on open files as far as necessary and permitted.

    Args:
        least: how many more files will be open, at the least.
        who, purpose: for the error.
        wanted: how many more there may be at the most, if that is more.

    Returns:
        the number that there is room for: ``wanted``, or fewer.

    Raises:
        ConfigError: there is no room for ``least``; the text says which limit to raise, and to what.
    """
    wanted = max(least, wanted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    held = _held()
    best = held + wanted + _SPARE
    higher = best if hard == resource.RLIM_INFINITY else min(best, hard)
    if soft < higher:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (higher, hard))
            soft = higher
        except (OSError, ValueError):
            pass  # macOS refuses more than its kernel's limit; then it stays as it is
    if soft < held + least + _LEAST_SPARE:
        enough = held + least + _SPARE
        raise ConfigError(
            f"{who} needs {least} more open files for {purpose}, but {held} are open, and this process may have no "
            f"more than {soft}. Raise its hard limit on open files to {enough}, for example with `ulimit -n {enough}` "
            f"in a shell that may do so, LimitNOFILE={enough} in a systemd unit, docker run --ulimit nofile={enough}, "
            "or nofile in /etc/security/limits.conf"
        )
    return min(wanted, max(soft - held - _SPARE, least + (soft - held - least - _LEAST_SPARE) // 2))


def _held() -> int:
    """Return the number of open descriptors."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 3  # it cannot be told here; the spare ones have to do


def close_keeping_numbers(descriptors: Sequence[int]) -> None:
    """Close descriptors without freeing their numbers, which other code may still consider its own and close."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        if descriptor >= 0:
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)
