"""The first messages of an agent's task and the launcher, right after the handshake.

The job's secret reaches the task in another way and is never sent here. Both sides prove it
(``hvdgloo._net.handshake``), the launcher first; then the task tells who it is (``TaskHello``) and the launcher whether
it may stay (``Reply``). The agent's frames follow, with the same keys.

Both messages are JSON. Names that are not known are ignored: versions that differ must understand each other far enough
to tell their users so. Nothing is ever unpickled.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import msgspec

from hvdgloo._net.codec import from_json, to_json
from hvdgloo._net.handshake import Handshake, Link
from hvdgloo._net.visitors import Steps, sent
from hvdgloo.errors import AuthenticationError

_LONGEST = 64 * 1024
"""Bytes of one message before the frames."""

_RANK = 0
"""Stands for every task in the handshake, where nothing tells tasks apart: none has proved anything yet."""


class TaskHello(msgspec.Struct, frozen=True):
    """An agent's task, as it introduces itself.

    Attributes:
        index: which of the job's tasks it is.
        version: of hvdgloo there.
        python: minor version there: ``3.11``.
        host: name of its machine.
        name: what is shown with the host: ``executor 3``.
        machine: equal for tasks whose workers can form one host of the job.
        cwd: working directory of its workers.
        command: what runs a function there.
        path: PYTHONPATH of its workers.
        kept, limits: names of variables; see ``HostProfile``.
        pid: of the task's process.
        attempt: the number of earlier attempts of this task.
        address: where it came from, as the launcher saw it.
    """

    index: int
    version: str
    python: str
    host: str = ""
    name: str = ""
    machine: str = ""
    cwd: str = ""
    command: tuple[str, ...] = ()
    path: str = ""
    kept: frozenset[str] = frozenset()
    limits: frozenset[str] = frozenset()
    pid: int = 0
    attempt: int = 0
    address: str = ""

    @property
    def label(self) -> str:
        """``h1 (executor 3)``; where it has no name, ``h1 (task 0)``."""
        return f"{self.host} ({self.name or f'task {self.index}'})"


class Reply(msgspec.Struct, frozen=True):
    """The launcher's decision about a task: it waits for the job's beginning, unless it is refused for a reason."""

    refused: str = ""


def handshake(secret: bytes) -> Handshake:
    """Return the handshake of a task's connection with the launcher."""
    return Handshake(secret, 0, 0, "agent of a task")


def introduce(secret: bytes, sock: socket.socket, hello: TaskHello, deadline: float) -> tuple[Link, Reply]:
    """Do the task's part, on a blocking socket.

    Args:
        deadline: on the monotonic clock.

    Raises:
        AuthenticationError: the process that listens there does not know the secret.
        OSError, EOFError: the connection broke, or nothing came in time.
        ValueError: the reply cannot be read.
    """
    link = handshake(secret).prove(sock, _RANK, deadline)
    sock.sendall(link.signed(to_json(hello)))
    return link, from_json(link.receive("the reply of the launcher", _LONGEST, deadline), Reply)


def admit(secret: bytes, sock: socket.socket) -> Generator[int, None, tuple[Link, TaskHello]]:
    """Hear a visitor, on a non-blocking socket, until it has proved the secret and told who it is.

    Raises:
        AuthenticationError: it did not.
        OSError, EOFError: the connection broke.
    """
    _, link = yield from handshake(secret).admit(sock, (_RANK,))
    try:
        return link, from_json((yield from link.received("the hello of a task", _LONGEST)), TaskHello)
    except ValueError as error:
        raise AuthenticationError(str(error)) from error


def reply(link: Link, decision: Reply) -> Steps:
    """Tell a task the launcher's decision."""
    yield from sent(link.sock, link.signed(to_json(decision)))


@dataclass(frozen=True)
class Bootstrap:
    """A task's message to the agent that it starts, through a pipe.

    Attributes:
        sending, receiving: arguments of the ``FrameMac`` of each direction.
        socket: descriptor of the connection to the launcher.
        task: process id of the task.
    """

    secret: bytes
    sending: tuple[bytes, int]
    receiving: tuple[bytes, int]
    socket: int
    task: int
    environ: Mapping[str, str]

    def encode(self) -> bytes:
        """Return it as one line of JSON."""
        return to_json(self) + b"\n"

    def __repr__(self) -> str:
        return "Bootstrap(...)"  # nothing secret in a traceback


def read_bootstrap(line: bytes) -> Bootstrap:
    """Return the inverse of ``encode``."""
    return from_json(line, Bootstrap)
