"""The launcher's part of an elastic job: it watches the hosts, and starts and ends workers as the job decides.

Hosts and the means of starting workers are arguments: elastic jobs on Spark or Ray differ only in these two. Workers
report to the rendezvous server (``RendezvousServer(elastic=driver.epochs)``); the starter of the workers reports their
ends to the driver.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvdgloo._platform.queues import take_within
from hvdgloo.errors import HvdglooError
from hvdgloo.rendezvous._elastic.assignment import Assignment
from hvdgloo.rendezvous._elastic.events import (
    Action,
    Changed,
    Ended,
    Formed,
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
from hvdgloo.rendezvous._elastic.history import describe_change
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.runner.elastic.discovery import HostManager
from hvdgloo.runner.job.spec import Discovery

HANG_TIME = 30.0
"""Seconds after which a line reports that a discovery has not answered."""

_JOIN_TIME = 1.0
"""Seconds for a discovery to return at the end; otherwise its thread ends with the process."""

_JOIN_PAUSE = 0.05
"""Seconds after which the discovery is interrupted again: it may have been about to start its script."""


class WorkerStarter(Protocol):
    """The means of starting and ending the workers of an elastic job. Its methods return at once.

    The outcome of each start, and each end, is reported to the driver: ``exited``, ``host_lost``.
    """

    def listed(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        """Use the hosts that are listed now, and no others. The driver waits for ``slots_found`` for those without
        slots."""
        ...

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
    """The outcome of an elastic job.

    Attributes:
        ended: the end itself.
        changes: see ``ElasticDriver``.
    """

    ended: Ended
    changes: list[tuple[float, Changed]] = field(default_factory=list)


class ElasticDriver:
    """The driver of one elastic job.

    Use it as a context manager, with a rendezvous server over ``epochs`` inside; then call ``run``.

    Args:
        rules: the user's options.
        discovery: lists the hosts; a manager if it has been called already.
        starter: starts and ends workers.
        tell: receives lines for the user; called on any thread.
        left_out: receives hosts that are not used for the time being; called on any thread.
        placed: receives each assignment before its members are told their ranks, so that their next output has the
            right rank. Called on any thread, under a lock: it must not block.
        interval: seconds between two questions to the discovery.
        machine: returns the machine that a host belongs to; empty for a host of its own.
        hang_time: seconds after which the user is told that the discovery does not answer.

    Attributes:
        epochs: for the rendezvous server.
        changes: each epoch that reached training, in order, with the seconds since the driver's start.

    Raises:
        DiscoveryError: on entering, if hosts cannot be determined; nothing has been started then.
    """

    def __init__(
        self,
        rules: Rules,
        discovery: Discovery | HostManager,
        starter: WorkerStarter,
        *,
        tell: Callable[[str], None],
        left_out: Callable[[str], None] = lambda host: None,
        placed: Callable[[Assignment], None] = lambda assignment: None,
        interval: float = 1.0,
        machine: Callable[[str], str] = lambda name: "",
        hang_time: float = HANG_TIME,
    ) -> None:
        self._actions: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self.epochs = ElasticEpochs(rules, act=self._act)
        self.changes: list[tuple[float, Changed]] = []
        self._manager = discovery if isinstance(discovery, HostManager) else HostManager(discovery)
        self._starter = starter
        self._tell = tell
        self._left_out = left_out
        self._placed = placed
        self._machine = machine
        self._began = time.monotonic()
        self._running: set[str] = set()
        self._lock = threading.Lock()  # what was listed last, and what was found out about it
        self._listing: Sequence[tuple[str, int | None]] = ()
        self._found: dict[str, int] = {}
        self._began_with_hosts = False
        self._interval = interval
        self._hang_time = hang_time
        self._asked_at: float | None = None
        self._told_of_hang = False
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._discover, name="hvdgloo-discovery", daemon=True)

    def __enter__(self) -> ElasticDriver:
        if not self._manager.asked:
            self._manager.update_available_hosts()
        self._list(self._manager.current_hosts)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        give_up_at = time.monotonic() + _JOIN_TIME
        while self._watch.is_alive() and time.monotonic() < give_up_at:
            self._manager.interrupt()
            self._watch.join(_JOIN_PAUSE)

    def run(self) -> ElasticOutcome | None:
        """Carry out the job's decisions until it has ended; its workers are then told to end. Return None after
        ``abandon``."""
        while True:
            match self._next_action():
                case Spawn() as spawn:
                    self._running.add(spawn.worker)
                    self._start(spawn)
                case Stop(worker, reason):
                    self._starter.stop(worker, reason)
                case Tell(text, left_out):
                    self._tell(text)
                    if left_out is not None:
                        self._left_out(left_out[0])
                case Changed() as change:
                    if self.changes:
                        self._tell(describe_change(change, self.changes[-1][1]))
                    self.changes.append((time.monotonic() - self._began, change))
                case Ended() as ended:
                    for worker in list(self._running):
                        self._starter.stop(worker, "the job is over")
                    return ElasticOutcome(ended, self.changes)
                case None:
                    return None

    def abandon(self) -> None:
        """Have ``run`` return, because the job was stopped elsewhere."""
        self._actions.put(None)

    def exited(self, worker: str, status: int, reason: str) -> None:
        """Record the end of a worker's process. ``status`` is its exit status, or minus the signal."""
        self._running.discard(worker)
        self.epochs.feed(Gone(worker, status, reason))

    def host_lost(self, host: str, reason: str, status: int = 1) -> None:
        """Record that a host is lost, or could not be used from the start: it has no workers now."""
        with self._lock:
            unknown = (host, None) in self._listing and host not in self._found
        if unknown:
            self.slots_found(host, 0)  # so that the job knows it, and does not start anything there now
        self.epochs.feed(HostLost(host, reason, status))
        if unknown:
            self.slots_found(host, 1)  # when its time comes, it is tried again

    def host_leaves(self, host: str) -> None:
        """Record that a host will leave soon."""
        self.epochs.feed(Leaving(host=host))

    def host_identified(self, host: str, identity: str) -> None:
        """Record the identity behind a host's name."""
        self.epochs.feed(Identified(host, identity))

    def slots_found(self, host: str, slots: int) -> None:
        """Record the number of slots of a host that is listed without."""
        with self._lock:
            if self._found.get(host) != slots:
                self._found[host] = slots
                self._feed_hosts()

    def _act(self, action: Action) -> None:
        if isinstance(action, Formed):
            self._placed(action.assignment)
        else:
            self._actions.put(action)

    def _list(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        self._starter.listed(hosts)
        with self._lock:
            self._listing = hosts
            self._feed_hosts()

    def _feed_hosts(self) -> None:
        hosts = [(name, self._found.get(name) if slots is None else slots) for name, slots in self._listing]
        known = tuple((name, slots) for name, slots in hosts if slots is not None)
        # First wait for all hosts: the job starts on all available slots, or reports that they are too few.
        self._began_with_hosts = self._began_with_hosts or len(known) == len(hosts)
        if self._began_with_hosts:
            machines = tuple((name, machine) for name, _ in known if (machine := self._machine(name)))
            self.epochs.feed(HostsListed(known, machines))

    def _next_action(self) -> Action | None:
        while True:
            try:
                return take_within(self._actions, self._hang_time)
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
            if self._over.is_set():
                return  # an interrupted script is no news
            self._asked_at, self._told_of_hang = None, False
            if listing.notice:
                self._tell(listing.notice)
            if listing.changed:
                self._list(listing.hosts)
