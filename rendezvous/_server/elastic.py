"""The epochs of an elastic job at the server: threads, locks and the clock around ``ElasticJob``.

Requests become events, and actions become replies to requests, or news. Actions that only a launcher can carry out
(start and end workers) or wants to know of go to its ``act``. Without a launcher, a worker counts as gone when it has
had no connection for ``LOST_TIME``: its request for news holds one as long as its process lives.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._elastic import messages as elastic
from hvdgloo.rendezvous._elastic.assignment import Assignment
from hvdgloo.rendezvous._elastic.events import (
    Action,
    Alone,
    Announce,
    Dismissed,
    Ended,
    Event,
    Failing,
    Finished,
    Formed,
    Gone,
    Leaving,
    Recalled,
    Registered,
    Rules,
    Silent,
    Synced,
    TimePassed,
    Up,
    Voided,
)
from hvdgloo.rendezvous._elastic.job import ElasticJob
from hvdgloo.rendezvous._server.epochs import NotAcceptedError, StoppingError
from hvdgloo.rendezvous._server.pauses import Pause, Steps
from hvdgloo.rendezvous._store import Latch
from hvdgloo.rendezvous._worker_info import WorkerInfo, control_tree, started_by
from hvdgloo.topology import Host, Topology, Worker, places

logger = logging.getLogger(__name__)

LOST_TIME = 0.5
"""Seconds without any connection after which a worker without a launcher counts as gone."""

SILENT_TIME = 30.0
"""Seconds after the last news within which a worker must ask for news again, or it counts as silent. It asks on a
thread of its own, so only a process that is stopped, or never releases the interpreter's lock, takes longer."""

_LATE = 1.0  # seconds by which a busy machine may wake a thread late


class ElasticEpochs:
    """The epochs of one elastic job. Thread-safe.

    Args:
        rules: the user's options.
        act: receives each action that is not a reply or news, and each epoch that was formed, in order. It must only
            note it: it is called under the lock, and may not call back.
        hold: seconds in which no epoch is formed, if workers of an earlier server may be in training.
        silent_time: seconds; see ``SILENT_TIME``.
        clock: monotonic seconds.

    Attributes:
        on_change: called when something has happened that may be worth reporting; under the lock, as ``act`` is.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        act: Callable[[Action], None] = lambda action: None,
        hold: float = 0.0,
        silent_time: float = SILENT_TIME,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = rules
        self.on_change: Callable[[], None] = lambda: None
        self._act = act
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # wakes the clock's thread
        self._job = ElasticJob(rules, clock(), hold=hold)
        self._infos: dict[str, WorkerInfo] = {}
        self._answers: dict[str, bytes] = {}
        self._waiting: dict[str, list[Latch]] = {}
        self._clients: dict[str, str] = {}  # client to worker
        self._connected: dict[str, set[str]] = {}  # worker to clients
        self._leaving_at: dict[str, float] = {}  # worker to the time at which it counts as gone
        self._silent_time = silent_time
        self._silent_at: dict[str, float] = {}  # worker that got news to the time at which it counts as silent
        self._topology: tuple[int, bytes] = (-1, b"")  # of the newest epoch
        self._news = elastic.News(0, 0, 0, -1, "")
        self._readers: list[Latch] = []
        self._closed = ""
        self._thread: threading.Thread | None = None

        self.on_formed: Callable[[int], None] = lambda epoch: None
        """Called with the number of each epoch before its members get their replies; set by the server at its start."""

    def start(self) -> None:
        """Keep the time on a thread of its own, until ``close``."""
        self._thread = threading.Thread(target=self._keep_time, name="hvdgloo-rendezvous-elastic", daemon=True)
        self._thread.start()

    def feed(self, event: Event) -> None:
        """Feed an event from the launcher."""
        with self._lock:
            self._tell(event)

    def ask(self, client: str, ask: elastic.Register, *, timeout: float) -> Steps[bytes | str]:
        """Wait for a worker's next epoch.

        Args:
            client: id of its client.
            ask: the request. A repeated one gets the same reply.
            timeout: seconds to wait here.

        Returns:
            the encoded reply; or what is waited for, if the timeout expires first.

        Raises:
            NotAcceptedError: the worker's description of itself cannot be used.
            StoppingError: the server is being stopped.
        """
        info = _info(ask.info)
        latch = Latch()
        with self._lock:
            self._check_open()
            self._note_client(client, ask.worker, info)
            self._replace_ended_job(ask)
            self._answers.pop(ask.worker, None)  # for a request that was given up, and is repeated by this one
            self._tell(
                Registered(
                    **msgspec.structs.asdict(ask),
                    host=info.host_identity,
                    host_name=info.host_name,
                    rank=info.rank if ask.after >= 0 else None,
                    index=info.index,
                    pid=info.pid,
                )
            )
            answer = self._answers.pop(ask.worker, None)
            if answer is not None:
                return answer
            self._waiting.setdefault(ask.worker, []).append(latch)
        try:
            yield Pause(latch, timeout, latch.release)
        finally:
            with self._lock:
                waiting = self._waiting.get(ask.worker, [])
                if latch in waiting:
                    waiting.remove(latch)
                    if not waiting:
                        del self._waiting[ask.worker]
        with self._lock:
            answer = self._answers.pop(ask.worker, None)
            if answer is not None:
                return answer
            self._check_open()
            awaited = self._job.waiting_for
            return f"waiting for {awaited}" if awaited else self._job.phase.value

    def report(self, client: str, report: elastic.Report) -> None:
        """Take a worker's report of its progress.

        Raises:
            NotAcceptedError: the client is another worker's, or its description of itself cannot be used.
            StoppingError: the server is being stopped.
        """
        events: dict[elastic.Progress, Event] = {
            elastic.Progress.UP: Up(report.worker, report.epoch),
            elastic.Progress.SYNCED: Synced(report.worker, report.epoch),
            elastic.Progress.FINISHED: Finished(report.worker),
            elastic.Progress.LEAVING: Leaving(worker=report.worker),
        }
        with self._lock:
            self._check_open()
            self._check_speaker(client, report.worker)
            self._recall(client, report.worker, report.current)
            self._tell(events[report.progress])

    def news(self, client: str, listen: elastic.Listen, *, timeout: float) -> Steps[bytes]:
        """Return the news, as soon as their number differs from ``since``; the old ones after ``timeout`` seconds.

        Raises:
            NotAcceptedError: the client is another worker's, or its description of itself cannot be used.
            StoppingError: the server is being stopped.
        """
        latch = Latch()
        with self._lock:
            self._check_open()
            self._check_speaker(client, listen.worker)
            self._recall(client, listen.worker, listen.current)
            self._silent_at.pop(listen.worker, None)
            if self._news.number != listen.since:
                return self._tell_news(listen.worker)
            self._readers.append(latch)
        try:
            yield Pause(latch, timeout, latch.release)
        finally:
            with self._lock:
                if latch in self._readers:
                    self._readers.remove(latch)
        with self._lock:
            self._check_open()
            return self._tell_news(listen.worker)

    def _tell_news(self, worker: str) -> bytes:
        if worker in self._connected:  # it has not gone meanwhile
            self._silent_at[worker] = self._clock() + self._silent_time
            self._changed.notify()
        return elastic.NEWS.encode(self._news)

    def client_came(self, client: str) -> None:
        """Note that a client, perhaps a worker's, has a connection."""
        with self._lock:
            worker = self._clients.get(client)
            if worker is not None:
                self._connected.setdefault(worker, set()).add(client)
                self._leaving_at.pop(worker, None)

    def client_left(self, client: str) -> None:
        """Note that a client has no connection left."""
        with self._lock:
            worker = self._clients.get(client)
            clients = self._connected.get(worker or "")
            if worker is None or clients is None:
                return
            clients.discard(client)
            if not clients and not self.rules.launched:
                self._leaving_at[worker] = self._clock() + LOST_TIME
                self._changed.notify()

    def close(self, reason: str) -> None:
        """Release all waiters with a StoppingError, and end the thread."""
        with self._lock:
            self._release(reason)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def assignment(self) -> Assignment:
        """The newest epoch's members, whether all have registered or not; none before the first one."""
        with self._lock:
            return self._job.assignment

    def status(self) -> dict[str, Any]:
        """Return the job's part of ``/v1/status``, as JSON values."""
        with self._lock:
            assignment = self._job.assignment
            return {
                "phase": self._job.phase.name.lower(),
                "epoch": assignment.epoch,
                "resets": self._job.resets,
                "workers": [
                    {
                        "rank": rank,
                        "worker": member.worker,
                        "host": member.host_name,
                        "local_rank": member.local_rank,
                        "connected": bool(self._connected.get(member.worker)),
                    }
                    for rank, member in enumerate(assignment.members)
                    if member.worker
                ],
                "waiting_for": self._job.waiting_for,
            }

    def _release(self, reason: str) -> None:
        self._closed = reason
        for latch in [latch for latches in self._waiting.values() for latch in latches] + self._readers:
            latch.release()
        self._changed.notify()

    def _check_open(self) -> None:
        if self._closed:
            raise StoppingError(self._closed)

    def _replace_ended_job(self, ask: elastic.Register) -> None:
        """Begin another job if this one has ended: its workers may be started again once the old ones are gone."""
        others = any(clients for worker, clients in self._connected.items() if worker != ask.worker)
        if self._job.final and not self.rules.launched and ask.after < 0 and not others:
            self._job = ElasticJob(self.rules, self._clock(), epochs=self._job.assignment.epoch + 1)
            self._news = msgspec.structs.replace(self._news, update=0)
            self._infos = {ask.worker: self._infos[ask.worker]}
            self._answers.clear()

    def _recall(self, client: str, worker: str, current: elastic.CurrentEpoch | None) -> None:
        """Take a worker's present epoch, which only a restarted server does not know. Otherwise it is not news: a
        request for the next epoch may have overtaken this one, and the worker then listens at another port.
        """
        info = None if current is None else _info(current.info)
        self._note_client(client, worker, info, is_latest=False)
        if current is not None and info is not None and not self.rules.launched:
            self._tell(
                Recalled(
                    **msgspec.structs.asdict(current),
                    worker=worker,
                    host=info.host_identity,
                    host_name=info.host_name,
                    pid=info.pid,
                )
            )

    def _check_speaker(self, client: str, worker: str) -> None:
        """Accept reports about a worker only from its own client, if that is connected.

        A new client of the same process asks for its next epoch before anything else; if the worker has no client yet,
        as after the server's restart, the first one is accepted.
        """
        if self._connected.get(worker) and client not in self._clients:
            raise NotAcceptedError(f"worker {worker} speaks for itself, by another client", taken=True)

    def _note_client(self, client: str, worker: str, info: WorkerInfo | None, *, is_latest: bool = True) -> None:
        """Bind a client to its worker: no other process may speak for the worker, nor the client for another one."""
        if self._clients.get(client, worker) != worker:
            raise NotAcceptedError(f"this client is worker {self._clients[client]}'s, not {worker}'s", taken=True)
        before = self._infos.get(worker)
        if info is not None:
            if before is not None and self._connected.get(worker) and _process(before) != _process(info):
                raise NotAcceptedError(
                    started_by(before, info, f"worker {worker}")
                    or f"there is a worker {worker} already: process {before.pid} on host {before.host_name}. Give "
                    "each process another HVDGLOO_WORKER, or none",
                    taken=True,
                )
            if before is None or is_latest:
                self._infos[worker] = info
        self._clients[client] = worker
        self._connected.setdefault(worker, set()).add(client)
        self._leaving_at.pop(worker, None)

    def _keep_time(self) -> None:
        with self._lock:
            try:
                self._keep_time_until_closed()
            except Exception as error:  # without the clock no wait would end
                logger.exception("the clock of the elastic job")
                reason = f"the rendezvous server has failed: {error!r}"
                self._release(reason)
                self._act(Ended(reason, Failing(reason=reason)))
                self.on_change()

    def _keep_time_until_closed(self) -> None:
        while not self._closed:
            now = self._clock()
            times = (*self._leaving_at.values(), *self._silent_at.values())
            due = min(self._job.deadline, min(times, default=math.inf))
            if now < due:
                self._changed.wait(min(due - now, threading.TIMEOUT_MAX))
                continue
            for worker in [worker for worker, at in self._leaving_at.items() if now >= at]:
                del self._leaving_at[worker]
                self._tell(Gone(worker, None, "has lost its connection"))
            for worker in [worker for worker, at in self._silent_at.items() if now >= at]:
                self._silent_at[worker] = now + self._silent_time
                if now - due < _LATE:  # otherwise this process did not run, and has not read what arrived meanwhile
                    self._tell(Silent(worker, self._silent_time))
            if now >= self._job.deadline:
                self._tell(TimePassed())

    def _tell(self, event: Event) -> None:
        """Feed the job, and carry out its actions."""
        before = self._news
        for action in self._job.feed(event, self._clock()):
            match action:
                case Formed(assignment, again):
                    if not again:
                        self._act(action)  # first, so that a launcher knows the ranks before the workers do
                    self._place(assignment, [again] if again else list(assignment.ranks))
                case Alone(worker, plan):
                    self._answer(worker, _alone(worker, plan))
                case Dismissed(worker, fate, reason):
                    self._answer(worker, elastic.Dismissed(fate.value, reason))
                case Announce(serial, update):
                    self._news = msgspec.structs.replace(
                        self._news, serial=serial, update=int(update), epoch=self._job.assignment.epoch
                    )
                case Voided(epoch, reason):
                    self._news = msgspec.structs.replace(self._news, voided=epoch, reason=reason)
                case _:
                    self._act(action)
        if self._news is not before:
            self._news = msgspec.structs.replace(self._news, number=self._news.number + 1)
            for latch in self._readers:
                latch.release()
            self._readers.clear()
        if isinstance(event, Gone):
            self._forget(event.worker)
        self._changed.notify()
        self.on_change()

    def _answer(self, worker: str, answer: elastic.Reply) -> None:
        self._answers[worker] = elastic.REPLY.encode(answer)
        for latch in self._waiting.pop(worker, ()):
            latch.release()

    def _forget(self, worker: str) -> None:
        self._infos.pop(worker, None)
        self._answers.pop(worker, None)
        self._connected.pop(worker, None)
        self._silent_at.pop(worker, None)
        for client in [client for client, other in self._clients.items() if other == worker]:
            del self._clients[client]

    def _place(self, assignment: Assignment, workers: list[str]) -> None:
        """Reply to these members of an epoch."""
        if self._topology[0] != assignment.epoch:
            self.on_formed(assignment.epoch)
            self._topology = assignment.epoch, messages.pack_topology(self._topology_of(assignment))
        new = [rank for rank, member in enumerate(assignment.members) if member.worker in assignment.fresh]
        for worker in workers:
            rank = assignment.ranks[worker]
            self._answer(worker, elastic.Formed(rank, self._topology[1], assignment.root, assignment.everyone, new))

    def _topology_of(self, assignment: Assignment) -> Topology:
        infos = [self._infos[member.worker] for member in assignment.members]
        numbers = {name: number for number, (name, _) in enumerate(assignment.slots)}
        hosts = []
        for name, _ in assignment.slots:
            here = [info for member, info in zip(assignment.members, infos, strict=True) if member.home == name]
            identities = {info.host_identity for info in here}
            hosts.append(
                Host(
                    name if self.rules.launched else here[0].host_name,
                    # Workers that a launcher put on one host but that disagree about its identity share no memory.
                    identities.pop() if len(identities) == 1 else "",
                    tuple(dict.fromkeys(info.address for info in here)),
                )
            )
        workers = [
            Worker(rank, numbers[member.home], member.local_rank, info.pid, info.address, info.port)
            for rank, (member, info) in enumerate(zip(assignment.members, infos, strict=True))
        ]
        return Topology(assignment.epoch, tuple(hosts), tuple(workers), *control_tree(infos))


def _info(data: dict[str, Any]) -> WorkerInfo:
    try:
        return WorkerInfo.from_dict(data)
    except ValueError as error:
        raise NotAcceptedError(str(error)) from None


def _process(info: WorkerInfo) -> tuple[str, int]:
    return info.host_identity, info.pid


def _alone(worker: str, plan: Assignment) -> elastic.Alone:
    numbers = {name: number for number, (name, _) in enumerate(plan.slots)}
    rank = plan.ranks[worker]
    place = places([(numbers[member.home], member.local_rank) for member in plan.members])[rank]
    return elastic.Alone(rank, plan.size, place.local_rank, place.local_size, place.cross_rank, place.cross_size)
