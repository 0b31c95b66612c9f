"""Workers that reach the rendezvous server by way of their host's agent: a real agent, and the launcher's part here."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, cast

from hvdgloo.config import parse_endpoint
from hvdgloo.rendezvous import RendezvousClient, RendezvousServer
from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import Frame, Relay, Relaying
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.relayed import RelayedConnections
from tests.processes.test_agent_elastic import Agent
from tests.support.elastic_clients import Workers
from tests.support.rendezvous import SECRET, until


@dataclass(eq=False)
class Line:
    """A replacement of a ``AgentLink`` for relayed connections."""

    channel: FrameChannel


class Launcher:
    """The launcher's part: it serves the frames of one agent on a thread."""

    def __init__(self, agent: Agent, server: str) -> None:
        self.answers: list[Relaying] = []
        self._selector = selectors.DefaultSelector()
        self._link = cast(AgentLink, Line(agent.channel))
        self.connections = RelayedConnections(self._selector, lambda _, answer: self.answers.append(answer))
        self.connections.server = parse_endpoint(server)
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._selector.register(agent.channel.receive_fd, selectors.EVENT_READ, self._receive)
        agent.channel.send(Relay(None))
        self._thread.start()

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.connections.close()
        self._selector.close()

    def _receive(self) -> None:
        for frame in self._link.channel.receive():
            handler: Any = self.connections.handlers.get(type(cast(Frame, frame)))
            if handler is not None:
                handler(self._link, frame)

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.01):
                key.data()
            self._link.channel.flush()


def test_an_elastic_job_of_workers_that_do_not_reach_the_launcher() -> None:
    epochs = ElasticEpochs(Rules(size=2, smallest=1, launched=False))
    with (
        RendezvousServer(secret=SECRET, elastic=epochs) as server,
        closing(Agent(elastic=True)) as agent,
        closing(Launcher(agent, server.endpoint)) as launcher,
        ExitStack() as stack,
    ):
        until(lambda: launcher.answers, "the agent's answer")
        workers = Workers(f"127.0.0.1:{launcher.answers[0].port}", stack)
        assert {placement.topology.size for placement in workers.place("a", "b")} == {2}
        workers.train("a", "b", epoch=0)
        store = RendezvousClient(f"127.0.0.1:{launcher.answers[0].port}", SECRET)
        with store:
            large = bytes(range(256)) * 20_000  # many windows
            store.store("x").set("key", large)
            assert store.store("x").get("key") == large
        # A worker that dies is seen to be gone, although the server knows the launcher's connections only.
        workers.die("a")
        again = workers.ask("b", 0, serial=1, error="a peer was lost")
        assert again.result(20)
        assert server.status()["elastic"]["epoch"] == 1


def test_an_agent_that_cannot_listen_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, closing(Agent(elastic=True)) as agent:
        port = other.getsockname()[1]
        agent.channel.send(Relay((port, port)))
        answer = agent.wait(Relaying)
        assert isinstance(answer, Relaying)
        assert answer.port == 0
        assert f"{port}" in answer.failure
