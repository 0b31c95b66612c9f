"""The way to this machine: an agent as a child process.

The command line's launcher forks it, before it has any thread: otherwise a third of what ``hvdgloo-run`` costs would be
a second Python importing the same again. Any other program (``hvdgloo.run.run`` in a notebook, say) may have threads, a
GPU and gigabytes of memory, with which a fork is unsafe or slow: its agent is a fresh process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import NoReturn

from hvdgloo.errors import LaunchError
from hvdgloo.runner.job.spec import HostEntry
from hvdgloo.runner.processes import reaper
from hvdgloo.runner.processes.bootstrap import PipedProcess, agent_environment
from hvdgloo.runner.transport.base import AgentStream
from hvdgloo.runner.transport.failures import Diagnosis, Ending, other_failure, python_failure

_WARDEN_TIME = 3.0
"""Seconds that an agent's watchdog has to end what is left of the job."""


class LocalSpawner:
    """Agents as child processes: for this machine.

    Args:
        fork: this process is a launcher and nothing else, and may be forked as long as it has one thread.
    """

    def __init__(self, *, fork: bool = False) -> None:
        self._fork = fork and sys.platform == "linux"  # macOS libraries do not support it

    def start(self, host: HostEntry) -> AgentStream:
        # In "/" and not in the user's folder: the agent must not import a json.py from there.
        try:
            return LocalStream(
                [sys.executable, "-m", "hvdgloo.runner.agent"],
                environ=agent_environment(os.environ),
                cwd="/",
                instead=_be_the_agent if self._fork and threading.active_count() == 1 else None,
            )
        except OSError as error:
            raise LaunchError(f"no agent could be started on {host.name}: {error}") from error

    def is_local(self, host: HostEntry) -> bool:
        return True

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        return python_failure(ending, sys.executable) or other_failure(ending, "its agent")


class LocalStream(PipedProcess):
    """An agent as a child process."""

    def starved(self) -> bool:
        """Tell whether the agent would run if it could.

        One that is stopped, or waits for something, has no such excuse: its next sign of life is overdue.
        """
        return any(_wants_to_run(pid) for pid in self._agents())

    def _agents(self) -> list[int]:
        # Agent and watchdog share a process group with no other process.
        return [pid for pid in reaper.descendants(self.pid) if _group(pid) == self.pid]

    def kill(self) -> None:
        if self.returncode is not None:
            return  # its number may be another process's by now; an agent that outlives its watchdog ends on its own
        # The agent goes first, so that the watchdog can end what is left of the job; then the watchdog too, should it
        # hang.
        agents = self._agents()
        reaper.signal_all(agents, signal.SIGKILL)
        try:
            self.wait(_WARDEN_TIME if agents else 0.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)


def _be_the_agent() -> NoReturn:
    """Do, in the forked child, which has its streams, directory and session, what a fresh process would do."""
    status = 1
    try:
        # The parent also waits for the end of one of these.
        for descriptor in _descriptors():
            if descriptor > 2:
                with contextlib.suppress(OSError):  # the list's own
                    os.close(descriptor)
        gc.enable()
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.environ.update(agent_environment(os.environ))
        from hvdgloo.runner.agent.agent import main

        status = main()
    except BaseException:  # noqa: BLE001 - nothing of the launcher may run in this process
        traceback.print_exc()
    finally:
        os._exit(status)


def _descriptors() -> Iterable[int]:
    """Yield the descriptors that may be open: all possible ones without /proc, which the agent reports itself."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(os.sysconf("SC_OPEN_MAX"))


def _wants_to_run(pid: int) -> bool:
    """Tell whether a process waits for a core, or for its memory to be swapped in; True if that is not known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"R", b"D")
    except ProcessLookupError:
        return False
    except OSError:
        return not os.path.exists(f"/proc/{os.getpid()}")


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
