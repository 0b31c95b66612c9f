"""The interface of a transport: a way to get an agent running on a host.

Each transport is a module of its own (``local``, ``ssh``, ``srun``, ``template``); ``select`` chooses. No other part of
the launcher knows how an agent was started.
"""

from __future__ import annotations

from typing import IO, Protocol

from hvdgloo.runner.job.spec import HostEntry
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.transport.failures import Diagnosis, Ending


class AgentStream(Protocol):
    """A command whose standard streams lead to an agent."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def channel(self) -> FrameChannel:
        """Frames over these streams. To be called once."""

    def poll(self) -> int | None:
        """Return the command's exit status; None while it runs."""

    def starved(self) -> bool:
        """Tell whether its agent is silent only because it waits for a core or for memory, as far as is known here."""

    def kill(self) -> None:
        """End the command at once. Its agent sees the end of its stream and dies."""

    def wait(self, timeout: float) -> int:
        """Wait for the command's end and return its status.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """


class Spawner(Protocol):
    """Starts agents."""

    def start(self, host: HostEntry) -> AgentStream:
        """Start the command that runs an agent on ``host``. Does not wait for anything.

        Raises:
            LaunchError: the command cannot be executed.
        """

    def is_local(self, host: HostEntry) -> bool:
        """Tell whether its agent is a child of this process, with the same environment."""

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        """Explain why the command for ``host`` ended without a usable agent."""
