"""The way to this machine: an agent as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import IO

from hvdgloo.errors import LaunchError
from hvdgloo.runner.job.spec import HostEntry
from hvdgloo.runner.processes import reaper
from hvdgloo.runner.processes.bootstrap import agent_environment
from hvdgloo.runner.transport.base import AgentStream
from hvdgloo.runner.transport.failures import Diagnosis, Ending, other_failure, python_failure

_WARDEN_TIME = 3.0
"""Seconds that an agent's watchdog has to end what is left of the job."""


class LocalSpawner:
    """Agents as child processes: for this machine."""

    def start(self, host: HostEntry) -> AgentStream:
        # In "/" and not in the user's folder: the agent must not import a json.py that lies there.
        try:
            return LocalStream(
                [sys.executable, "-m", "hvdgloo.runner.agent"],
                cwd="/",
                env=agent_environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # A session of its own: a terminal's Ctrl-C and Ctrl-Z concern the launcher, which passes them on.
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"no agent could be started on {host.name}: {error}") from error

    def is_local(self, host: HostEntry) -> bool:
        return True

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        return python_failure(ending, sys.executable) or other_failure(ending, "its agent")


class LocalStream(subprocess.Popen[bytes]):
    """A child process in a session of its own, with pipes."""

    # Popen's own annotations allow for streams that are absent.
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def kill(self) -> None:
        if self.returncode is not None:
            return  # its number may be a stranger's by now; an agent that outlives its warden ends by itself
        # Agent and warden share a process group that nobody else is in. The agent goes first, so that the warden can
        # end what is left of the job; then the warden too, should it hang.
        agents = [pid for pid in reaper.descendants(self.pid) if _group(pid) == self.pid]
        reaper.signal_all(agents, signal.SIGKILL)
        try:
            self.wait(_WARDEN_TIME if agents else 0.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
