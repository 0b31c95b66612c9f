"""What a way to get an agent running on a host must offer, and the way to this machine: a child process.

Each way to other hosts is a module of its own (ssh); ``ways`` chooses. Nothing else of the launcher knows how an agent
came to be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Protocol

import hvdgloo
from hvdgloo.errors import LaunchError
from hvdgloo.runner import sweep
from hvdgloo.runner.reasons import Diagnosis, Ending, other_failure, python_failure
from hvdgloo.runner.spec import Host

_WARDEN_TIME = 3.0


class AgentStream(Protocol):
    """A command whose standard streams lead to an agent."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def poll(self) -> int | None:
        """The command's exit status, None while it runs."""

    def kill(self) -> None:
        """End the command at once. Its agent sees the end of its stream and dies."""

    def wait(self, timeout: float) -> int:
        """Wait for the command's end and return its status; subprocess.TimeoutExpired if it does not come."""


class Spawner(Protocol):
    """Starts agents."""

    def start(self, host: Host) -> AgentStream:
        """Start the command that runs an agent on ``host``. Does not wait for anything.

        Raises:
            LaunchError: the command cannot be executed.
        """

    def is_local(self, host: Host) -> bool:
        """Its agent is a child of this process, with the same environment."""

    def diagnose(self, host: Host, ending: Ending) -> Diagnosis:
        """Why the command for ``host`` has ended without an agent that can be used."""


class LocalSpawner:
    """Agents as child processes: for this machine."""

    def start(self, host: Host) -> AgentStream:
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

    def is_local(self, host: Host) -> bool:
        return True

    def diagnose(self, host: Host, ending: Ending) -> Diagnosis:
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
        agents = [pid for pid in sweep.descendants(self.pid) if _group(pid) == self.pid]
        sweep.signal_all(agents, signal.SIGKILL)
        try:
            self.wait(_WARDEN_TIME if agents else 0.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a local agent: the launcher's, and hvdgloo can be imported in it.

    Where hvdgloo is installed nothing needs to be added; a checkout that is merely in the current folder, or was put
    on ``sys.path`` by the caller, is named in PYTHONPATH.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(hvdgloo.__file__)))
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return dict(environ)
    paths = [path for path in (environ.get("PYTHONPATH", ""), root) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}
