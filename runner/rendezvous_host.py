"""The rendezvous server of a job, in the launcher. Workers that cannot reach it there go through their agent."""

from __future__ import annotations

import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from hvdgloo._net.tls import Tls
from hvdgloo.config import parse_endpoint
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.rendezvous._server.server import RendezvousServer
from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.supervise.init_watch import Arrivals
from hvdgloo.runner.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from hvdgloo.rendezvous._server.elastic import ElasticEpochs

_START_SECONDS = 10.0
HEAD_START = 0.1
"""Seconds that a job's workers get before the web server is imported, unless one of them connects earlier: a job that
ends within this time (a command without hvdgloo, a mistake in the script's first line) never needs it."""


@contextmanager
def open_rendezvous(
    supervisor: Supervisor,
    spec: LaunchSpec,
    bind: Sequence[str],
    *,
    hosts: Sequence[HostEntry] = (),
    elastic: ElasticEpochs | None = None,
    head_start: float = HEAD_START,
) -> Iterator[RendezvousHost]:
    """Run a server for this job's workers, for as long as the job lasts.

    Args:
        bind: the addresses at which it listens.
        hosts: the hosts of a job of a fixed size, with their slots.
        elastic: the epochs of an elastic job.
        head_start: in seconds; see ``HEAD_START``.

    Raises:
        ConfigError: the server cannot listen, or its certificate cannot be used.
        MissingDependencyError: the server cannot make a certificate.
    """
    slots = Counter[tuple[str, str]]()
    for host in hosts:
        slots[host.machine, host.hostname] += host.slots or 0
    server = RendezvousServer(
        secret=spec.secret,
        hosts=[(hostname, count) for (_, hostname), count in slots.items()] or None,
        elastic=elastic,
        bind=bind,
        port_range=spec.config.port_range,
        start_timeout=spec.start_timeout,
        tls=None if spec.config.tls_files is None else Tls(*spec.config.tls_files),
    )
    with closing(RendezvousHost(server.listen(), supervisor, head_start)) as rendezvous:
        yield rendezvous


class RendezvousHost:
    """A server that listens, on threads of this process.

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
    def port(self) -> int:
        """The port at which it listens, the same at all its addresses."""
        return parse_endpoint(self._server.endpoint)[1]

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
