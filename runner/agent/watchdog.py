"""The agent's parent, which outlives it: it ends the processes that the agent left behind, and only then closes the
stream.

So the launcher sees the end of the stream only when the host is clean, even if the agent is killed.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Mapping

from hvdgloo._platform.machine import MemoryWatch
from hvdgloo.runner.agent.observing import remove_leftovers
from hvdgloo.runner.agent.recorded import folder_of, remove_recorded
from hvdgloo.runner.processes import reaper
from hvdgloo.runner.protocol.frames import LAST_WORDS

_MARK_BYTES = 128
_SECOND_LIMIT = 1.0  # seconds for what the agent itself could not kill


class Mark:
    """The agent's id, in memory that agent and watchdog share: the agent learns it only after the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _MARK_BYTES)

    def write(self, agent_id: str) -> None:
        self._memory[: len(agent_id)] = agent_id.encode("ascii")

    def read(self) -> str:
        return self._memory[:].rstrip(b"\0").decode("ascii")


def watch(agent: int, mark: Mark, memory: MemoryWatch, environ: Mapping[str, str]) -> int:
    """Wait for the agent proper, end the rest of its job, and return the status to exit with.

    Args:
        memory: tells whether the kernel killed the agent.
        environ: the agent's own environment.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _: reaper.signal_all([agent], number))
    pid = 0
    while pid != agent:
        pid, status = os.waitpid(-1, 0)
    if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
        _explain(memory.account(agent) or "the kernel reports no lack of memory, so a user or another program did it")
    reaper.end_all(
        lambda: (reaper.descendants(os.getpid()) | reaper.processes_of(mark.read())) - {os.getpid()},
        grace=0.0,
        limit=_SECOND_LIMIT if status == 0 else reaper.LIMIT,
        reap=_reap_all,
    )
    if status and mark.read():
        remove_leftovers(mark.read(), environ)
        remove_recorded(folder_of(mark.read()))
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code  # as in a shell: this crosses ssh


def _explain(account: str) -> None:
    """Write the reason for the agent's end, which the launcher shows together with the loss."""
    try:
        os.write(2, f"{LAST_WORDS}{account}\n".encode())
    except OSError:
        pass  # the launcher has gone, too


def _reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
