"""Finding and ending every process that an agent of a job has started.

Process groups miss children that called setsid, and PDEATHSIG skips grandchildren. Two properties are reliable: a
process stays a descendant of its agent, because agents are subreapers (Linux), and it inherits ``HVDGLOO_AGENT_ID`` in
its environment unless it cleared that on purpose. A sweep ends the processes with either property. The variable differs
for each host of a job: containers may share process ids, and an agent must not take another agent's workers for its
own.

If an agent was lost, another one is sent to its host to sweep. Every agent therefore holds a sign (an abstract socket)
while it lives, so that the other one can leave it the time in which workers may save their work.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable

from hvdgloo._net import abstract

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

AGENT_VARIABLE = "HVDGLOO_AGENT_ID"

LIMIT = 10.0
"""Seconds after which a process that survives SIGKILL counts as one that cannot be killed."""

HANG_TIME = 0.5
"""Seconds that an agent may take longer than its workers, and its watchdog longer than the agent."""

_LOOK = 0.02


def become_subreaper() -> None:
    """Adopt orphaned descendants from now on. No effect if the system does not support it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def take_name(name: str) -> None:
    """Show this process under a name of at most 15 characters in ``ps -o comm`` and ``top``. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, name.encode("ascii"), 0, 0, 0)


def die_with_parent(signum: int) -> None:
    """Have the system send ``signum`` to this process when the thread that forked it ends. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def descendants(root: int) -> set[int]:
    """Return all living descendants of a process."""
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


def processes_of(agent_id: str) -> set[int]:
    """Return all living processes of this user with an agent's id in their environment."""
    if not agent_id:
        return set()
    return set(_carriers(agent_id))


def end_all(
    find: Callable[[], set[int]],
    *,
    grace: float,
    limit: float = LIMIT,
    reap: Callable[[], None] = lambda: None,
    rest: Callable[[float], None] = time.sleep,
) -> set[int]:
    """End all processes that ``find`` returns, until there are none: SIGTERM, and after ``grace`` seconds SIGKILL.

    Args:
        reap: collects children that have ended, so that zombies are not found again.
        limit: seconds after the first SIGKILL until processes that survive it (because of a hung disk) are given up.
        rest: waits for the given seconds; a caller with other duties performs them meanwhile.

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
        if not found or elapsed > grace + limit:
            return found
        if elapsed >= grace:
            signal_all(found, signal.SIGKILL)
        elif found - asked:
            signal_all(found - asked, signal.SIGTERM)
            signal_all(found - asked, signal.SIGCONT)
            asked |= found
        rest(pause)
        pause = min(pause * 2, 0.05)


def attend(agent_id: str) -> socket.socket | None:
    """Claim responsibility for the processes with this agent id, as long as the returned socket is open."""
    if sys.platform != "linux":
        return None
    # The socket receives nothing, so nothing can fill a queue or make this process wait. It only exists, and the system
    # tells who owns it.
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sign.bind("\0" + _sign_name(agent_id))
    except OSError:
        sign.close()
        return None
    return sign


def _sign_name(agent_id: str) -> str:
    return f"hvdgloo-agent-{agent_id}"


def _attendants(agent_id: str) -> set[int]:
    """Return this user's processes that hold the sign, as far as they can be seen."""
    return abstract.holders(_sign_name(agent_id)) - {os.getpid()}


def end_abandoned(agent_id: str, grace: float, rest: Callable[[float], None] = time.sleep) -> set[int]:
    """End the processes that a lost agent may have left, and the agent itself if it hangs.

    Args:
        grace: seconds between SIGTERM and SIGKILL. A living agent has sent the SIGTERM itself, and gets this time.
        rest: as for ``end_all``.

    Returns:
        the processes that are left.
    """
    deadline = time.monotonic() + grace + HANG_TIME
    attended = bool(_attendants(agent_id))
    while attended and abstract.inode_of(_sign_name(agent_id)) and time.monotonic() < deadline:
        rest(_LOOK)
    for agent in _attendants(agent_id):
        _end_hung(agent, rest)
    return end_all(lambda: processes_of(agent_id) - {os.getpid()}, grace=0.0 if attended else grace, rest=rest)


def _end_hung(agent: int, rest: Callable[[float], None]) -> None:
    """End an agent that does not end on its own, and its watchdog, which gets a moment to clean up."""
    watchdog = next((parent for pid, parent in _parents() if pid == agent), 0)
    # The agent was forked by its watchdog; if the watchdog has gone, another process has adopted the agent.
    twins = watchdog > 1 and _command(watchdog) == _command(agent)
    signal_all([agent], signal.SIGKILL)
    if twins:
        signal_all([watchdog], signal.SIGCONT)
        deadline = time.monotonic() + HANG_TIME
        while any(pid == watchdog for pid, _ in _parents()) and time.monotonic() < deadline:
            rest(_LOOK)
        signal_all([pid for pid, _ in _parents() if pid == watchdog], signal.SIGKILL)


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def signal_all(pids: Iterable[int], signum: int) -> None:
    """Send a signal to processes, some of which may have just ended, or may not be ours."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            pass


if sys.platform == "linux":

    def _pids() -> Iterable[int]:
        try:
            return [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except OSError:
            return ()  # no worker is started without /proc

    def _parents() -> Iterable[tuple[int, int]]:
        for pid in _pids():
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    # The name, in parentheses, may itself contain spaces and parentheses.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in (b"Z", b"X"):
                yield pid, int(parent)

    def _carriers(agent_id: str) -> Iterable[int]:
        mark = f"\0{AGENT_VARIABLE}={agent_id}\0".encode()
        user = os.geteuid()  # whose /proc/PID is
        for pid in _pids():
            try:
                if os.stat(f"/proc/{pid}").st_uid != user:
                    continue
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if mark in b"\0" + file.read() + b"\0":
                        yield pid
            except OSError:
                continue  # ended meanwhile, or protected

else:  # macOS: slower, through psutil

    def _parents() -> Iterable[tuple[int, int]]:
        import psutil

        for process in psutil.process_iter(["ppid", "status"]):
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.info["ppid"] is not None:
                yield process.pid, process.info["ppid"]

    def _carriers(agent_id: str) -> Iterable[int]:
        import psutil

        for process in psutil.process_iter(["environ", "status"]):
            if (
                process.info["status"] != psutil.STATUS_ZOMBIE
                and (process.info["environ"] or {}).get(AGENT_VARIABLE) == agent_id
            ):
                yield process.pid
