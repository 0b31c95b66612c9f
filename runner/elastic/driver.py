"""The launcher's part of an elastic job: it asks for hosts, and has workers started and ended as the job decides.

Hosts and the means of starting workers are arguments: an elastic job on Spark or Ray differs in these two only. What
workers say, they say to the rendezvous server (``RendezvousServer(elastic=driver.epochs)``); whoever starts them tells
the driver when they end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hvdgloo.errors import HvdglooError
from hvdgloo.rendezvous._elastic.events import (
    Action,
    Changed,
    Ended,
    Gone,
    HostLost,
    HostsListed,
    Identified,
    Leaving,
    Rules,
    Spawn,
    Stop,
    Tell,
)
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.runner.elastic.discovery import HostManager, Listing
from hvdgloo.runner.job.spec import Discovery

HANG_TIME = 30.0
"""Seconds after which a line says that a discovery has not answered."""

_JOIN_TIME = 1.0
"""Seconds for a discovery to return at the end; its thread ends with the process if it does not."""


class WorkerStarter(Protocol):
    """What starts and ends the workers of an elastic job. Its methods return at once.

    How a start turned out, and each end, is told to the driver: ``exited``, ``host_lost``.
    """

    def start(self, spawn: Spawn) -> None:
        """Start a worker on ``spawn.host``; ``spawn.plan`` has the place that it will probably get.

        Raises:
            HvdglooError: the host cannot be used.
        """
        ...

    def stop(self, worker: str, reason: str) -> None:
        """End a worker that was started; it may have ended already."""
        ...


@dataclass
class ElasticOutcome:
    """How an elastic job has ended.

    Attributes:
        ended: the end itself.
        changes: each epoch that came to training, in order.
    """

    ended: Ended
    changes: list[Changed] = field(default_factory=list)


class ElasticDriver:
    """Drives one elastic job.

    Use it as a context manager, with a rendezvous server over ``epochs`` inside; then call ``run``.

    Args:
        rules: what the user has asked for.
        discovery: what lists hosts.
        starter: what starts and ends workers.
        tell: receives lines for the user; called on any thread.
        interval: seconds between two questions to the discovery.
        hang_time: seconds after which the user is told that it does not answer.

    Raises:
        DiscoveryError: on entering, if hosts cannot be determined; nothing has been started then.
    """

    def __init__(
        self,
        rules: Rules,
        discovery: Discovery,
        starter: WorkerStarter,
        *,
        tell: Callable[[str], None],
        interval: float = 1.0,
        hang_time: float = HANG_TIME,
    ) -> None:
        self._actions: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self.epochs = ElasticEpochs(rules, act=self._actions.put)
        self._manager = HostManager(discovery)
        self._starter = starter
        self._tell = tell
        self._interval = interval
        self._hang_time = hang_time
        self._asked_at: float | None = None
        self._told_of_hang = False
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._discover, name="hvdgloo-discovery", daemon=True)

    def __enter__(self) -> ElasticDriver:
        self.epochs.feed(_listed(self._manager.update_available_hosts()))
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join(_JOIN_TIME)

    def run(self) -> ElasticOutcome:
        """Do what the job decides, until it has ended; its workers are then told to end."""
        running: set[str] = set()
        changes: list[Changed] = []
        while True:
            match self._next_action():
                case Spawn() as spawn:
                    running.add(spawn.worker)
                    self._start(spawn)
                case Stop(worker, reason):
                    self._starter.stop(worker, reason)
                case Tell(text):
                    self._tell(text)
                case Changed() as change:
                    changes.append(change)
                case Ended() as ended:
                    for worker in running:
                        self._starter.stop(worker, "the job is over")
                    return ElasticOutcome(ended, changes)

    def exited(self, worker: str, status: int, reason: str) -> None:
        """A worker's process has ended. ``status`` is its exit status, or minus the signal."""
        self.epochs.feed(Gone(worker, status, reason))

    def host_lost(self, host: str, reason: str, status: int = 1) -> None:
        """A host cannot be reached any more, or could not be used from the start: it has no workers now."""
        self.epochs.feed(HostLost(host, reason, status))

    def host_leaves(self, host: str) -> None:
        """A host will not be there much longer."""
        self.epochs.feed(Leaving(host=host))

    def host_identified(self, host: str, identity: str) -> None:
        """What stands behind a host's name."""
        self.epochs.feed(Identified(host, identity))

    def _next_action(self) -> Action:
        while True:
            try:
                return self._actions.get(timeout=self._hang_time)
            except queue.Empty:
                asked_at = self._asked_at
                if asked_at is None or self._told_of_hang:
                    continue
                waited = time.monotonic() - asked_at
                if waited >= self._hang_time:
                    self._told_of_hang = True
                    self._tell(
                        f"host discovery has not answered for {waited:.0f} s. The job goes on with the hosts that were "
                        "listed before"
                    )

    def _start(self, spawn: Spawn) -> None:
        try:
            self._starter.start(spawn)
        except HvdglooError as error:
            self.host_lost(spawn.host, str(error))

    def _discover(self) -> None:
        while not self._over.wait(self._interval):
            self._asked_at = time.monotonic()
            listing = self._manager.update_available_hosts()
            self._asked_at, self._told_of_hang = None, False
            if listing.notice:
                self._tell(listing.notice)
            if listing.changed:
                self.epochs.feed(_listed(listing))


def _listed(listing: Listing) -> HostsListed:
    return HostsListed(tuple((name, slots or 1) for name, slots in listing.hosts))
