"""The waits, the clock and the answers around the epochs of both kinds of jobs, by a clock that only the test moves."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._elastic import messages as elastic
from hvdgloo.rendezvous._elastic.events import Action, Ended, Rules
from hvdgloo.rendezvous._server.elastic import LOST_TIME, ElasticEpochs
from hvdgloo.rendezvous._server.epochs import EpochFailedError, NotYet, StoppingError
from hvdgloo.rendezvous._server.fixed import FixedEpochs
from hvdgloo.rendezvous._server.pauses import Steps
from tests.support.rendezvous import info, until


class Request:
    """A request that is answered at once, or waits."""

    def __init__(self, steps: Steps[Any]) -> None:
        self._steps = steps
        self._answer: Any = None
        self._pause = None
        try:
            self._pause = next(steps)
        except StopIteration as end:
            self._answer = end.value

    def answer(self, timeout: float = 5.0) -> Any:
        """The answer, once the request was released or ``timeout`` has passed."""
        if self._pause is not None:
            try:
                self._steps.send(self._pause.latch.wait(timeout))
            except StopIteration as end:
                self._answer, self._pause = end.value, None
        return self._answer


class Job:
    """A job of a few workers, each of which waits for others for at most 10 seconds."""

    def __init__(self, kind: str, size: int = 2) -> None:
        self.now = 1000.0
        self.actions: list[Action] = []
        self.broken = False
        if kind == "fixed":
            self.epochs: Any = FixedEpochs(10.0, size=size, clock=self.clock)
        else:
            rules = Rules(size=size, smallest=1, elastic_timeout=10.0, launched=False)
            self.epochs = ElasticEpochs(rules, act=self.actions.append, clock=self.clock)

    def clock(self) -> float:
        if self.broken and threading.current_thread().name == "hvdgloo-rendezvous-clock":
            raise OSError("no time")
        return self.now

    def asks(self, worker: str, timeout: float = 20.0) -> Request:
        told = info(host_identity=worker)
        if isinstance(self.epochs, FixedEpochs):
            return Request(self.epochs.register(worker, told, timeout=timeout))
        question = elastic.Register(worker, -1, False, -1, "", "", [], 0.0, told.to_dict())
        return Request(self.epochs.ask(worker, question, timeout=timeout))

    def rank(self, answer: bytes) -> tuple[int, bytes]:
        """A worker's rank, and the packed topology."""
        if isinstance(self.epochs, FixedEpochs):
            rank, topology = messages.unpack_placed(answer)
            return rank, messages.pack_topology(topology)
        formed = elastic.REPLY.decode(answer)
        assert isinstance(formed, elastic.Formed)
        return formed.rank, formed.topology

    def summary(self) -> str:
        """Text for people about the workers that wait for others."""
        status = self.epochs.status()
        return str(status["elastic"]["waiting_for"] if "elastic" in status else status["epochs"][0]["summary"])

    def present(self) -> int:
        """Number of workers that wait for the other one."""
        found = re.search(r"(\d) of 2 workers are", self.summary())
        assert found is not None, self.summary()
        return int(found[1])

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.look_at_the_clock()
        until(self._nothing_is_due, "the clock's thread to have seen it")

    def _nothing_is_due(self) -> bool:
        with self.epochs._lock:
            return bool(self.epochs._deadline() > self.now)

    def look_at_the_clock(self) -> None:
        with self.epochs._lock:
            self.epochs._timer.notify()


@pytest.fixture(params=["fixed", "elastic"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(request.param)
    made.epochs.start()
    yield made
    made.epochs.close("the test is over")


def test_all_get_their_ranks_and_one_topology_when_the_last_one_registers(job: Job) -> None:
    waiting = job.asks("a")
    answers = [job.rank(request.answer()) for request in (job.asks("b"), waiting)]
    assert [rank for rank, _ in answers] == [1, 0]
    assert len({topology for _, topology in answers}) == 1


def test_a_worker_that_repeats_its_request_gets_the_same_answer(job: Job) -> None:
    waiting, last = job.asks("a"), job.asks("b")
    for worker, answer in (("a", waiting.answer()), ("b", last.answer())):
        assert job.asks(worker).answer() == answer


def test_a_worker_waits_no_longer_than_it_wants(job: Job) -> None:
    answer = job.asks("a").answer(timeout=0)
    assert isinstance(answer, NotYet)
    assert "1 of 2 workers are" in answer.reason
    assert not job.epochs._waiters, "nothing is kept of its request"


def test_all_that_wait_learn_that_the_server_is_stopped(job: Job) -> None:
    waiting = [job.asks("a") for _ in range(3)]
    if isinstance(job.epochs, ElasticEpochs):
        waiting.append(Request(job.epochs.news("a", elastic.Listen("a", 0, None), timeout=20.0)))
    job.epochs.close("it is being stopped")
    for request in waiting:
        with pytest.raises(StoppingError, match="it is being stopped"):
            request.answer()
    with pytest.raises(StoppingError, match="it is being stopped"):
        job.asks("b")


def test_those_that_wait_learn_at_the_deadline_that_one_is_missing(job: Job) -> None:
    waiting = job.asks("a")
    job.now += 10
    job.look_at_the_clock()
    if isinstance(job.epochs, FixedEpochs):
        with pytest.raises(EpochFailedError, match="no further worker came for 10 s, and 1 of 2 workers are in"):
            waiting.answer()
    else:
        told = elastic.REPLY.decode(waiting.answer())
        assert isinstance(told, elastic.Dismissed)
        assert told.reason == "1 of 2 workers are ready (h 1) after 10 s (--elastic-timeout)"


def test_a_clock_that_fails_ends_all_waits_and_the_job(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    waiting = job.asks("a")
    job.broken = True
    job.look_at_the_clock()
    with pytest.raises(StoppingError, match=r"has failed.*no time"):
        waiting.answer()
    assert "the clock of the rendezvous server" in caplog.text
    if isinstance(job.epochs, FixedEpochs):
        assert "no time" in job.epochs.last_failure, "the launcher learns it, too"
    else:
        ended = job.actions[-1]
        assert isinstance(ended, Ended)
        assert ended.failure is not None
        assert "no time" in ended.text


def test_a_worker_is_present_until_its_last_connection_ends(job: Job) -> None:
    for _ in range(2):
        job.epochs.connected("a")
    job.asks("a")
    job.epochs.disconnected("a")
    job.pass_time(LOST_TIME)
    assert job.present() == 1
    job.epochs.disconnected("a")
    job.pass_time(LOST_TIME)
    assert job.present() == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("fixed", "2 of 3 workers are in (hosts: h [aaaaaa] 1, h [bbbbbb] 1)"),
        ("elastic", "workers: 2 of 3 workers are ready (h [aaaaaa] 1, h [bbbbbb] 1)"),
    ],
)
def test_hosts_of_one_name_are_told_apart(kind: str, expected: str) -> None:
    job = Job(kind, 3)
    for worker in ("aaaaaaaa", "bbbbbbbb"):
        job.asks(worker)
    assert job.summary() == expected


def test_a_deadline_that_moves_away_does_not_wake_the_clock_s_thread() -> None:
    job = Job("fixed", 100)
    job.epochs.start()
    try:
        job.asks("worker 0")
        until(lambda: job.epochs._wakes_at == 1010.0, "the clock's thread to wait for the first deadline")
        for number in range(1, 50):
            job.now += 1
            job.asks(f"worker {number}")
        assert job.epochs._wakes_at == 1010.0
        assert job.epochs._deadline() == 1059.0
    finally:
        job.epochs.close("the test is over")


def test_without_a_launcher_the_next_attempt_starts_afresh() -> None:
    job = Job("fixed")
    too_early = job.asks("too early")
    job.now += 10
    assert isinstance(job.asks("a", 0).answer(0), NotYet)
    assert "no further worker came for 10 s, and 1 of 2 workers are in" in job.epochs.last_failure
    with pytest.raises(EpochFailedError, match="1 of 2 workers are in"):
        too_early.answer()
    assert job.rank(job.asks("b").answer())[0] == 1


def test_with_a_launcher_it_has_failed_for_good() -> None:
    job = Job("fixed")
    job.epochs = FixedEpochs(10.0, hosts=[("h", 2)], clock=job.clock)
    Request(job.epochs.register("a", info(rank=0), timeout=1.0))
    job.now += 10
    for client, rank in (("b", 1), ("a", 0)):
        with pytest.raises(EpochFailedError, match="missing: rank 1"):
            Request(job.epochs.register(client, info(rank=rank), timeout=1.0))


def test_a_worker_without_connections_leaves_its_place_and_the_time_starts_with_the_next_one() -> None:
    job = Job("fixed")
    job.asks("goes away")
    assert job.epochs._deadline() == 1010.0
    job.epochs.disconnected("goes away")
    assert job.epochs._deadline() == math.inf
    assert job.epochs.status()["epochs"][0]["arrived"] == 0
