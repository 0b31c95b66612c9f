"""A worker that is alone in its epoch and hangs: no other could lose it, so the server sees that it does not listen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from hvdgloo.rendezvous._elastic import messages
from hvdgloo.rendezvous._elastic.events import Action, HostsListed, Rules, Spawn, Stop
from hvdgloo.rendezvous._server.elastic import SILENT_TIME, ElasticEpochs
from hvdgloo.rendezvous._server.pauses import Steps
from tests.support.rendezvous import info, until

T = TypeVar("T")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Job:
    """The epochs of a job with one member, and the requests that workers leave open."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.actions: list[Action] = []
        self.epochs = ElasticEpochs(
            Rules(size=1, smallest=1, failures_per_host=2), act=self.actions.append, clock=self.clock
        )
        self._open: list[Steps[Any]] = []
        self.epochs.start()
        self.epochs.feed(HostsListed((("h1", 1),)))
        self.member = self.spawned()[0]
        self.ask(self.member, 0)
        for what in (messages.Progress.UP, messages.Progress.SYNCED):
            self.epochs.report(self.member, messages.Report(self.member, what, 0, None))
        self.news = messages.NEWS.decode(self.listen(self.member, -1) or b"")

    def spawned(self) -> list[str]:
        return [action.worker for action in self.actions if isinstance(action, Spawn)]

    def stopped(self) -> list[str]:
        return [f"{action.worker}: {action.reason}" for action in self.actions if isinstance(action, Stop)]

    def ask(self, worker: str, slot: int) -> None:
        told = info(pid=slot + 1, port=slot + 1, host_identity="h1", rank=slot).to_dict()
        self.run(self.epochs.ask(worker, messages.Register(worker, -1, True, -1, "", "", [], 0.0, told), timeout=60.0))

    def listen(self, worker: str, since: int) -> bytes | None:
        return self.run(self.epochs.news(worker, messages.Listen(worker, since, None), timeout=40.0))

    def run(self, steps: Steps[T]) -> T | None:
        """The answer, or None if the request waits."""
        try:
            next(steps)
        except StopIteration as end:
            answer: T = end.value
            return answer
        self._open.append(steps)
        return None

    def answered(self) -> bytes:
        """The answer to the request that was left open first, once something has released it."""
        steps = self._open.pop(0)
        try:
            steps.send(True)
        except StopIteration as end:
            return bytes(end.value)
        raise AssertionError("it waits again")

    def a_newcomer_waits(self) -> None:
        self.epochs.feed(HostsListed((("h1", 2),)))
        self.ask(self.spawned()[-1], 1)

    def pass_time(self, seconds: float) -> None:
        """In small steps, as time passes where this process runs."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.5
            with self.epochs._lock:
                self.epochs._timer.notify()
            until(self.epochs_are_idle, "the clock of the job to be at rest")

    def epochs_are_idle(self) -> bool:
        with self.epochs._lock:
            return self.epochs._deadline() > self.clock.now


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    with contextlib.closing(_Closing(made)):
        yield made


class _Closing:
    def __init__(self, job: Job) -> None:
        self._job = job

    def close(self) -> None:
        for steps in self._job._open:
            steps.close()
        self._job.epochs.close("the test is over")


def test_it_is_ended_once_others_wait_for_it(job: Job) -> None:
    job.a_newcomer_waits()
    job.pass_time(SILENT_TIME - 2)
    assert job.stopped() == []
    job.pass_time(4)
    assert job.stopped() == [f"{job.member}: it has not answered for 30 s, and others want to join it"]


def test_a_worker_that_listens_or_is_not_waited_for_goes_on(job: Job) -> None:
    job.pass_time(SILENT_TIME + 2)
    assert job.stopped() == [], "no worker waits for it"
    assert job.listen(job.member, job.news.number) is None
    job.a_newcomer_waits()
    news = messages.NEWS.decode(job.answered())
    job.pass_time(SILENT_TIME - 2)
    assert job.listen(job.member, news.number) is None
    job.pass_time(SILENT_TIME + 2)
    assert job.stopped() == [], "it listens"


def test_a_server_that_did_not_run_itself_accuses_no_worker(job: Job) -> None:
    job.a_newcomer_waits()
    job.clock.now += 10 * SILENT_TIME
    job.pass_time(1)
    assert job.stopped() == []
    job.pass_time(SILENT_TIME + 1)
    assert len(job.stopped()) == 1, "but then it does"
