"""Probes of addresses: does this host reach another one there, and is it really that host which answers?

That something accepts a connection says little: 172.17.0.1 is the address of every host's own Docker bridge, and the
same private network exists many times. So a prober names the host and the address that it means, and only the agent of
that host, at that address, can give the answer: an HMAC under the job's secret::

    prober   -> listener   magic, nonce, host, address, HMAC(key, "question", nonce, host, address)
    listener -> prober     magic, own host, own address, HMAC(key, "answer", nonce, own host, own address)

A listener tells strangers nothing. It names its own host rather than refusing, since "answered as h1" explains much to
a prober that meant h2.

Everything here is non-blocking, and uses its owner's selector: each registered object's data is a callable without
arguments.
"""

from __future__ import annotations

import enum
import errno
import ipaddress
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from hvdgloo._net import ports
from hvdgloo._net.proofs import NONCE_BYTES, PROOF_BYTES, derive, new_nonce, prove, proves
from hvdgloo._net.visitors import Steps, Visitors, received, sent
from hvdgloo.errors import AuthenticationError, ConfigError

LAUNCHER = 2**32 - 1
"""The launcher's number among hosts."""

_MAGIC = b"hvdprob1"
_PLACE = struct.Struct("!I16s")  # a host's number, and an address
_QUESTION = struct.Struct(f"!8s{NONCE_BYTES}s{_PLACE.size}s{PROOF_BYTES}s")
_ANSWER = struct.Struct(f"!8s{_PLACE.size}s{PROOF_BYTES}s")
_AT_ONCE = 256  # probes, and visitors of a listener
_ALL_TOGETHER = 2.0  # how many times one probe's timeout all of them together may take, if there are very many
_VISIT_SECONDS = 5.0


class ProbeResult(enum.Enum):
    """The kinds of results of a probe."""

    REACHED = "reached"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    NO_ROUTE = "no route"
    SILENT = "silent"
    OTHER_HOST = "other host"
    OTHER_ADDRESS = "other address"
    STRANGER = "stranger"
    FAILED = "failed"


@dataclass(frozen=True)
class ProbeTarget:
    """An address to try: the host, and where it listens."""

    host: int
    address: str
    port: int


@dataclass(frozen=True)
class Answer:
    """The result of a probe.

    Attributes:
        outcome: the result.
        source: this host's own address in the connection, if there was one.
        host: the one that answered instead.
        detail: the system's message, a time, or an address.
    """

    outcome: ProbeResult
    source: str = ""
    host: int = -1
    detail: str = ""


def probe_key(secret: bytes) -> bytes:
    """Return the key of all proofs of a job."""
    return derive(secret, "probe")


def _packed(address: str) -> bytes:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed


def _place(host: int, address: str) -> bytes:
    return _PLACE.pack(host, _packed(address))


def _unpacked(data: bytes) -> str:
    ip = ipaddress.IPv6Address(data)
    return str(ip.ipv4_mapped or ip)


def question(key: bytes, nonce: bytes, target: ProbeTarget) -> bytes:
    """Return the bytes that a prober sends."""
    meant = _place(target.host, target.address)
    return _QUESTION.pack(_MAGIC, nonce, meant, prove(key, "question", nonce, meant))


def answer(key: bytes, asked: bytes, host: int, address: str) -> bytes | None:
    """Return the reply of a listener that is ``host`` and was reached at ``address``; None to a stranger."""
    magic, nonce, meant, proof = _QUESTION.unpack(asked)
    if magic != _MAGIC or not proves(proof, key, "question", nonce, meant):
        return None
    own = _place(host, address)
    return _ANSWER.pack(_MAGIC, own, prove(key, "answer", nonce, own))


def judge(key: bytes, nonce: bytes, target: ProbeTarget, reply: bytes, source: str) -> Answer:
    """Return the result that a reply stands for."""
    magic, place, proof = _ANSWER.unpack(reply)
    if magic != _MAGIC or not proves(proof, key, "answer", nonce, place):
        return Answer(ProbeResult.STRANGER, source)
    host, address = _PLACE.unpack(place)
    if host != target.host:
        return Answer(ProbeResult.OTHER_HOST, source, host)
    if address != _packed(target.address):
        return Answer(ProbeResult.OTHER_ADDRESS, source, host, _unpacked(address))
    return Answer(ProbeResult.REACHED, source, host)


class ProbeListener:
    """Answers probes at some addresses of this host.

    Args:
        selector: of its owner.
        key: of the job's proofs.
        host: its own number.
        addresses: to listen on; those where that is not possible are in ``failures``.
        port_range: first and last port that may be used.

    Attributes:
        ports: address to port.
        failures: address to the reason why nothing listens there.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        key: bytes,
        host: int,
        addresses: Sequence[str],
        port_range: ports.PortRange | None,
    ) -> None:
        self._key = key
        self._host = host
        self._listeners: list[socket.socket] = []
        self.ports: dict[str, int] = {}
        self.failures: dict[str, str] = {}
        for address in addresses:
            try:
                (listener,) = ports.listen([address], port_range)
            except ConfigError as error:
                self.failures[address] = str(error)
                continue
            self._listeners.append(listener)
            self.ports[address] = listener.getsockname()[1]
        # No visit takes long, so the oldest silent visitor may be closed as soon as there are too many.
        self._visitors = Visitors(
            selector,
            self._listeners,
            self._converse,
            lambda *_: True,
            patience=_VISIT_SECONDS,
            most=_AT_ONCE,
            grace=0.0,
        )
        self._visitors.keep_time(time.monotonic())

    def close(self) -> None:
        """Stop listening. May be repeated."""
        visitors = list(self._visitors)
        self._visitors.close()
        for sock in (*self._listeners, *visitors):
            sock.close()
        self._listeners.clear()

    def _converse(self, sock: socket.socket, _: socket.socket) -> Steps:
        self._visitors.keep_time(time.monotonic())  # the owner's loop does not
        reply = answer(self._key, (yield from received(sock, _QUESTION.size)), self._host, sock.getsockname()[0])
        if reply is None:
            raise AuthenticationError("it does not know this job's secret")
        yield from sent(sock, reply)
        sock.close()


class Prober:
    """Tries addresses, all at once.

    Args:
        selector: of its owner, which calls ``tick`` at ``deadline``.
        key: of the job's proofs.
        targets: to try.
        timeout: seconds for each. If very many get no answer, some are not tried at all.
        report: receives each answer.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        key: bytes,
        targets: Iterable[ProbeTarget],
        timeout: float,
        report: Callable[[ProbeTarget, Answer], None],
    ) -> None:
        self._selector = selector
        self._key = key
        self._timeout = timeout
        self._end = time.monotonic() + _ALL_TOGETHER * timeout
        self._report = report
        self._waiting = deque(targets)
        self._running: dict[_Probe, None] = {}
        self._fill()

    @property
    def done(self) -> bool:
        return not self._running and not self._waiting

    @property
    def deadline(self) -> float | None:
        """The time at which ``tick`` is to be called."""
        return min(self._end, next(iter(self._running)).deadline) if self._running else None

    def tick(self) -> None:
        """Give up what has taken too long."""
        now = time.monotonic()
        while self._waiting and now >= self._end:
            self._report(self._waiting.popleft(), Answer(ProbeResult.FAILED, detail="there was no time to try it"))
        for probe in [probe for probe in self._running if now >= min(self._end, probe.deadline)]:
            self._finish(probe, probe.expired(self._timeout))
        self._fill()

    def close(self) -> None:
        """Stop; probes without an answer are not reported. May be repeated."""
        self._waiting.clear()
        for probe in list(self._running):
            self._drop(probe)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < _AT_ONCE:
            target = self._waiting.popleft()
            try:
                probe = _Probe(self._key, target, time.monotonic() + self._timeout)
            except OSError as error:
                self._report(target, _failure(error))
                continue
            self._running[probe] = None
            self._selector.register(probe.sock, selectors.EVENT_WRITE, partial(self._advance, probe))

    def _advance(self, probe: _Probe) -> None:
        if probe not in self._running:
            return  # ended while this event was pending
        try:
            result = probe.advance()
        except OSError as error:
            result = probe.broken(error)
        if result is not None:
            self._finish(probe, result)
            self._fill()
        elif probe.asked:
            self._selector.modify(probe.sock, selectors.EVENT_READ, partial(self._advance, probe))

    def _finish(self, probe: _Probe, result: Answer) -> None:
        self._drop(probe)
        self._report(probe.target, result)

    def _drop(self, probe: _Probe) -> None:
        del self._running[probe]
        self._selector.unregister(probe.sock)
        probe.sock.close()


class _Probe:
    """One connection: made, asked, answered.

    Raises:
        OSError: at construction, if it cannot even be tried.
    """

    def __init__(self, key: bytes, target: ProbeTarget, deadline: float) -> None:
        self.target = target
        self.deadline = deadline
        self.asked = False
        self._key = key
        self._nonce = new_nonce()
        self._reply = b""
        self.sock = socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        code = self.sock.connect_ex((target.address, target.port))
        if code not in (0, errno.EINPROGRESS):
            self.sock.close()
            raise OSError(code, os.strerror(code))

    def advance(self) -> Answer | None:
        """Do what the socket is ready for; returns the answer, once there is one."""
        if not self.asked:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self.asked = True
            self.sock.send(question(self._key, self._nonce, self.target))
            return None
        data = self.sock.recv(_ANSWER.size - len(self._reply))
        if not data:
            return Answer(ProbeResult.STRANGER, self._source())
        self._reply += data
        if len(self._reply) < _ANSWER.size:
            return None
        return judge(self._key, self._nonce, self.target, self._reply, self._source())

    def expired(self, timeout: float) -> Answer:
        if self.asked:
            return Answer(ProbeResult.SILENT, self._source(), detail=f"{timeout:g}")
        return Answer(ProbeResult.TIMED_OUT, detail=f"{timeout:g}")

    def broken(self, error: OSError) -> Answer:
        # A peer that hangs up after the question is not part of this job.
        return Answer(ProbeResult.STRANGER, detail=error.strerror or "") if self.asked else _failure(error)

    def _source(self) -> str:
        return str(self.sock.getsockname()[0])


_OUTCOMES = {
    errno.ECONNREFUSED: ProbeResult.REFUSED,
    errno.ETIMEDOUT: ProbeResult.TIMED_OUT,
    errno.ENETUNREACH: ProbeResult.NO_ROUTE,
    errno.EHOSTUNREACH: ProbeResult.NO_ROUTE,
    errno.EADDRNOTAVAIL: ProbeResult.NO_ROUTE,  # this host has no address of that family
    errno.EAFNOSUPPORT: ProbeResult.NO_ROUTE,
}


def _failure(error: OSError) -> Answer:
    return Answer(_OUTCOMES.get(error.errno or 0, ProbeResult.FAILED), detail=error.strerror or str(error))
