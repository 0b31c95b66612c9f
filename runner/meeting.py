"""Where a job's workers meet: the rendezvous server, in the launcher or beside the first host's agent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from hvdgloo.config import parse_endpoint
from hvdgloo.errors import LaunchError
from hvdgloo.rendezvous.beside import arrivals
from hvdgloo.rendezvous.server import RendezvousServer
from hvdgloo.runner.frames import Serve, Served
from hvdgloo.runner.link import Link
from hvdgloo.runner.outcome import Failure
from hvdgloo.runner.placement import Placement, Server
from hvdgloo.runner.spec import Host, LaunchSpec
from hvdgloo.runner.supervisor import Supervisor
from hvdgloo.runner.waiting import Arrivals


class Meeting(Protocol):
    """A server that listens."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port at which workers reach it."""

    def serve(self) -> None:
        """Answer workers, which may be on their way already: to be called once they have been started."""

    def arrivals(self) -> Arrivals:
        """What it knows of the workers' start."""


@contextmanager
def open_meeting(
    supervisor: Supervisor, spec: LaunchSpec, hosts: Sequence[Host], placement: Placement, job_id: str
) -> Iterator[Meeting]:
    """A server for this job's workers, as long as the job lasts.

    Raises:
        ConfigError: the launcher's cannot listen.
        LaunchError: the one beside the agent cannot be had.
    """
    places = [(host.name, host.slots or 0) for host in hosts]
    if placement.server is Server.LAUNCHER:
        server = RendezvousServer(
            secret=spec.secret,
            hosts=places,
            bind=(placement.rendezvous,),
            port_range=spec.network.port_range,
            start_timeout=spec.start_timeout,
        )
        try:
            yield _InLauncher(server.listen())
        finally:
            server.stop()
    else:
        yield _Beside(supervisor, spec, places, placement.rendezvous, job_id)


class _InLauncher:
    def __init__(self, server: RendezvousServer) -> None:
        self._server = server

    @property
    def endpoint(self) -> tuple[str, int]:
        return parse_endpoint(self._server.endpoint)

    def serve(self) -> None:
        self._server.start()

    def arrivals(self) -> Arrivals:
        return Arrivals(**arrivals(self._server))


class _Beside:
    """Known through the agent, which tells whatever changes; it ends with the agent."""

    def __init__(
        self,
        supervisor: Supervisor,
        spec: LaunchSpec,
        places: Sequence[tuple[str, int]],
        address: str,
        job_id: str,
    ) -> None:
        self._supervisor = supervisor
        self._first = supervisor.links[0]
        self._said: Mapping[str, Any] = {}
        self._endpoint: tuple[str, int] | None = None
        supervisor.handlers[Served] = self._on_served
        request = {
            "secret": spec.secret.hex(),
            "hosts": places,
            "bind": [address],
            "port_range": spec.network.port_range,
            "start_timeout": spec.start_timeout,
        }
        self._first.channel.send(Serve(job_id, request))
        timeout = spec.network.connect_timeout
        supervisor.converse(lambda: self._endpoint is not None, time.monotonic() + timeout)
        if self._endpoint is None:
            raise LaunchError(
                f"the rendezvous server on host {self._first.host.name} did not start within {timeout:g} s; if the "
                "host is merely slow, raise --connect-timeout-seconds"
            )

    @property
    def endpoint(self) -> tuple[str, int]:
        assert self._endpoint is not None
        return self._endpoint

    def serve(self) -> None:
        """It does so since it was started."""

    def arrivals(self) -> Arrivals:
        return Arrivals(**self._said)

    def _on_served(self, link: Link, frame: Served) -> None:
        if "endpoints" in frame.message:
            self._endpoint = parse_endpoint(frame.message["endpoints"][0])
        elif "error" in frame.message:
            name = link.host.name
            self._supervisor.fail(
                Failure(None, name, 1, f"the rendezvous server on host {name} failed: {frame.message['error']}")
            )
        else:
            self._said = frame.message
