"""Ports for our own listeners: any free one, or one from the range that a firewall allows (``--port-range``).

All of hvdgloo's listeners are opened here, so that they avoid each other within a range. A port that another program
binds much later (``MASTER_PORT``, for the user's own torch.distributed) is *held* until then: by an abstract Unix
socket named after its number, which belongs to the network namespace as ports do and vanishes with its owner. Listeners
skip held ports. Only Linux has such sockets; elsewhere nothing is held.

Any user of the host can take such a name, and all of them. So a name that another process has taken is respected as
long as there are other ports, since it may be another user's job; it does not make a range unusable.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType

from hvdgloo._net import abstract
from hvdgloo.errors import ConfigError

_RETRIES = 20  # a port that is free at one address may be taken at the next
_BACKLOG = 1024
_ROUNDS, _PAUSE = 3, 0.01  # another process may try a port at the same moment

PortRange = tuple[int, int]


class _HeldError(OSError):
    """The port is held; perhaps only for the moment in which another process tries it."""


class PortHold:
    """A port that none of hvdgloo's listeners takes while this is open.

    Args:
        marked: False if another user has taken the name that marks it; then nothing keeps the port free.

    Raises:
        OSError: at construction, if the port is already held.
    """

    def __init__(self, port: int, *, marked: bool = True) -> None:
        self.port = port
        self._mark: socket.socket | None = None
        if marked and sys.platform == "linux":
            self._mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._mark.bind(f"\0{_mark_name(port)}")
            except OSError as error:
                self._mark.close()
                raise _HeldError(error.errno, "held for a job on this host") from None

    def close(self) -> None:
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def __enter__(self) -> PortHold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


LOOPBACK = "127.0.0.1"


def loopback() -> str:
    """Return the address at which this host reaches itself: ::1 where it has no IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((LOOPBACK, 0))
            return LOOPBACK
        except OSError:
            return "::1"


def listen(addresses: Sequence[str], port_range: PortRange | None) -> list[socket.socket]:
    """Listening sockets at the same port of all addresses.

    Args:
        addresses: IP addresses of this host, or names of them; 127.0.0.1 means ::1 on a host without IPv4.
        port_range: first and last port that may be used; the first that is free everywhere is taken. None for any that
            the system chooses.

    Raises:
        ConfigError: no port can be used; it names the address, the ports and the system's reason.
    """
    reason = ""
    held: list[int] = []
    if LOOPBACK in addresses and (own := loopback()) != LOOPBACK:
        addresses = [own if address == LOOPBACK else address for address in addresses]

    def attempt(port: int, *, marked: bool = True) -> list[socket.socket] | None:
        nonlocal reason
        try:
            if not port:
                return _listen_at_one_port(addresses, 0)
            with PortHold(port, marked=marked):
                return _listen_at_one_port(addresses, port)
        except OSError as error:
            # A hold has no file name; a listener's error names its address.
            foreign = error.errno == errno.EADDRNOTAVAIL
            said = "this host has no such address" if foreign else error.strerror or error
            reason = f"{error.filename or addresses[0]}: {said}"
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(f"cannot listen on {describe(port_range)} of {reason}") from error
            if isinstance(error, _HeldError):
                held.append(port)
            return None

    for _ in range(_ROUNDS):
        held.clear()
        for port in [0] * _RETRIES if port_range is None else range(port_range[0], port_range[1] + 1):
            listening = attempt(port)
            if listening is not None:
                return listening
        if not held:
            break
        time.sleep(_PAUSE)
    for port in _held_by_others(held):
        listening = attempt(port, marked=False)
        if listening is not None:
            return listening
    raise ConfigError(f"cannot listen on {describe(port_range)} of {reason}{_advice(port_range, held=bool(held))}")


def describe(port_range: PortRange | None) -> str:
    """Return ``any port``, ``port 29400``, or ``any of the ports 29400-29403``."""
    if port_range is None:
        return "any port"
    first, last = port_range
    return f"port {first}" if first == last else f"any of the ports {first}-{last}"


def hold_free_port(port_range: PortRange | None = None) -> PortHold:
    """Return a TCP port that is free at all addresses, for a program that binds it much later.

    Without a range it is chosen outside the range that the system uses for outgoing connections and ``bind(0)``, so
    nothing takes it by chance meanwhile.

    Raises:
        ConfigError: all ports of the range are in use or held.
    """
    held: list[int] = []
    for port in _candidates(port_range):
        try:
            hold = PortHold(port)
        except _HeldError:
            held.append(port)
            continue
        if _is_free(port, listens=port_range is not None):
            return hold
        hold.close()
    for port in _held_by_others(held):
        if _is_free(port):
            return PortHold(port, marked=False)
    if port_range is not None:
        raise ConfigError(
            f"cannot keep {describe(port_range)} free for MASTER_PORT{_advice(port_range, held=bool(held))}"
        )
    with socket.socket() as probe:
        probe.bind(("", 0))
        return PortHold(int(probe.getsockname()[1]), marked=False)


def is_held(port: int) -> bool:
    """Tell whether a process in this network namespace holds the port; True where there are no holds."""
    if sys.platform != "linux":
        return True
    try:
        PortHold(port).close()
    except _HeldError:
        return True
    return False


def _mark_name(port: int) -> str:
    return f"hvdgloo-port-{port}"


def _held_by_others(held: Sequence[int]) -> Iterator[int]:
    """Yield the held ports whose name no visible process of this user has."""
    return (port for port in held if not abstract.holders(_mark_name(port)))


def _listen_at_one_port(addresses: Sequence[str], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    address = ""
    try:
        for address in addresses:
            sockets.append(_listen(address, port or (sockets[0].getsockname()[1] if sockets else 0)))
    except OSError as error:
        for bound in sockets:
            bound.close()
        error.filename = address
        raise
    return sockets


def _listen(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, target = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # A server restarted at its port must not wait until the kernel has forgotten old connections; for this, these
        # must have had the option too. But a port that the system chooses must not be one that others share.
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
        sock.bind(target)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Listen at once: two sockets with that option may be bound to one port, but only one of them can listen.
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _candidates(port_range: PortRange | None) -> Iterable[int]:
    if port_range is not None:
        # From the end: listeners look from the beginning.
        return range(port_range[1], port_range[0] - 1, -1)
    low, high = _ephemeral_ports()
    ports = range(20000, min(low, 32768)) if low > 21000 else range(high + 1, 65536)
    # From any of them on: with another start than other launchers', the first is nearly always free.
    first = secrets.randbelow(len(ports)) if ports else 0
    return chain(ports[first:], ports[:first])


def _ephemeral_ports() -> PortRange:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = file.read().split()
            return int(low), int(high)
    except (OSError, ValueError):
        return 49152, 65535


def _is_free(port: int, *, listens: bool = True) -> bool:
    """Tell whether a listener could be opened at any address.

    Args:
        listens: True to open one, so that connections in TIME_WAIT do not matter. False for a port outside of the
            user's range, where nothing may listen even for a moment; such a connection then makes it look taken.
    """
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family)
        except OSError:
            continue  # no IPv6 here
        with probe:
            try:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if listens:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
                if listens:
                    probe.listen(1)
            except OSError as error:
                if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue  # IPv6 is switched off
                return False
    return True


def _advice(port_range: PortRange | None, *, held: bool) -> str:
    if port_range is None:
        return ""
    single = port_range[0] == port_range[1]
    if single and not held:
        return "; stop what is using it, or choose another"
    # A single port may be held for the very job that now wants to listen on it.
    users = "" if single else ", or stop what is using these"
    return (
        f"; give a wider --port-range (HVDGLOO_PORT_RANGE){users}. The first host of a job needs three ports, others "
        "need one, and in an elastic job each worker needs one more"
    )
