"""The workers of an elastic job as clients of its rendezvous server, with threads for those that wait."""

from __future__ import annotations

from contextlib import ExitStack

from hvdgloo.rendezvous import ElasticClient, Placement, RendezvousClient
from tests.support.rendezvous import SECRET, info
from tests.support.threads import Task


class Workers:
    """The workers of one job, each with a client of its own."""

    def __init__(self, endpoint: str, stack: ExitStack, secret: bytes = SECRET) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._stack = stack
        self._clients: dict[str, RendezvousClient] = {}
        self._workers: dict[str, ElasticClient] = {}

    def __getitem__(self, id: str) -> ElasticClient:
        if id not in self._clients:
            self._clients[id] = self._stack.enter_context(RendezvousClient(self._endpoint, self._secret))
            self._workers[id] = ElasticClient(self._clients[id], id)
        return self._workers[id]

    def ask(
        self, id: str, after: int = -1, *, ready: bool = True, serial: int = -1, error: str = "", port: int = 7
    ) -> Task[object]:
        worker, told = (
            self[id],
            info(host_name=f"pod-{id}", host_identity=id, port=port, control_fanin=3, control_tree_ranks=2),
        )
        return Task(
            lambda: worker.next_epoch(after, told, ready=ready, serial=serial, digest="", error=error, timeout=20)
        )

    def place(self, *ids: str, after: int = -1, serial: int = -1, error: str = "") -> list[Placement]:
        """All of them ask, and get a place in the same epoch."""
        tasks = [self.ask(id, after, serial=serial, error=error) for id in ids]
        return [placed(task) for task in tasks]

    def train(self, *ids: str, epoch: int) -> None:
        """All of them are connected, and have the state."""
        for id in ids:
            self[id].up(epoch)
        for id in ids:
            self[id].synced(epoch)

    def die(self, id: str) -> None:
        self._clients.pop(id).close()


def placed(task: Task[object]) -> Placement:
    placement = task.result(20)
    assert isinstance(placement, Placement)
    return placement
