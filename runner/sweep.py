"""Finding and ending every process of a job.

Process groups miss children that called setsid, and PDEATHSIG skips grandchildren. Two things hold: a process stays a
descendant of its agent, because agents are subreapers (Linux), and it inherits ``HVDGLOO_JOB_ID`` in its environment
unless it cleared that on purpose. A sweep ends whatever either of them finds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

JOB_VARIABLE = "HVDGLOO_JOB_ID"


def become_subreaper() -> None:
    """Adopt orphaned descendants from now on. Without effect where the system cannot do that."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(signum: int) -> None:
    """Have the system send ``signum`` to this process when the thread that forked it ends. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def descendants(root: int) -> set[int]:
    """All living descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    stack = [root]
    while stack:
        for pid in children.get(stack.pop(), ()):
            if pid not in found:
                found.add(pid)
                stack.append(pid)
    return found


def processes_of(job_id: str) -> set[int]:
    """All living processes of this user that carry the job's id in their environment."""
    if not job_id:
        return set()
    return set(_carriers(job_id))


def end_all(
    find: Callable[[], set[int]],
    *,
    grace: float,
    limit: float = 10.0,
    reap: Callable[[], None] = lambda: None,
) -> set[int]:
    """End what ``find`` finds, until it finds nothing: SIGTERM, after ``grace`` seconds SIGKILL.

    Args:
        reap: collects children that have ended, so that zombies are not found again.
        limit: seconds after which it gives up on processes that even SIGKILL does not end (a hung disk).

    Returns:
        the processes that are left.
    """
    started = time.monotonic()
    asked: set[int] = set()
    pause = 0.002
    while True:
        reap()
        found = find()
        elapsed = time.monotonic() - started
        if not found or elapsed > limit:
            return found
        if elapsed >= grace:
            signal_all(found, signal.SIGKILL)
        elif found - asked:
            signal_all(found - asked, signal.SIGTERM)
            signal_all(found - asked, signal.SIGCONT)
            asked |= found
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def signal_all(pids: Iterable[int], signum: int) -> None:
    """Send a signal to processes, some of which may just have ended or not be ours."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            pass


if os.path.isdir("/proc/self/fd"):

    def _pids() -> Iterable[int]:
        return (int(name) for name in os.listdir("/proc") if name.isdigit())

    def _parents() -> Iterable[tuple[int, int]]:
        for pid in _pids():
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    # The name, in parentheses, may itself hold spaces and parentheses.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in (b"Z", b"X"):
                yield pid, int(parent)

    def _carriers(job_id: str) -> Iterable[int]:
        mark = f"\0{JOB_VARIABLE}={job_id}\0".encode()
        user = os.getuid()
        for pid in _pids():
            try:
                if os.stat(f"/proc/{pid}").st_uid != user:
                    continue
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if mark in b"\0" + file.read() + b"\0":
                        yield pid
            except OSError:
                continue  # ended meanwhile, or protected

else:  # macOS: slower, by way of psutil

    def _parents() -> Iterable[tuple[int, int]]:
        import psutil

        for process in psutil.process_iter(["ppid", "status"]):
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.info["ppid"] is not None:
                yield process.pid, process.info["ppid"]

    def _carriers(job_id: str) -> Iterable[int]:
        import psutil

        for process in psutil.process_iter(["environ", "status"]):
            if (
                process.info["status"] != psutil.STATUS_ZOMBIE
                and (process.info["environ"] or {}).get(JOB_VARIABLE) == job_id
            ):
                yield process.pid
