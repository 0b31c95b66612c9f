"""The launcher's end of one agent: the command that leads to it, its channel, and what is known about it."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque

from hvdgloo.runner.console.progress import Step
from hvdgloo.runner.job.spec import HostEntry
from hvdgloo.runner.protocol import heartbeat
from hvdgloo.runner.protocol.channel import Channel
from hvdgloo.runner.protocol.frames import CHUNK, PREAMBLE, Hello
from hvdgloo.runner.protocol.heartbeat import Silence
from hvdgloo.runner.transport.base import AgentStream

_STDERR_KEPT = 20
_END_TIME = 5.0  # seconds in which a command ends whose agent has
_KILL_TIME = 5.0  # and in which it does once it was killed


class Link:
    """A host's agent, as the launcher holds it.

    Attributes:
        hello: what it said first.
        step: how far its host has come.
        taken: it can be used.
        ranks: of the workers that it was told to start.
        needed: the job cannot go on without it.
        finishing: it was told that the job is over.
        said_bye: nothing of the job is left on its host.
        gone: its stream has ended, or it counts as lost.
        silence: how long nothing has been heard of it.
        ended_at: when its stream ended, without a good-bye.
        held_back: lines that came before the agent could be used: its login shell's, or why there is none.
        owed: for each rank, bytes of output for which it was given no credit yet.
        stderr: the last lines that its command wrote there.
    """

    def __init__(self, host: HostEntry, stream: AgentStream) -> None:
        self.host = host
        self.stream = stream
        self.channel = Channel(stream.stdout.fileno(), stream.stdin.fileno(), preamble=PREAMBLE)
        self.hello: Hello | None = None
        self.step = Step.CONNECTING
        self.taken = False
        self.said_bye = False
        self.needed = True
        self.finishing = False
        self.gone = False
        self.ranks: list[int] = []
        self.silence = Silence(heartbeat.FIRST, time.monotonic())
        self.ended_at: float | None = None
        self.held_back: list[str] = []
        self.writes_registered = False
        self.stderr_open = True
        self.stderr: deque[str] = deque(maxlen=_STDERR_KEPT)
        self.owed: dict[int, int] = {}
        os.set_blocking(stream.stderr.fileno(), False)

    def read_stderr(self) -> list[str] | None:
        """Lines that the command wrote to its standard error; None at the end of it."""
        try:
            data = os.read(self.stream.stderr.fileno(), CHUNK)
        except BlockingIOError:
            return []
        return self.keep(data) if data else None

    def keep(self, data: bytes) -> list[str]:
        """The lines in what is no frame; the last ones are kept for error messages."""
        lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        self.stderr.extend(lines)
        return lines

    def close(self) -> None:
        """Collect the command, whose agent has ended, and close our ends of its streams."""
        try:
            self.stream.stdin.close()
        except OSError:
            pass
        try:
            self.stream.wait(_END_TIME)
        except subprocess.TimeoutExpired:
            self._kill()
        self.stream.stdout.close()
        self.stream.stderr.close()

    def _kill(self) -> None:
        self.stream.kill()
        try:
            self.stream.wait(_KILL_TIME)
        except subprocess.TimeoutExpired:
            pass  # the system keeps it, for a device or file system that does not answer; there is no more to be done
