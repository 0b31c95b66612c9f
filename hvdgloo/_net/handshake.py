"""How the control connections are made: every rank to rank 0, each side proving that it knows the job's secret.

The challenge is mutual (both sides sign both nonces, so neither a stray server nor a stray client passes), the secret
is never sent, and a visitor that fails costs the others no more than a slot for a few seconds::

    member       -> coordinator   magic, epoch, generation, rank, nonce
    coordinator  -> member        nonce, HMAC(key, "coordinator", ...)
    member       -> coordinator   HMAC(key, "member", ...)
    coordinator  -> member        its clock, and settings that shape plans: a message, framed
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdgloo._net import codec, framing, ports
from hvdgloo.errors import AuthenticationError, BackendError, ConfigError, ConnectError

logger = logging.getLogger(__name__)

_HELLO = struct.Struct("!8sIII16s")
_MAGIC = b"hvdgloo1"
_MAC_BYTES = 32
_PARALLEL = 32
_TURN = 0.25
"""Seconds between checks, during a wait, whether it was cancelled."""
_MAX_ANSWER = 1 << 20


class _Answer(codec.Message, frozen=True):
    """What rank 0 tells whoever has proved to belong to the job.

    Attributes:
        clock: its own, in seconds since 1970.
        settings: what it has decided for all.
    """

    clock: float
    settings: Mapping[str, Any]


_ANSWER: codec.Codec[_Answer] = codec.Codec(_Answer, "answer of rank 0")


def listen(address: str, port_range: tuple[int, int] | None) -> socket.socket:
    """A listening socket on one address.

    Args:
        port_range: first and last port that may be used; None for any free one.

    Raises:
        ConnectError: the address is not this host's, or every port is taken.
    """
    try:
        return ports.listen([address], port_range)[0]
    except ConfigError as error:
        raise ConnectError(f"{error}; see HVDGLOO_ADDRESS and HVDGLOO_PORT_RANGE", address=address) from error


class Handshake:
    """What both sides know about the job before they meet.

    Args:
        secret: of the job.
        epoch: of the membership.
        generation: how often this epoch's job was initialised before, so that a late connection is recognised.
        purpose: of the connections; each purpose has a key of its own, so that a proof for one is not valid for
            another.
        proof_timeout: seconds that a connecting peer has to prove that it belongs to the job.
    """

    def __init__(
        self,
        secret: bytes,
        epoch: int,
        generation: int,
        purpose: str = "control connection",
        proof_timeout: float = 5.0,
    ) -> None:
        self._purpose = purpose
        self._key = hmac.digest(secret, f"hvdgloo {purpose}".encode(), hashlib.sha256)
        self._epoch = epoch
        self._generation = generation
        self._proof_timeout = proof_timeout

    def accept_all(
        self,
        listener: socket.socket,
        size: int,
        settings: Mapping[str, Any],
        timeout: float,
        describe: Callable[[int], str],
        cancelled: Callable[[], bool] | None = None,
    ) -> dict[int, socket.socket]:
        """Rank 0's side: wait for ranks 1 to size - 1.

        Args:
            cancelled: polled; returns whether to give up.

        Returns:
            connected sockets by rank.

        Raises:
            ConnectError: some ranks did not come within ``timeout`` seconds; the text names them.
            BackendError: it was cancelled.
        """
        from concurrent.futures import ThreadPoolExecutor  # only rank 0 needs it

        deadline = time.monotonic() + timeout
        members: dict[int, socket.socket] = {}
        visitors: set[socket.socket] = set()  # that have not proved anything yet

        def admit(sock: socket.socket, peer: object) -> None:
            rank = -1
            try:
                rank = self._admit(sock, size, min(deadline, time.monotonic() + self._proof_timeout))
                if members.setdefault(rank, sock) is not sock:
                    raise AuthenticationError(f"rank {rank} is connected already")
                sock.sendall(_ANSWER.frame(_Answer(time.time(), settings)))
            except (OSError, EOFError, ValueError, struct.error, AuthenticationError) as error:
                logger.info("refused a %s from %s: %s", self._purpose, peer, error)
                # A member that broke off after its proof is kept: the next reader of its connection learns that it is
                # lost.
                if members.get(rank) is not sock:
                    sock.close()
            finally:
                visitors.discard(sock)
                told.send(b"\0")

        listener.setblocking(False)
        ended, told = socket.socketpair()
        ended.setblocking(False)
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        try:
            with (
                selector,
                ended,
                told,
                ThreadPoolExecutor(_PARALLEL, thread_name_prefix="hvdgloo-accept") as pool,
            ):
                try:
                    while len(members) < size - 1:
                        left = deadline - time.monotonic()
                        if left <= 0:
                            missing = [describe(rank) for rank in range(1, size) if rank not in members]
                            raise ConnectError(
                                f"{describe(0).partition(' (')[0]} waited {timeout:g} s on {_name(listener)} for "
                                f"{self._purpose}s from "
                                f"{', '.join(missing)}. They had registered, so either they died since (see their "
                                "output), or they cannot reach this address (firewall, wrong network interface)",
                                address=_name(listener),
                            )
                        if cancelled is not None and cancelled():
                            raise BackendError("the job ended while its ranks were being connected")
                        if not any(key.fileobj is listener for key, _ in selector.select(min(left, _TURN))):
                            _drain(ended)  # a handshake has just finished, perhaps the last one
                            continue
                        try:
                            sock, peer = listener.accept()
                        except BlockingIOError:
                            continue  # the visitor has left
                        sock.setblocking(True)
                        visitors.add(sock)
                        pool.submit(admit, sock, peer)
                finally:
                    # The pool waits for its threads, which must not wait for a stranger that says nothing.
                    _dismiss(visitors - set(members.values()))
        except BaseException:
            for sock in members.values():
                sock.close()
            raise
        return members

    def connect(
        self, address: str, port: int, rank: int, timeout: float, describe: Callable[[int], str]
    ) -> tuple[socket.socket, dict[str, Any]]:
        """Another rank's side: connect to rank 0.

        Returns:
            the connected socket, and the settings that rank 0 decided, with ``clock_offset`` added: how many seconds
            rank 0's clock is ahead of this host's, give or take half the time of the last exchange.

        Raises:
            ConnectError: the connection failed; it names both ranks, the address and the reason.
        """
        deadline = time.monotonic() + timeout
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection((address, port), timeout)
            settings = self.introduce(sock, rank, deadline)
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            if sock is not None:
                sock.close()
            raise ConnectError(
                f"{describe(rank)} could not connect to {describe(0)} at {address} port {port}: "
                f"{error or type(error).__name__}. Check that the address is reachable from this host; "
                "HVDGLOO_ADDRESS chooses another one on rank 0's host",
                rank=0,
                address=address,
            ) from error
        return sock, settings

    def introduce(self, sock: socket.socket, rank: int, deadline: float) -> dict[str, Any]:
        """The other side's part on a connected socket; returns what rank 0 decided, as ``connect`` does.

        Raises:
            AuthenticationError, OSError, EOFError, ValueError: the handshake failed.
        """
        _send_at_once(sock)
        nonce = os.urandom(16)
        sock.sendall(_HELLO.pack(_MAGIC, self._epoch, self._generation, rank, nonce))
        theirs = receive_exactly(sock, 16, deadline)
        proof = receive_exactly(sock, _MAC_BYTES, deadline)
        if not hmac.compare_digest(proof, self._mac(b"coordinator", rank, nonce, theirs)):
            raise AuthenticationError("whoever listens there does not know this job's secret")
        asked = time.time()
        sock.sendall(self._mac(b"member", rank, nonce, theirs))
        length = framing.body_length(receive_exactly(sock, framing.HEAD, deadline))
        if length > _MAX_ANSWER:
            raise ValueError("the answer is too long")
        answer = _ANSWER.decode(receive_exactly(sock, length, deadline))
        return {**answer.settings, "clock_offset": answer.clock - (asked + time.time()) / 2}

    def _admit(self, sock: socket.socket, size: int, deadline: float) -> int:
        _send_at_once(sock)
        magic, epoch, generation, rank, nonce = _HELLO.unpack(receive_exactly(sock, _HELLO.size, deadline))
        if (magic, epoch, generation) != (_MAGIC, self._epoch, self._generation) or not 0 < rank < size:
            raise AuthenticationError("it is not part of this job")
        mine = os.urandom(16)
        sock.sendall(mine + self._mac(b"coordinator", rank, nonce, mine))
        proof = receive_exactly(sock, _MAC_BYTES, deadline)
        if not hmac.compare_digest(proof, self._mac(b"member", rank, nonce, mine)):
            raise AuthenticationError("it does not know this job's secret")
        return int(rank)

    def _mac(self, role: bytes, rank: int, nonce: bytes, theirs: bytes) -> bytes:
        text = struct.pack("!12sIII", role, self._epoch, self._generation, rank) + nonce + theirs
        return hmac.digest(self._key, text, hashlib.sha256)


def receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """``count`` bytes from a blocking socket, until ``deadline`` on the monotonic clock.

    One deadline for all of them: with a timeout for each piece, a peer that trickles bytes could hold on for minutes.

    Raises:
        EOFError: the peer closed the connection earlier.
        OSError: the connection broke, or the deadline passed.
    """
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError("the connection was closed during the handshake")
        data += piece
    return data


def _send_at_once(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _drain(sock: socket.socket) -> None:
    try:
        sock.recv(4096)
    except BlockingIOError:
        pass


def _dismiss(strangers: Iterable[socket.socket]) -> None:
    """Shut connections down, so that the threads using them notice and close the sockets."""
    for sock in strangers:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already


def _name(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return "a socket of its host"
    host, port = listener.getsockname()[:2]
    return f"{host} port {port}"
