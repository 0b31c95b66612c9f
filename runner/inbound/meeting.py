"""What an agent's task and the launcher say to each other before the first frame.

Each side proves that it knows the job's secret, which has reached the task in another way and is never sent here::

    task     -> launcher   magic, nonce
    launcher -> task       nonce, HMAC(key, "launcher", both nonces)
    task     -> launcher   HMAC(key, "task", both nonces); who it is (``Arrival``), with a tag
    launcher -> task       the answer (``Answer``), with a tag

Keys for each message and each direction of the frames that follow come from the secret and both nonces, so that nothing
that was recorded is of use: neither in another connection, nor in the other direction, nor in another place.

What is said is JSON. Names that are not known are ignored: versions that differ must understand each other far enough
to say so. Nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from hvdgloo._net import framing
from hvdgloo._net.codec import from_json, to_json
from hvdgloo._net.frame_mac import FrameMac
from hvdgloo._net.handshake import receive_exactly
from hvdgloo._net.proofs import derive
from hvdgloo._net.visitors import Steps, received, sent
from hvdgloo.errors import AuthenticationError

MAGIC = b"hvdagnt1"
_HELLO = struct.Struct("!8s32s")
_NONCE = 32
_PROOF = 32
_LONGEST = 64 * 1024
"""Bytes of one message before the frames."""

_STRANGER = "it does not know this job's secret"


class Arrival(msgspec.Struct, frozen=True):
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
        kept, limits: names of variables; see ``Premises``.
        pid: of the task's process.
        attempt: how often this task was tried before.
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


class Answer(msgspec.Struct, frozen=True):
    """What becomes of a task: it waits for the job's beginning, unless it is refused for a reason."""

    refused: str = ""


@dataclass(frozen=True)
class Keys:
    """Of the frames that follow, in the launcher's words.

    Attributes:
        down, up: 32 bytes, for frames to the agent and from it.
    """

    down: bytes
    up: bytes


T = TypeVar("T", Arrival, Answer)


class Meeting:
    """One handshake, on either side.

    Args:
        secret: of the job.
        random: so many random bytes.
    """

    def __init__(self, secret: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        self._random = random
        self._key = derive(secret, "agents that come by themselves")
        self._nonces = b""

    # The task's side, on a blocking socket.

    def introduce(self, sock: socket.socket, arrival: Arrival, deadline: float) -> Answer:
        """Prove the secret, have it proved, and say who comes.

        Args:
            deadline: on the monotonic clock.

        Raises:
            AuthenticationError: whoever listens there does not know the secret.
            OSError, EOFError: the connection broke, or nothing came in time.
            ValueError: the answer cannot be read.
        """
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = self._random(_NONCE)
        sock.sendall(_HELLO.pack(MAGIC, mine))
        self._nonces = mine + receive_exactly(sock, _NONCE, deadline)
        proof = receive_exactly(sock, _PROOF, deadline)
        if not hmac.compare_digest(proof, self._mac("launcher")):
            raise AuthenticationError("whoever listens there does not know this job's secret")
        sock.sendall(self._mac("task") + self._message("arrival", arrival))
        length = framing.body_length(receive_exactly(sock, framing.HEAD, deadline))
        if length > _LONGEST:
            raise ValueError("the answer is too long")
        return self._read("answer", receive_exactly(sock, length + framing.TAG, deadline), Answer)

    # The launcher's side, on a non-blocking one.

    def admit(self, sock: socket.socket) -> Generator[int, None, Arrival]:
        """Hear a visitor until it has proved that it belongs to the job, and has said who it is.

        Raises:
            AuthenticationError: it has not proved it.
            OSError, EOFError: the connection broke.
        """
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        magic, theirs = _HELLO.unpack((yield from received(sock, _HELLO.size)))
        if magic != MAGIC:
            raise AuthenticationError("it is no agent's task")
        mine = self._random(_NONCE)
        self._nonces = theirs + mine
        yield from sent(sock, mine + self._mac("launcher"))
        proof = yield from received(sock, _PROOF)
        if not hmac.compare_digest(proof, self._mac("task")):
            raise AuthenticationError(_STRANGER)
        length = framing.body_length((yield from received(sock, framing.HEAD)))
        if length > _LONGEST:
            raise AuthenticationError("what it says is too long")
        told = yield from received(sock, length + framing.TAG)
        try:
            return self._read("arrival", told, Arrival)
        except ValueError as error:
            raise AuthenticationError(str(error)) from error

    def answer(self, sock: socket.socket, answer: Answer) -> Steps:
        """Tell the visitor what becomes of it."""
        yield from sent(sock, self._message("answer", answer))

    # Both.

    def keys(self) -> Keys:
        """Of the frames."""
        return Keys(self._mac("frames to the agent"), self._mac("frames from the agent"))

    def _mac(self, purpose: str) -> bytes:
        return hmac.digest(self._key, purpose.encode() + b"\0" + self._nonces, "sha256")

    def _message(self, purpose: str, value: Arrival | Answer) -> bytes:
        body = to_json(value)
        return framing.head(len(body)) + body + FrameMac(self._mac(purpose)).tag(body)

    def _read(self, purpose: str, data: bytes, kind: type[T]) -> T:
        """Raises ValueError if it was altered, or is something else."""
        body, tag = data[: -framing.TAG], data[-framing.TAG :]
        FrameMac(self._mac(purpose)).check(body, tag, f"the {purpose} of an agent's task")
        return from_json(body, kind)


@dataclass(frozen=True)
class Bootstrap:
    """What a task passes to the agent that it starts, through a pipe."""

    secret: bytes
    down: bytes
    up: bytes
    socket: int
    task: int
    environ: Mapping[str, str]

    def encode(self) -> bytes:
        """In one line."""
        return to_json(self) + b"\n"

    def __repr__(self) -> str:
        return "Bootstrap(...)"  # nothing secret in a traceback


def read_bootstrap(line: bytes) -> Bootstrap:
    """The inverse of ``encode``."""
    return from_json(line, Bootstrap)
