"""A worker's side of an elastic job: asking for its next epoch, saying how far it is, and hearing of changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from hvdgloo.errors import DismissedError, RendezvousError, RendezvousTimeoutError
from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._client.client import RendezvousClient, _Answer
from hvdgloo.rendezvous._elastic import messages as elastic
from hvdgloo.rendezvous._elastic.messages import Alone, News, Progress
from hvdgloo.rendezvous._store import epoch_scope
from hvdgloo.rendezvous._worker_info import WorkerInfo
from hvdgloo.topology import Topology

_REPORT_SECONDS = 10.0
"""How long a worker tries to report what only concerns its end."""


@dataclass(frozen=True)
class Placement:
    """A worker's place in an epoch.

    Attributes:
        rank: its rank.
        topology: who is where; ``topology.epoch`` is the epoch's number.
        root: the rank whose state is the newest.
        everyone: all members have that state already, so that nothing needs to travel.
        new: the ranks of those who have not been in an epoch before.
    """

    rank: int
    topology: Topology
    root: int
    everyone: bool
    new: frozenset[int]

    @property
    def fresh(self) -> bool:
        """Nobody has been in an epoch before: this is the first one."""
        return len(self.new) == self.topology.size


class ElasticClient:
    """What one worker says to the rendezvous server of an elastic job. Any thread may call.

    Args:
        client: of the server; it stays connected as long as the worker is part of the job.
        worker: the id of this process, never used for another one.
        patience: seconds in which a server that is away may come back, when a worker reports how far it is in an epoch.
    """

    def __init__(self, client: RendezvousClient, worker: str, *, patience: float = _REPORT_SECONDS) -> None:
        self._client = client
        self._patience = patience
        self.worker = worker
        self._current: elastic.CurrentEpoch | None = None

    def next_epoch(
        self,
        after: int,
        info: WorkerInfo,
        *,
        ready: bool,
        serial: int = -1,
        digest: str = "",
        error: str = "",
        accused: Sequence[int] = (),
        stood: float = 0.0,
        timeout: float,
    ) -> Placement | Alone:
        """Ask for the epoch after the last one that this worker was a member of, and wait for it.

        Args:
            after: that epoch; -1 for a worker that has not been in one.
            info: where this worker can be reached from now on, with its rank in that epoch if there was one.
            ready: it is at ``elastic.run``; False in ``init()``.
            serial: of its newest commit; -1 if it has never had the job's state.
            digest: any short text that is equal where two workers hold the same commit.
            error: why it has left that epoch, in a line; empty if a change of hosts is the reason.
            accused: ranks of that epoch which it has lost, or cannot connect with.
            stood: seconds since it began to wait for others in that epoch.
            timeout: seconds. It should exceed the job's elastic timeout: the server knows for whom to wait.

        Returns:
            its place, once all members of the epoch are there; ``Alone`` at once if others are in training, and it
            is not ready.

        Raises:
            DismissedError: it is in no further epoch.
            RendezvousTimeoutError: there was no epoch within ``timeout``.
            RendezvousError: the server cannot be reached.
        """
        self._current = None  # until the answer: where it was, the question says
        said = digest[:4096], error[:4096], list(accused), stood
        ask = elastic.Register(self.worker, after, ready, serial, *said, info.to_dict())
        route = "/v1/elastic/next"
        answer = self._wait(route, elastic.REGISTER.encode(ask), timeout)
        if answer.status == 202:
            raise RendezvousTimeoutError(
                f"rendezvous server {self._client.server}: no epoch after {after} within {timeout:g} s; "
                f"{answer.reason}",
                server=self._client.server,
                route=route,
            )
        try:
            decoded = elastic.REPLY.decode(answer.body)
            if isinstance(decoded, elastic.Formed):
                topology = messages.unpack_topology(decoded.topology)
                if max(decoded.rank, decoded.root) >= topology.size:
                    raise ValueError(f"rank {decoded.rank} or {decoded.root} is none of the topology's {topology.size}")
                placement = Placement(decoded.rank, topology, decoded.root, decoded.everyone, frozenset(decoded.new))
                self._current = elastic.CurrentEpoch(topology.epoch, decoded.rank, topology.size, False, info.to_dict())
                return placement
        except ValueError as error_:
            raise RendezvousError(
                f"rendezvous server {self._client.server}, {route}: {error_} (check that hvdgloo of the same version "
                "is installed there)",
                server=self._client.server,
                route=route,
            ) from error_
        if isinstance(decoded, elastic.Dismissed):
            raise DismissedError(decoded.reason, fate=decoded.fate)
        return decoded

    def up(self, epoch: int) -> None:
        """This worker is connected with all other members of the epoch. Raises RendezvousError."""
        self._report(Progress.UP, epoch, self._patience)

    def synced(self, epoch: int) -> None:
        """This worker is in ``elastic.run``, and has the state of the epoch. Raises RendezvousError."""
        if self._current is not None:
            self._current = msgspec.structs.replace(self._current, synced=True)
        self._report(Progress.SYNCED, epoch, self._patience)

    def finished(self) -> None:
        """This worker's training has come to its end: there will be no further epoch. Raises RendezvousError."""
        self._report(Progress.FINISHED, -1, _REPORT_SECONDS)

    def leaving(self) -> None:
        """This worker will not be there much longer, and wants to leave at the next commit. Raises RendezvousError."""
        self._report(Progress.LEAVING, -1, _REPORT_SECONDS)

    @staticmethod
    def scope(epoch: int) -> str:
        """What the names of scopes end in whose keys are of no use any more once the next epoch has been formed."""
        return epoch_scope(epoch)

    def news(self, since: int, *, timeout: float) -> News:
        """The news, as soon as their number is another than ``since``.

        A server that was restarted learns from this request where this worker is, and a server without a launcher that
        it lives: some thread should always wait here.

        Args:
            since: the number of the last ones; -1 returns at once. A server that was restarted counts from 0.
            timeout: seconds after which the last ones are returned again.

        Raises:
            RendezvousError: the server cannot be reached.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            answer = self._wait(
                "/v1/elastic/news",
                lambda: elastic.LISTEN.encode(elastic.Listen(self.worker, since, self._current)),
                left,
            )
            news = elastic.NEWS.decode(answer.body)
            if news.number != since or time.monotonic() >= deadline - 0.001:
                return news

    def _report(self, what: Progress, epoch: int, timeout: float) -> None:
        self._wait(
            "/v1/elastic/reports",
            lambda: elastic.REPORT.encode(elastic.Report(self.worker, what, epoch, self._current)),
            timeout,
        )

    def _wait(self, route: str, body: bytes | Callable[[], bytes], timeout: float) -> _Answer:
        """The answer of the server, or of another that is started in its place.

        Args:
            body: made anew each time if it says where the worker is: another server is to hear where that is now, and
                not where it was at first.
        """
        return self._client._wait("POST", route, body, timeout, pending=202, follow=True, outlive=True)


__all__ = ["Alone", "ElasticClient", "News", "Placement"]
