"""The launcher's part of an elastic job: it watches the hosts, and has workers started and ended as the job decides.

Hosts and the means of starting workers are arguments: elastic jobs on Spark or Ray differ only in these two. Workers
report to the rendezvous server (``RendezvousServer(elastic=driver.epochs)``); the starter of the workers reports their
ends to the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

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

    The outcome of each start, and each end, is reported to the driver: ``exited``, ``host_lost``. Any thread may call
    ``soon``, ``listed`` and ``placed``; all other methods are called by the loop that ``soon`` leads to.
    """

    def soon(self, action: Callable[[], None]) -> None:
        """Have the loop call a function, in the order of these calls."""
        ...

    def listed(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        """Use the hosts that are listed now, and no others. The driver waits for ``slots_found`` for those without
        slots."""
        ...

    def placed(self, assignment: Assignment) -> None:
        """Use these ranks. The members have not been told yet, so that their next output gets the right rank.

        Called under a lock.
        """
        ...

    def start_worker(self, spawn: Spawn) -> None:
        """Start a worker on ``spawn.host``; ``spawn.plan`` has the place that it will probably get."""
        ...

    def stop_worker(self, worker: str, reason: str) -> None:
        """End a worker that was started; it may have ended already."""
        ...

    def tell(self, text: str) -> None:
        """Show a line to the user."""
        ...

    def left_out(self, host: str) -> None:
        """Record that a host is not used for the time being."""
        ...

    def finish(self, ended: Ended) -> None:
        """Record that the job has ended; its workers have been told to end."""
        ...


class ElasticDriver:
    """The driver of one elastic job.

    Use it as a context manager, with a rendezvous server over ``epochs`` inside. What the job decides is carried out in
    the starter's loop.

    Args:
        rules: the user's options.
        discovery: lists the hosts; a manager if it has been called already.
        starter: starts and ends workers.
        interval: seconds between two questions to the discovery.
        machine: returns the machine that a host belongs to; empty for a host of its own.
        hang_time: seconds after which the user is told that the discovery does not answer.

    Attributes:
        epochs: for the rendezvous server.
        ended: the end of the job; None until then.
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
        interval: float = 1.0,
        machine: Callable[[str], str] = lambda name: "",
        hang_time: float = HANG_TIME,
    ) -> None:
        self.epochs = ElasticEpochs(rules, act=self._act)
        self.ended: Ended | None = None
        self.changes: list[tuple[float, Changed]] = []
        self._manager = discovery if isinstance(discovery, HostManager) else HostManager(discovery)
        self._starter = starter
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

    def keep_time(self, now: float) -> None:
        """Report a discovery that does not answer. Called in each turn of the loop, with monotonic time."""
        asked_at = self._asked_at
        if asked_at is None or self._told_of_hang or now - asked_at < self._hang_time:
            return
        self._told_of_hang = True
        self._starter.tell(
            f"host discovery has not answered for {now - asked_at:.0f} s. The job goes on with the hosts that were "
            "listed before"
        )

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
            self._starter.placed(action.assignment)
        else:
            self._starter.soon(partial(self._carry_out, action))

    def _carry_out(self, action: Action) -> None:
        """Do what the job has decided, in the starter's loop; nothing more once the job has ended."""
        if self.ended is not None:
            return
        match action:
            case Spawn() as spawn:
                self._running.add(spawn.worker)
                self._starter.start_worker(spawn)
            case Stop(worker, reason):
                self._starter.stop_worker(worker, reason)
            case Tell(text, left_out):
                self._starter.tell(text)
                if left_out is not None:
                    self._starter.left_out(left_out[0])
            case Changed() as change:
                if self.changes:
                    self._starter.tell(describe_change(change, self.changes[-1][1]))
                self.changes.append((time.monotonic() - self._began, change))
            case Ended() as ended:
                self.ended = ended
                for worker in list(self._running):
                    self._starter.stop_worker(worker, "the job is over")
                self._starter.finish(ended)

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

    def _discover(self) -> None:
        while not self._over.wait(self._interval):
            self._asked_at = time.monotonic()
            listing = self._manager.update_available_hosts()
            if self._over.is_set():
                return  # an interrupted script is no news
            self._asked_at, self._told_of_hang = None, False
            if listing.notice:
                self._starter.soon(partial(self._starter.tell, listing.notice))
            if listing.changed:
                self._list(listing.hosts)
