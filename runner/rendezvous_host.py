"""The rendezvous server of a job, in the launcher. Workers that cannot reach it there go through their agent."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from hvdgloo._net import ports
from hvdgloo._net.tls import Tls
from hvdgloo.config import parse_endpoint
from hvdgloo.errors import LaunchError
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.rendezvous._server.server import RendezvousServer
from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.network.addressing import Placement
from hvdgloo.runner.protocol.frames import Relay, Relaying
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.init_watch import Arrivals
from hvdgloo.runner.supervise.supervisor import Supervisor

_START_SECONDS = 10.0
HEAD_START = 0.1
"""Seconds that a job's workers get before the web server is imported, unless one of them connects earlier: a job that
ends within this time (a command without hvdgloo, a mistake in the script's first line) never needs it."""


@contextmanager
def open_rendezvous(
    supervisor: Supervisor,
    spec: LaunchSpec,
    hosts: Sequence[HostEntry],
    placement: Placement,
    *,
    head_start: float = HEAD_START,
) -> Iterator[RendezvousHost]:
    """Run a server for this job's workers, for as long as the job lasts.

    Args:
        head_start: in seconds; see ``HEAD_START``.

    Raises:
        ConfigError: the server cannot listen, or its certificate cannot be used.
        MissingDependencyError: the server cannot make a certificate.
        LaunchError: an agent cannot listen for its workers.
    """
    slots = Counter[tuple[str, str]]()
    for host in hosts:
        slots[host.machine, host.hostname] += host.slots or 0
    bind = tuple(dict.fromkeys(address or ports.LOOPBACK for address in placement.launcher))
    server = RendezvousServer(
        secret=spec.secret,
        hosts=[(hostname, count) for (_, hostname), count in slots.items()],
        bind=bind,
        port_range=spec.network.port_range,
        start_timeout=spec.start_timeout,
        tls=None if spec.network.tls is None else Tls(*spec.network.tls),
    )
    with ExitStack() as stack:
        rendezvous = RendezvousHost(server.listen(), supervisor, head_start)
        stack.callback(rendezvous.close)
        own = dict(zip(bind, map(parse_endpoint, server.endpoints), strict=True))
        rendezvous.endpoints = [own[address or ports.LOOPBACK] for address in placement.launcher]
        if not all(placement.launcher):
            from hvdgloo.runner.supervise.relayed import RelayedConnections

            listening: dict[AgentLink, Relaying] = {}
            relayed = RelayedConnections(supervisor.selector, own[ports.LOOPBACK], listening.__setitem__)
            stack.callback(relayed.close)
            supervisor.handlers |= relayed.handlers
            _relay(supervisor, spec, placement, listening, rendezvous.endpoints)
        yield rendezvous


def _relay(
    supervisor: Supervisor,
    spec: LaunchSpec,
    placement: Placement,
    listening: dict[AgentLink, Relaying],
    endpoints: list[tuple[str, int]],
) -> None:
    """Have agents listen for workers that do not reach the launcher, and set these workers' ``endpoints``."""
    links = {
        number: link
        for number, (link, launcher) in enumerate(zip(supervisor.links, placement.launcher, strict=True))
        if not launcher
    }
    for link in links.values():
        link.channel.send(Relay(spec.network.port_range))
    timeout = spec.network.connect_timeout
    supervisor.converse(lambda: len(listening) == len(links), time.monotonic() + timeout)
    for number, link in links.items():
        answer = listening.get(link)
        if answer is None or link.hello is None:
            raise LaunchError(
                f"the agent on host {link.host.name} did not listen for its workers within {timeout:g} s; if the host "
                "is only slow, raise --connect-timeout-seconds"
            )
        if answer.failure:
            raise LaunchError(f"the agent on host {link.host.name} cannot listen for its workers: {answer.failure}")
        endpoints[number] = link.hello.loopback, answer.port


class RendezvousHost:
    """A server that listens, on threads of this process.

    The web server is imported on one of them, when workers may soon need it: on a busy machine that takes seconds,
    during which the supervisor must send heartbeats to its agents.

    Args:
        server: the server, which listens already.
        head_start: in seconds; see ``HEAD_START``.

    Attributes:
        endpoints: for each host, address and port at which its workers reach the server.
    """

    def __init__(self, server: RendezvousServer, supervisor: Supervisor, head_start: float = HEAD_START) -> None:
        self._server = server
        self._head_start = head_start
        self._supervisor = supervisor
        self._serving = False
        self.endpoints: list[tuple[str, int]] = []
        self._closed, self._close = socket.socketpair()
        self._thread = threading.Thread(target=self._start, name="hvdgloo-serve", daemon=True)

    def serve(self) -> None:
        """Answer workers, which may be connecting already. Called once they have been started."""
        self._thread.start()

    def arrivals(self) -> Arrivals:
        """Return what the server knows about the workers' start."""
        if not self._serving:
            return Arrivals()
        epoch = self._server.status()["epochs"][-1]
        return Arrivals(epoch["arrived"], epoch["missing_ranks"], self._server.last_failure)

    def close(self) -> None:
        """Stop serving."""
        self._close.close()
        if self._thread.ident is not None:
            self._thread.join(_START_SECONDS)
        self._server.stop()
        self._closed.close()

    def _wanted(self) -> bool:
        """Wait until a client connects, but not longer than the head start; return False if the server was closed
        meanwhile."""
        poller = select.poll()  # select() cannot watch descriptors above 1023
        for descriptor in (self._closed.fileno(), *self._server.descriptors()):
            poller.register(descriptor, select.POLLIN)
        return self._closed.fileno() not in dict(poller.poll(self._head_start * 1000))

    def _start(self) -> None:
        try:
            if self._wanted():
                self._server.start()
                self._serving = True
        except Exception as error:  # noqa: BLE001 - nothing waits for this thread, and the job cannot go on without it
            name = host_name()
            text = f"the rendezvous server in the launcher failed: {type(error).__name__}: {error}"
            self._supervisor.fail_soon(Failure(None, name, 1, text))
