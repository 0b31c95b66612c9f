"""Observer of a job for ``hvdgloo-rendezvous --page``: without a launcher, ranks report to the server."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from hvdgloo._net.tls import Tls
from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.page.page import Page
from hvdgloo._observe.samples import HostSample, Observation
from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._page_server.server import PageServer
from hvdgloo.version import __version__


class JobObserver:
    """The page of a job, fed by its rendezvous server: workers with their hosts and connections, and ranks' samples.

    A context manager, around the job's life.

    Args:
        title: name of the job.
        secret: the job's secret.
        address, port: address of the page; port 0 for any.
        rules: rules of an elastic job.
        tls: encrypts the page, if given.

    Raises:
        ConfigError: on entering: it cannot listen there.
    """

    def __init__(
        self, title: str, *, secret: bytes, address: str, port: int, rules: Rules | None = None, tls: Tls | None = None
    ) -> None:
        self._observatory = Observatory(
            job=secrets.token_hex(6),
            command=title,
            started=time.time(),
            versions={"hvdgloo": __version__},
            least=None if rules is None else rules.smallest,
            most=None if rules is None else rules.largest,
        )
        self._server = PageServer(Page(self._observatory), secret=secret, addresses=(address,), port=port, tls=tls)
        self._stack = ExitStack()
        self._places: dict[int, str] = {}
        self._seats: Sequence[tuple[int, str, int, int]] = ()
        self._epoch = -1
        self._gone: set[int] = set()

    def __enter__(self) -> JobObserver:
        with ExitStack() as stack:
            self._server.listen()
            stack.callback(self._server.stop)
            stack.enter_context(self._observatory)
            self._server.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def link(self) -> str:
        """Return a new link, which admits one browser."""
        return self._server.link()

    def observed(self, observation: Observation) -> None:
        """Take a rank's observation. May be called on any thread."""
        if isinstance(observation, HostSample):
            return  # only agents measure hosts, and there is none
        host = self._places.get(observation.rank)
        if host is not None:  # otherwise the rank has no place yet, or belongs to an earlier epoch
            self._observatory.observe(host, observation)

    def look(self, status: Mapping[str, Any]) -> None:
        """Take the server's new status after workers arrived or left.

        Args:
            status: status of the server, as ``/v1/status`` shows it.
        """
        awaited = ""
        if "elastic" in status:
            job = status["elastic"]
            epoch, workers = job["epoch"], job["workers"]
            if job["phase"] == "waiting":
                awaited = f"waiting for {job['waiting_for']}"
        else:
            current = status["epochs"][-1]
            epoch, workers = current["epoch"], current["workers"]
            if current["state"] != "complete":
                awaited, workers = current["summary"], []
        self._observatory.starting(awaited)
        taken = Counter[str]()
        seats = []
        for worker in sorted(workers, key=lambda worker: worker["rank"]):
            host = worker["host"]
            seats.append((worker["rank"], host, worker.get("local_rank", taken[host]), worker.get("pid", 0)))
            taken[host] += 1
        if (epoch, seats) != (self._epoch, self._seats):
            self._place(epoch, seats)
        for worker in workers:
            rank = worker["rank"]
            if worker["connected"] == (rank in self._gone):
                self._gone ^= {rank}
                self._observatory.worker(rank, "running" if worker["connected"] else "ended")

    def tell(self, text: str) -> None:
        """Record an event of an elastic job."""
        self._observatory.event("elastic", text)

    def left_out(self, host: str) -> None:
        """Record that a host is not used for the time being."""
        self._observatory.host(host, "left out")

    def complain(self, text: str) -> None:
        """Record a failed start, which may be followed by another one."""
        self._observatory.event("failure", text)

    def ended(self, status: int, text: str) -> None:
        """End the job; ``text`` says what failed if ``status`` is not 0."""
        self._observatory.ended(status, text)

    def _place(self, epoch: int, seats: Sequence[tuple[int, str, int, int]]) -> None:
        self._epoch, self._seats, self._gone = epoch, seats, set()
        self._places = {rank: host for rank, host, _, _ in seats}
        for host in dict.fromkeys(self._places.values()):
            self._observatory.host(host, "up")
        self._observatory.placed(epoch, seats)
