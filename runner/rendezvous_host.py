"""The rendezvous server of a job, in the launcher or next to the first host's agent."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from hvdgloo._net.tls import Tls
from hvdgloo.config import parse_endpoint
from hvdgloo.errors import LaunchError
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.rendezvous._server.server import RendezvousServer
from hvdgloo.rendezvous._server.sidecar import arrivals
from hvdgloo.rendezvous._sidecar import Arrived, Listening, ServerFailed, ServerRequest
from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.network.addressing import Placement, Server
from hvdgloo.runner.protocol.frames import AskServed, Serve, Served
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.init_watch import Arrivals
from hvdgloo.runner.supervise.supervisor import Supervisor

_START_SECONDS = 10.0
HEAD_START = 0.1
"""Seconds that a job's workers get before the web server is imported, unless one of them connects earlier: a job that
ends within this time (a command without hvdgloo, a mistake in the script's first line) never needs it."""


class RendezvousHost(Protocol):
    """A listening server."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port at which workers reach it."""

    def serve(self) -> None:
        """Answer workers, which may be connecting already. Called once they have been started."""

    def arrivals(self) -> Arrivals:
        """Return what the server knows about the workers' start."""

    def ask(self) -> int:
        """Request an update, and return its number: ``arrivals`` as of this number or later are newer than this
        call."""


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
        ConfigError: the launcher's server cannot listen, or its certificate cannot be used.
        MissingDependencyError: the launcher's server cannot make a certificate.
        LaunchError: the server next to the agent cannot be started.
    """
    slots = Counter[tuple[str, str]]()
    for host in hosts:
        slots[host.machine, host.hostname] += host.slots or 0
    places = [(hostname, count) for (_, hostname), count in slots.items()]
    if placement.server is Server.LAUNCHER:
        server = RendezvousServer(
            secret=spec.secret,
            hosts=places,
            bind=(placement.rendezvous,),
            port_range=spec.network.port_range,
            start_timeout=spec.start_timeout,
            tls=None if spec.network.tls is None else Tls(*spec.network.tls),
        )
        rendezvous = InLauncher(server.listen(), supervisor, head_start)
        try:
            yield rendezvous
        finally:
            rendezvous.close()
    else:
        yield _Beside(supervisor, spec, places, placement.rendezvous)


class InLauncher:
    """A server on threads of this process.

    The web server is imported on one of them, when workers may soon need it: on a busy machine that takes seconds,
    during which the supervisor must send heartbeats to its agents.

    Args:
        server: the server, which listens already.
        head_start: in seconds; see ``HEAD_START``.
    """

    def __init__(self, server: RendezvousServer, supervisor: Supervisor, head_start: float = HEAD_START) -> None:
        self._server = server
        self._head_start = head_start
        self._supervisor = supervisor
        self._serving = False
        self._closed, self._close = socket.socketpair()
        self._thread = threading.Thread(target=self._start, name="hvdgloo-serve", daemon=True)

    @property
    def endpoint(self) -> tuple[str, int]:
        return parse_endpoint(self._server.endpoint)

    def serve(self) -> None:
        self._thread.start()

    def arrivals(self) -> Arrivals:
        return _as_of(arrivals(self._server), 0) if self._serving else Arrivals()

    def ask(self) -> int:
        return 0  # it is asked at every ``arrivals``

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


class _Beside:
    """A server next to the agent, which reports every change; it ends with the agent."""

    def __init__(
        self,
        supervisor: Supervisor,
        spec: LaunchSpec,
        places: Sequence[tuple[str, int]],
        address: str,
    ) -> None:
        self._supervisor = supervisor
        self._first = supervisor.links[0]
        self._said = Arrived(0, (), "")
        self._asked = self._answered = 0
        self._endpoint: tuple[str, int] | None = None
        supervisor.handlers[Served] = self._on_served
        network = spec.network
        request = ServerRequest(spec.secret, places, [address], network.port_range, spec.start_timeout, network.tls)
        self._first.channel.send(Serve(supervisor.id_for(self._first), request))
        timeout = spec.network.connect_timeout
        supervisor.converse(lambda: self._endpoint is not None, time.monotonic() + timeout)
        if self._endpoint is None:
            raise LaunchError(
                f"the rendezvous server on host {self._first.host.name} did not start within {timeout:g} s; if the "
                "host is only slow, raise --connect-timeout-seconds"
            )

    @property
    def endpoint(self) -> tuple[str, int]:
        assert self._endpoint is not None
        return self._endpoint

    def serve(self) -> None:
        """Do nothing: the server has answered since it was started."""

    def arrivals(self) -> Arrivals:
        return _as_of(self._said, self._answered)

    def ask(self) -> int:
        self._asked += 1
        self._first.channel.send(AskServed(self._asked))
        return self._asked

    def _on_served(self, link: AgentLink, frame: Served) -> None:
        message = frame.message
        if isinstance(message, Listening):
            self._endpoint = parse_endpoint(message.endpoints[0])
        elif isinstance(message, ServerFailed):
            name = link.host.name
            self._supervisor.fail(
                Failure(None, name, 1, f"the rendezvous server on host {name} failed: {message.error}")
            )
        else:
            self._said = message
            if message.asked is not None:
                self._answered = message.asked


def _as_of(said: Arrived, question: int) -> Arrivals:
    return Arrivals(said.arrived, said.missing, said.failure, question)
