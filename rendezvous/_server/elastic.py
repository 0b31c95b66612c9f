"""The epochs of an elastic job at the server: the requests of its workers around ``ElasticJob``.

Requests become events, and actions become replies to requests, or news. Actions that only a launcher can carry out
(start and end workers) or wants to know of go to its ``act``. Without a launcher, a worker counts as gone when it has
had no connection for ``LOST_TIME``: its request for news holds one as long as its process lives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hvdgloo.rendezvous._elastic import messages as elastic
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
from hvdgloo.rendezvous._membership.admission import NotAcceptedError, taken
from hvdgloo.rendezvous._membership.assignment import Assignment
from hvdgloo.rendezvous._server.epochs import Epochs, NotYet
from hvdgloo.rendezvous._server.pauses import Steps
from hvdgloo.rendezvous._worker_info import WorkerInfo
from hvdgloo.topology import places

LOST_TIME = 0.5
"""Seconds without any connection after which a worker without a launcher counts as gone."""

SILENT_TIME = 30.0
"""Seconds after the last news within which a worker must ask for news again, or it counts as silent. It asks on a
thread of its own, so only a process that is stopped, or never releases the interpreter's lock, takes longer."""

_LATE = 1.0  # seconds by which a busy machine may wake a thread late
_NEWS = ""  # name under which requests for news wait; no worker has it


class ElasticEpochs(Epochs):
    """The epochs of one elastic job. Thread-safe.

    Args:
        rules: the user's options.
        act: receives each action that is not a reply or news, and each epoch that was formed, in order. It must only
            note it: it is called under the lock, and may not call back.
        hold: seconds in which no epoch is formed, if workers of an earlier server may be in training.
        silent_time: seconds; see ``SILENT_TIME``.
        clock: monotonic seconds.
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
        super().__init__(rules.start_timeout, clock)
        self.rules = rules
        self._act = act
        self._job = ElasticJob(rules, clock(), hold=hold)
        self._infos: dict[str, WorkerInfo] = {}
        self._answers: dict[str, bytes] = {}
        self._clients: dict[str, str] = {}  # client to worker
        self._clients_of: dict[str, set[str]] = {}  # worker to clients
        self._leaving_at: dict[str, float] = {}  # worker to the time at which it counts as gone
        self._silent_time = silent_time
        self._silent_at: dict[str, float] = {}  # worker that got news to the time at which it counts as silent
        self._news = elastic.News(0, 0, 0, -1, "")

    def feed(self, event: Event) -> None:
        """Feed an event from the launcher."""
        with self._lock:
            self._tell(event)

    def ask(self, client: str, ask: elastic.Register, *, timeout: float) -> Steps[bytes | NotYet]:
        """Wait for a worker's next epoch.

        Args:
            client: id of its client.
            ask: the request. A repeated one gets the same reply.
            timeout: seconds to wait here.

        Returns:
            the encoded reply.

        Raises:
            NotAcceptedError: the worker's description of itself cannot be used.
            StoppingError: the server is being stopped.
        """
        info = _info(ask.info)
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
            waiting = self._waiters.wait(ask.worker, timeout)
        yield from waiting
        with self._lock:
            answer = self._answers.pop(ask.worker, None)
            if answer is not None:
                return answer
            self._check_open()
            awaited = self._job.waiting_for
            return NotYet(f"waiting for {awaited}" if awaited else self._job.phase.value)

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
        with self._lock:
            self._check_open()
            self._check_speaker(client, listen.worker)
            self._recall(client, listen.worker, listen.current)
            self._silent_at.pop(listen.worker, None)
            if self._news.number != listen.since:
                return self._tell_news(listen.worker)
            waiting = self._waiters.wait(_NEWS, timeout)
        yield from waiting
        with self._lock:
            self._check_open()
            return self._tell_news(listen.worker)

    def _tell_news(self, worker: str) -> bytes:
        if worker in self._clients_of:  # it has not gone meanwhile
            self._silent_at[worker] = self._clock() + self._silent_time
            self._wake_by(self._silent_at[worker])
        return elastic.NEWS.encode(self._news)

    @property
    def assignment(self) -> Assignment:
        """The newest epoch's members, whether all have registered or not; none before the first one."""
        with self._lock:
            return self._job.assignment

    def status(self) -> dict[str, Any]:
        """Return the job as ``/v1/status`` shows it."""
        with self._lock:
            assignment = self._job.assignment
            job = {
                "phase": self._job.phase.name.lower(),
                "epoch": assignment.epoch,
                "resets": self._job.resets,
                "workers": [
                    {
                        "rank": rank,
                        "worker": member.worker,
                        "host": member.host_name,
                        "local_rank": member.local_rank,
                        "connected": self._is_connected(member.worker),
                    }
                    for rank, member in enumerate(assignment.members)
                    if member.worker
                ],
                "waiting_for": self._job.waiting_for,
            }
            return {"epochs": [], "elastic": job}

    def _replace_ended_job(self, ask: elastic.Register) -> None:
        """Begin another job if this one has ended: its workers may be started again once the old ones are gone."""
        others = any(self._is_connected(worker) for worker in self._clients_of if worker != ask.worker)
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
        if self._is_connected(worker) and client not in self._clients:
            raise NotAcceptedError(f"worker {worker} speaks for itself, by another client", taken=True)

    def _note_client(self, client: str, worker: str, info: WorkerInfo | None, *, is_latest: bool = True) -> None:
        """Bind a client to its worker: no other process may speak for the worker, nor the client for another one."""
        if self._clients.get(client, worker) != worker:
            raise NotAcceptedError(f"this client is worker {self._clients[client]}'s, not {worker}'s", taken=True)
        before = self._infos.get(worker)
        if info is not None:
            if before is not None and self._is_connected(worker) and _process(before) != _process(info):
                raise taken(
                    [before],
                    info,
                    f"worker {worker}",
                    f"there is a worker {worker} already: process {before.pid} on host {before.host_name}. Give "
                    "each process another HVDGLOO_WORKER, or none",
                )
            if before is None or is_latest:
                self._infos[worker] = info
        self._clients[client] = worker
        self._clients_of.setdefault(worker, set()).add(client)
        self._leaving_at.pop(worker, None)

    def _is_connected(self, worker: str) -> bool:
        return not self._connections.keys().isdisjoint(self._clients_of.get(worker, ()))

    def _client_came(self, client: str) -> None:
        self._leaving_at.pop(self._clients.get(client, ""), None)

    def _client_left(self, client: str) -> None:
        worker = self._clients.get(client)
        if worker is not None and not self.rules.launched and not self._is_connected(worker):
            self._leaving_at[worker] = self._clock() + LOST_TIME
            self._wake_by(self._leaving_at[worker])

    def _clock_failed(self, reason: str) -> None:
        super()._clock_failed(reason)
        self._act(Ended(reason, Failing(reason=reason)))

    def _deadline(self) -> float:
        return min(self._job.deadline, *self._leaving_at.values(), *self._silent_at.values(), math.inf)

    def _pass_time(self, now: float) -> None:
        due = self._wakes_at
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
            self._waiters.release(_NEWS)
        if isinstance(event, Gone):
            self._forget(event.worker)
        self._timer.notify()  # its thread computes the deadline, once for many events
        self._note_change()

    def _answer(self, worker: str, answer: elastic.Reply) -> None:
        self._answers[worker] = elastic.REPLY.encode(answer)
        self._waiters.release(worker)

    def _forget(self, worker: str) -> None:
        self._infos.pop(worker, None)
        self._answers.pop(worker, None)
        self._silent_at.pop(worker, None)
        for client in self._clients_of.pop(worker, ()):
            del self._clients[client]

    def _place(self, assignment: Assignment, workers: list[str]) -> None:
        """Reply to these members of an epoch."""
        topology = self._pack(assignment, self._infos)
        new = [rank for rank, member in enumerate(assignment.members) if member.worker in assignment.fresh]
        for worker in workers:
            rank = assignment.ranks[worker]
            self._answer(worker, elastic.Formed(rank, topology, assignment.root, assignment.everyone, new))


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
