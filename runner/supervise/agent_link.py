"""The launcher's end of one command that connects to an agent, with its channel."""

from __future__ import annotations

import os
import subprocess
from collections import deque

from hvdgloo.runner.job.spec import HostEntry
from hvdgloo.runner.protocol.frames import CHUNK, LAST_WORDS, Credit, Hello, Output
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.transport.base import AgentStream

_STDERR_KEPT = 20
_ACKNOWLEDGE = 64 * 1024  # bytes of output for which credit is given at once
_HELD_BACK = 200  # lines kept of what arrives before an agent can be used


class AgentLink:
    """A command, its streams, and what came from them. Only ``state`` has the host's progress.

    Args:
        patience: seconds for the command to end after its agent, and again after it was killed.

    Attributes:
        state: the state of the host, which may have several commands in succession.
        hello: the agent's first frame.
        workers: numbers of the workers that the agent was told to start.
        held_back: lines that arrived before the agent was usable: from its login shell, or about the reason why there
            is no agent.
        stderr: the last lines of the command's standard error.
        listening, stderr_open: whether the loop's selector serves these streams.
    """

    def __init__(self, state: HostState, stream: AgentStream, *, patience: float = 5.0) -> None:
        self.state = state
        self.stream = stream
        self._patience = patience
        self.channel = stream.channel()
        self.hello: Hello | None = None
        self.workers: list[int] = []
        self._owed: dict[int, int] = {}  # for each worker, bytes of output without credit
        self.held_back: list[str] = []
        self.stderr: deque[str] = deque(maxlen=_STDERR_KEPT)
        self.listening = False
        self.stderr_open = False
        os.set_blocking(stream.stderr.fileno(), False)

    @property
    def host(self) -> HostEntry:
        """The host as the user gave it."""
        return self.state.host

    @property
    def gone(self) -> bool:
        """True if the agent no longer answers."""
        return self.state.gone

    @property
    def last_words(self) -> str:
        """The last line of the command's standard error; empty if there is none."""
        return self.stderr[-1].removeprefix(LAST_WORDS) if self.stderr else ""

    def read_stderr(self) -> list[str] | None:
        """Return new lines of the command's standard error; None at its end."""
        try:
            data = os.read(self.stream.stderr.fileno(), CHUNK)
        except BlockingIOError:
            return []
        return self.keep(data) if data else None

    def keep(self, data: bytes) -> list[str]:
        """Return the lines in data that is not a frame; the last ones are kept for error messages."""
        lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        self.stderr.extend(lines)
        return lines

    def hold_back(self, lines: list[str]) -> None:
        """Keep lines that may be shown later."""
        self.held_back += lines[: _HELD_BACK - len(self.held_back)]

    def owe(self, output: Output) -> None:
        """Record output for which the agent is to get credit."""
        self._owed[output.number] = self._owed.get(output.number, 0) + len(output.data)

    def give_credit(self) -> None:
        """Give the agent credit for its workers' output, unless it is too little to be worth a frame."""
        for number, amount in self._owed.items():
            if amount >= _ACKNOWLEDGE:
                self.channel.send(Credit(number, amount))
                self._owed[number] = 0

    def release(self, number: int) -> None:
        """Forget a worker that has ended."""
        if number in self.workers:
            self.workers.remove(number)
        self._owed.pop(number, None)

    def close(self) -> None:
        """Collect the command, whose agent has ended, and close our ends of its streams."""
        try:
            self.stream.stdin.close()
        except OSError:
            pass
        try:
            self.stream.wait(self._patience)
        except subprocess.TimeoutExpired:
            self._kill()
        self.stream.stdout.close()
        self.stream.stderr.close()

    def _kill(self) -> None:
        self.stream.kill()
        try:
            self.stream.wait(self._patience)
        except subprocess.TimeoutExpired:
            pass  # the system keeps it, for a device or file system that does not answer; nothing more can be done
