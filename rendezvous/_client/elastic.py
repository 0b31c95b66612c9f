"""A worker's side of an elastic job: requests for its next epoch, reports of its progress, and news of changes."""

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
"""Seconds for which a worker tries to report something that only concerns its end."""


@dataclass(frozen=True)
class Placement:
    """A worker's place in an epoch.

    Attributes:
        rank: its rank.
        topology: topology of the epoch, with its number in ``topology.epoch``.
        root: rank that has the newest state.
        everyone: True if all members have that state already, so that nothing needs to be sent.
        new: ranks of the members that have not been in an epoch before.
    """

    rank: int
    topology: Topology
    root: int
    everyone: bool
    new: frozenset[int]

    @property
    def fresh(self) -> bool:
        """True in the first epoch: no member has been in an epoch before."""
        return len(self.new) == self.topology.size


class ElasticClient:
    """Client of one worker for the rendezvous server of an elastic job. Any thread may call.

    Args:
        client: client for the server; it stays connected as long as the worker is part of the job.
        worker: id of this process, never used for another one.
        patience: seconds in which a server that is away may return, when a worker reports its progress in an epoch.
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
            info: this worker's addresses from now on, with its rank in that epoch if there was one.
            ready: True if it is at ``elastic.run``; False in ``init()``.
            serial: serial number of its newest commit; -1 if it never had the job's state.
            digest: any short text that is equal where two workers hold the same commit.
            error: why it left that epoch, in a line; empty if a change of hosts is the reason.
            accused: ranks of that epoch that it lost, or cannot connect with.
            stood: seconds since it began to wait for others in that epoch.
            timeout: seconds. It should exceed the job's elastic timeout: the server knows which workers to wait for.

        Returns:
            its place, once all members of the epoch have registered; ``Alone`` at once if others are in training and
            it is not ready.

        Raises:
            DismissedError: it will be in no further epoch.
            RendezvousTimeoutError: there was no epoch within ``timeout``.
            RendezvousError: the server cannot be reached.
        """
        self._current = None  # until the reply: the request has its last epoch
        details = digest[:4096], error[:4096], list(accused), stood
        ask = elastic.Register(self.worker, after, ready, serial, *details, info.to_dict())
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
        """Report that this worker is connected with all other members of the epoch. Raises RendezvousError."""
        self._report(Progress.UP, epoch, self._patience)

    def synced(self, epoch: int) -> None:
        """Report that this worker is in ``elastic.run`` and has the epoch's state. Raises RendezvousError."""
        if self._current is not None:
            self._current = msgspec.structs.replace(self._current, synced=True)
        self._report(Progress.SYNCED, epoch, self._patience)

    def finished(self) -> None:
        """Report that this worker has finished training: there will be no further epoch. Raises RendezvousError."""
        self._report(Progress.FINISHED, -1, _REPORT_SECONDS)

    def leaving(self) -> None:
        """Report that this worker is about to be ended, and leaves at the next commit. Raises RendezvousError."""
        self._report(Progress.LEAVING, -1, _REPORT_SECONDS)

    @staticmethod
    def scope(epoch: int) -> str:
        """Return the suffix for names of scopes whose keys are useless once the next epoch has been formed."""
        return epoch_scope(epoch)

    def news(self, since: int, *, timeout: float) -> News:
        """Return the news, as soon as their number differs from ``since``.

        From this request a restarted server learns this worker's epoch, and a server without a launcher that the worker
        is alive: some thread should always wait here.

        Args:
            since: number of the last news; -1 returns at once. A restarted server counts from 0.
            timeout: seconds after which the last news are returned again.

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

    def _report(self, progress: Progress, epoch: int, timeout: float) -> None:
        self._wait(
            "/v1/elastic/reports",
            lambda: elastic.REPORT.encode(elastic.Report(self.worker, progress, epoch, self._current)),
            timeout,
        )

    def _wait(self, route: str, body: bytes | Callable[[], bytes], timeout: float) -> _Answer:
        """Return the answer of the server, or of one that is started in its place.

        Args:
            body: a function if it depends on the worker's epoch: another server must be told the present one.
        """
        return self._client._wait("POST", route, body, timeout, pending=202, follow=True, outlive=True)


__all__ = ["Alone", "ElasticClient", "News", "Placement"]
