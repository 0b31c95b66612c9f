"""The handshake at the beginning of each connection whose two sides must belong to the job.

Control connections begin with it (every rank's to rank 0, or in a tree to its leader), ranks that set up shared memory,
and agents that come by themselves. Each of these is a purpose with keys of its own.

The proof is mutual (both sides sign both nonces, so neither a stray server nor a stray client passes), and the secret
is never sent. Later messages are authenticated one by one, with keys that follow from the secret and both nonces
(``hvdgloo._net.frame_mac``). With TLS (``hvdgloo._net.tls``), proofs and keys cover the listener's certificate, too::

    member       -> coordinator   magic, epoch, generation, rank, nonce
    coordinator  -> member        nonce, HMAC(key, "coordinator", ...)
    member       -> coordinator   HMAC(key, "member", ...)
    coordinator  -> member        its clock, and settings that shape plans: the first message of a control connection

Below, the coordinator is the side that listens: rank 0, a leader or the launcher. It serves all visitors on one thread,
whenever they send something (``hvdgloo._net.visitors``).
"""

from __future__ import annotations

import errno
import logging
import os
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from hvdgloo._net import abstract, codec, framing, ports
from hvdgloo._net.cancelling import TURN
from hvdgloo._net.descriptors import OUT_OF_DESCRIPTORS, reserve_descriptors
from hvdgloo._net.frame_mac import FrameMac
from hvdgloo._net.proofs import NONCE_BYTES, PROOF_BYTES, derive, new_nonce, prove, proves
from hvdgloo._net.tls import Tls, shake_hands
from hvdgloo._net.visitors import PAUSE, Steps, Visitors, received, sent
from hvdgloo.errors import AuthenticationError, BackendError, ConfigError, ConnectError

if TYPE_CHECKING:
    from hvdgloo._net.tls import TlsConnection

logger = logging.getLogger(__name__)

_CLAIM = struct.Struct("!III")  # epoch, generation, rank
_HELLO = struct.Struct(f"!8s{_CLAIM.size}s{NONCE_BYTES}s")
_MAGIC = b"hvdgloo3"
_MAX_ANSWER = 1 << 20

CANCELLED = "the job ended while its ranks were being connected"

Cancelled: TypeAlias = Callable[[], bool]
"""Polled during a wait; returns whether to give up."""


@dataclass(frozen=True)
class Link:
    """A connection whose two sides have proved that they belong to the job.

    Attributes:
        sock: connected.
        sending, receiving: authenticate the messages that follow, in each direction.
    """

    sock: socket.socket
    sending: FrameMac
    receiving: FrameMac

    def signed(self, body: bytes) -> bytes:
        """Return the next message to the other side as it is sent: framed, and with its tag."""
        return framing.head(len(body)) + body + self.sending.tag(body)

    def receive(self, what: str, limit: int, deadline: float, cancelled: Cancelled | None = None) -> bytes:
        """Return the next message of the other side, from a blocking socket.

        Args:
            what: the message's name in errors, with its article.
            limit: bytes that it may have.

        Raises:
            ValueError: it is longer, or its tag is wrong.
            OSError, EOFError, BackendError: as for ``receive_exactly``.
        """
        length = _bounded(receive_exactly(self.sock, framing.HEAD, deadline, cancelled), what, limit)
        return self._checked(receive_exactly(self.sock, length + framing.TAG, deadline, cancelled), what)

    def received(self, what: str, limit: int) -> Generator[int, None, bytes]:
        """Do as ``receive`` does, on a non-blocking socket."""
        length = _bounded((yield from received(self.sock, framing.HEAD)), what, limit)
        return self._checked((yield from received(self.sock, length + framing.TAG)), what)

    def _checked(self, data: bytes, what: str) -> bytes:
        self.receiving.check(data[: -framing.TAG], data[-framing.TAG :], what)
        return data[: -framing.TAG]


def _bounded(head: bytes, what: str, limit: int) -> int:
    length = framing.body_length(head)
    if length > limit:
        raise ValueError(f"{what} is too long")
    return length


class _Answer(codec.Message, frozen=True):
    """The coordinator's first message to a rank that has proved to belong to the job.

    Attributes:
        clock: its own, in seconds since 1970.
        settings: what it has decided for all.
    """

    clock: float
    settings: Mapping[str, Any]


_ANSWER: codec.Codec[_Answer] = codec.Codec(_Answer, "answer to a handshake")


def listen(address: str, port_range: tuple[int, int] | None) -> socket.socket:
    """Listen on one address.

    Args:
        port_range: first and last port that may be used; None for any free one.

    Raises:
        ConnectError: the address is not this host's, or every port is taken.
    """
    try:
        return ports.listen([address], port_range)[0]
    except ConfigError as error:
        raise ConnectError(f"{error} (HVDGLOO_ADDRESS, HVDGLOO_PORT_RANGE)", address=address) from error


class Handshake:
    """The knowledge about the job that both sides share before they connect.

    Args:
        secret: of the job.
        epoch: of the membership.
        generation: how often this epoch's job was initialised before, so that a late connection is recognised.
        purpose: of the connections; each purpose has a key of its own, so that a proof for one is not valid for
            another.
        proof_timeout: seconds that a connecting peer has to prove that it belongs to the job.
        most_visitors: connections that have proved nothing yet and are heard at the same time; the kernel keeps further
            ones in the listener's queue.
        grace: seconds that every visitor has, however many are waiting.
        tls: encrypts the connections, if given; the same on both sides.
        parent: the rank that is connected to.
    """

    def __init__(
        self,
        secret: bytes,
        epoch: int,
        generation: int,
        purpose: str = "control connection",
        proof_timeout: float = 5.0,
        most_visitors: int = 256,
        grace: float = 1.0,
        tls: Tls | None = None,
        parent: int = 0,
    ) -> None:
        self.purpose = purpose
        self.parent = parent
        self._key = derive(secret, f"{purpose} with rank {parent}")
        self._epoch = epoch
        self._generation = generation
        self.proof_timeout = proof_timeout
        self.most_visitors = most_visitors
        self.grace = grace
        self.tls = tls

    def accept_all(
        self,
        listener: socket.socket,
        ranks: Collection[int],
        settings: Mapping[str, Any],
        timeout: float,
        describe: Callable[[int], str],
        cancelled: Cancelled | None = None,
        here: tuple[socket.socket, Collection[int]] | None = None,
    ) -> dict[int, Link]:
        """Do the coordinator's part: wait for the ranks that connect to it.

        Args:
            ranks: the ranks to wait for, in the order in which an error names missing ones.
            settings: what is decided for all, for them to know. With ``clock_offset``, what is to be added to this
                host's clock to get rank 0's.
            cancelled: polled; returns whether to give up.
            here: another listener, and the ranks on this host that connect to it. Nothing that they say is encrypted.

        Returns:
            connections by rank.

        Raises:
            ConnectError: some ranks did not come within ``timeout`` seconds; the text names them.
            BackendError: it was cancelled.
            ConfigError: this process may not have as many connections; or there is no certificate.
            MissingDependencyError: certificates cannot be made.
        """
        deadline = time.monotonic() + timeout
        expected = {listener: _Expected(ranks, self.tls)}
        if here is not None:
            expected[here[0]] = _Expected(here[1], None)
        count = sum(len(group.ranks) for group in expected.values())
        reserve_descriptors(count, describe(self.parent), f"{self.purpose}s of other ranks")
        if self.tls is not None:
            self.tls.fingerprint  # noqa: B018 - if there is no certificate, that is no visitor's fault
        with _Acceptor(expected, self, settings, deadline) as acceptor:
            while acceptor.missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    why = (
                        "They had registered, so either they died since (see their output), or they cannot reach this "
                        "address (firewall, wrong network interface)"
                    )
                    raise ConnectError(
                        f"{describe(self.parent).partition(' (')[0]} waited {timeout:g} s on {_name(listener)} for "
                        f"{self.purpose}s from {', '.join(map(describe, acceptor.missing))}. "
                        f"{OUT_OF_DESCRIPTORS if acceptor.exhausted else why}",
                        rank=acceptor.missing[0],
                        address=_name(listener),
                        missing=acceptor.missing,
                    )
                _check(cancelled)
                acceptor.serve(min(left, TURN))
            return acceptor.members

    def connect(
        self,
        address: str,
        port: int,
        rank: int,
        timeout: float,
        describe: Callable[[int], str],
        cancelled: Cancelled | None = None,
    ) -> tuple[Link, dict[str, Any]]:
        """Do another rank's part: connect to the coordinator.

        Args:
            cancelled: polled; returns whether to give up.

        Returns:
            the connection, and the settings that rank 0 decided, with ``clock_offset`` added: how many seconds
            rank 0's clock is ahead of this host's, give or take half the time of the last exchange.

        Raises:
            ConnectError: the connection failed; it names both ranks, the address and the reason.
            BackendError: it was cancelled.
        """
        deadline = time.monotonic() + timeout

        def text(why: object) -> str:
            return (
                f"{describe(rank)} could not connect to {describe(self.parent)} at {address} port {port}: {why} "
                "(check that the address is reachable from this host; "
                f"HVDGLOO_ADDRESS chooses another one on rank {self.parent}'s host)"
            )

        with self._connecting(text, address) as opened:
            sock = opened.enter_context(_connected(address, port, deadline, cancelled))
            channel = b""
            if self.tls is not None:
                sock, channel = self.tls.connected(sock, deadline, partial(_check, cancelled))
                opened.enter_context(sock)
            return self.introduce(sock, rank, deadline, channel, cancelled)

    def connect_here(
        self,
        name: str,
        rank: int,
        timeout: float,
        describe: Callable[[int], str],
        cancelled: Cancelled | None = None,
    ) -> tuple[Link, dict[str, Any]]:
        """Do as ``connect`` does, to a coordinator on this host.

        Args:
            name: of the ``abstract`` socket at which it listens, or soon will.
        """
        deadline = time.monotonic() + timeout

        def text(why: object) -> str:
            return f"{describe(rank)} could not connect to {describe(self.parent)} on the same host: {why}"

        with self._connecting(text) as opened:
            while True:
                try:
                    sock = opened.enter_context(abstract.connect(name, deadline, cancelled or (lambda: False)))
                    return self.introduce(sock, rank, deadline, cancelled=cancelled)
                except ConnectionRefusedError:  # nothing listens there yet
                    _check(cancelled)
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(PAUSE)
                except OSError:
                    _check(cancelled)
                    raise

    @contextmanager
    def _connecting(self, text: Callable[[object], str], address: str | None = None) -> Iterator[ExitStack]:
        """If connecting fails, raise a ConnectError with ``text`` of the reason, and close what the stack holds."""
        with ExitStack() as opened:
            try:
                yield opened
            except (OSError, EOFError, ValueError, AuthenticationError) as error:
                raise ConnectError(
                    text(str(error) or type(error).__name__), rank=self.parent, address=address
                ) from error
            opened.pop_all()

    def name_here(self, world: str) -> str:
        """Return the name of the ``abstract`` socket at which the coordinator listens for ranks on its own host. No
        process without the secret can predict it.

        Args:
            world: tells worlds apart that are formed at the same time.
        """
        return f"hvdgloo-{prove(self._key, 'name', self._claim(self.parent), world.encode()).hex()[:32]}"

    def introduce(
        self,
        sock: socket.socket,
        rank: int,
        deadline: float,
        channel: bytes = b"",
        cancelled: Cancelled | None = None,
    ) -> tuple[Link, dict[str, Any]]:
        """Do what ``connect`` does, on a connected socket.

        Args:
            channel: as for ``prove``.
            cancelled: polled; returns whether to give up.

        Raises:
            AuthenticationError, OSError, EOFError, ValueError: the handshake failed.
            BackendError: it was cancelled.
        """
        link = self.prove(sock, rank, deadline, channel, cancelled)
        asked = time.time()
        answer = _ANSWER.decode(link.receive(f"the answer of rank {self.parent}", _MAX_ANSWER, deadline, cancelled))
        # The clock is rank 0's, or a leader's, which may differ from rank 0's.
        offset = answer.settings.get("clock_offset", 0.0) + answer.clock - (asked + time.time()) / 2
        return link, {**answer.settings, "clock_offset": offset}

    def prove(
        self,
        sock: socket.socket,
        rank: int,
        deadline: float,
        channel: bytes = b"",
        cancelled: Cancelled | None = None,
    ) -> Link:
        """Prove the secret to the listener, once the listener has proved it. Which side sends the first message depends
        on the purpose.

        Args:
            channel: SHA-256 of the certificate that the listener has shown; empty if nothing is encrypted.
            cancelled: polled; returns whether to give up.

        Raises:
            AuthenticationError, OSError, EOFError: the handshake failed.
            BackendError: it was cancelled.
        """
        _send_at_once(sock)
        nonce = new_nonce()
        sock.sendall(_HELLO.pack(_MAGIC, self._claim(rank), nonce))
        agreed = self._agreed(rank, nonce, receive_exactly(sock, NONCE_BYTES, deadline, cancelled), channel)
        if not proves(receive_exactly(sock, PROOF_BYTES, deadline, cancelled), self._key, "coordinator", *agreed):
            raise AuthenticationError("the process that listens there does not know this job's secret")
        sock.sendall(prove(self._key, "member", *agreed))
        down, up = self._frame_macs(*agreed)
        return Link(sock, sending=up, receiving=down)

    def admit(
        self, sock: socket.socket, ranks: Collection[int], tls: Tls | None = None
    ) -> Generator[int, None, tuple[int, Link]]:
        """Do the coordinator's part on a non-blocking socket, up to the visitor's proof; returns the visitor's rank.

        Args:
            ranks: that are expected.
            tls: encrypts the connection, if given.

        Raises:
            AuthenticationError, OSError, EOFError: the handshake failed.
        """
        _send_at_once(sock)
        channel = b""
        if tls is not None:
            channel = tls.fingerprint
            while not shake_hands(cast("TlsConnection", sock)):
                yield selectors.EVENT_READ
        hello = yield from received(sock, _HELLO.size)
        magic, claim, nonce = _HELLO.unpack(hello)
        rank = _CLAIM.unpack(claim)[2]
        if (magic, claim) != (_MAGIC, self._claim(rank)) or rank not in ranks:
            raise AuthenticationError("it is not part of this job")
        mine = new_nonce()
        agreed = self._agreed(rank, nonce, mine, channel)
        yield from sent(sock, mine + prove(self._key, "coordinator", *agreed))
        if not proves((yield from received(sock, PROOF_BYTES)), self._key, "member", *agreed):
            raise AuthenticationError("it does not know this job's secret")
        down, up = self._frame_macs(*agreed)
        return rank, Link(sock, sending=down, receiving=up)

    def _agreed(self, rank: int, nonce: bytes, theirs: bytes, channel: bytes) -> tuple[bytes, ...]:
        """Return what proofs and keys of one connection cover: the member's nonce comes before the coordinator's."""
        return self._claim(rank), nonce, theirs, channel

    def _frame_macs(self, *agreed: bytes) -> tuple[FrameMac, FrameMac]:
        """Return what authenticates the messages from the coordinator, and those to it."""
        return FrameMac(prove(self._key, "down", *agreed)), FrameMac(prove(self._key, "up", *agreed))

    def _claim(self, rank: int) -> bytes:
        return _CLAIM.pack(self._epoch, self._generation, rank)


def receive_exactly(sock: socket.socket, count: int, deadline: float, cancelled: Cancelled | None = None) -> bytes:
    """Return ``count`` bytes from a blocking socket, until ``deadline`` on the monotonic clock.

    One deadline for all of them: with a timeout for each piece, a peer that trickles bytes could hold on for minutes.

    Raises:
        EOFError: the peer closed the connection earlier.
        OSError: the connection broke, or the deadline passed.
        BackendError: it was cancelled.
    """
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left if cancelled is None else min(left, TURN))
        try:
            piece = sock.recv(count - len(data))
        except TimeoutError:
            _check(cancelled)
            continue
        if not piece:
            raise EOFError("the connection was closed during the handshake")
        data += piece
    return data


def _connected(address: str, port: int, deadline: float, cancelled: Cancelled | None) -> socket.socket:
    """Connect as ``socket.create_connection`` does; the wait can be cancelled."""
    reason: OSError = TimeoutError("timed out")
    for family, kind, protocol, _, endpoint in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(endpoint)
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            while code in (errno.EINPROGRESS, errno.EINTR):
                left = deadline - time.monotonic()
                if poll.poll(1000 * max(0.0, min(left, TURN))):
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                elif left <= 0:
                    code = errno.ETIMEDOUT
                _check(cancelled)
            if code == 0:
                sock.setblocking(True)
                return sock
            reason = OSError(code, os.strerror(code))
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise reason


def _check(cancelled: Cancelled | None) -> None:
    """Raise BackendError if what is under way is to be given up."""
    if cancelled is not None and cancelled():
        raise BackendError(CANCELLED)


def _send_at_once(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _name(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return "a socket of its host"
    host, port = listener.getsockname()[:2]
    return f"{host} port {port}"


@dataclass(frozen=True)
class _Expected:
    """The ranks that one listener waits for.

    Attributes:
        ranks: that are expected there.
        tls: encrypts its connections, if given.
    """

    ranks: Collection[int]
    tls: Tls | None


class _Acceptor:
    """The coordinator's thread while members come, at one listener or two.

    Attributes:
        members: connections of those who have proved to be members, by rank. Closed on leaving, if that is by an
            exception.
    """

    def __init__(
        self,
        expected: Mapping[socket.socket, _Expected],
        handshake: Handshake,
        settings: Mapping[str, Any],
        deadline: float,
    ) -> None:
        self.members: dict[int, Link] = {}
        self._expected = expected
        self._handshake = handshake
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._visitors = Visitors(
            self._selector,
            expected,
            self._converse,
            self._refused,
            patience=handshake.proof_timeout,
            most=handshake.most_visitors,
            grace=handshake.grace,
            deadline=deadline,
            wrapped=self._wrapped,
        )

    @property
    def missing(self) -> list[int]:
        """The ranks that have not connected, or have not yet been told that they are in."""
        return [
            rank
            for group in self._expected.values()
            for rank in group.ranks
            if rank not in self.members or self.members[rank].sock in self._visitors
        ]

    @property
    def exhausted(self) -> bool:
        """No connection could be accepted when that was last tried, for want of descriptors."""
        return self._visitors.exhausted

    def serve(self, patience: float) -> None:
        """Accept and serve visitors, waiting up to ``patience`` seconds for one to connect or send something."""
        now = time.monotonic()
        self._visitors.keep_time(now)
        for key, _ in self._selector.select(max(0.0, min(patience, self._visitors.next - now))):
            key.data()

    def _wrapped(self, sock: socket.socket, listener: socket.socket) -> socket.socket:
        tls = self._expected[listener].tls
        return sock if tls is None else tls.accepted(sock)

    def _converse(self, sock: socket.socket, listener: socket.socket) -> Steps:
        group = self._expected[listener]
        rank, link = yield from self._handshake.admit(sock, group.ranks, group.tls)
        if self.members.setdefault(rank, link) is not link:
            raise AuthenticationError(f"rank {rank} is already connected")
        yield from sent(sock, link.signed(_ANSWER.encode(_Answer(time.time(), self._settings))))

    def _refused(self, sock: socket.socket, peer: object, error: Exception) -> bool:
        logger.info("refused a %s from %s: %s", self._handshake.purpose, peer, error)
        # A member that broke off after its proof is kept: the next reader of its connection learns that it is lost.
        return all(link.sock is not sock for link in self.members.values())

    def __enter__(self) -> _Acceptor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        strangers = set(self._visitors) - {link.sock for link in self.members.values()}
        self._selector.close()
        for sock in strangers if kind is None else strangers | {link.sock for link in self.members.values()}:
            sock.close()
        if kind is None:
            for link in self.members.values():
                link.sock.setblocking(True)
