"""The actions of an elastic job and their consequences, with hosts and workers that are no more than the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any, cast

from hvdgloo.rendezvous import RendezvousServer
from hvdgloo.rendezvous._elastic.events import Action, Ended, Formed, Gone, Rules, Spawn
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.runner.elastic.discovery import FixedHosts
from hvdgloo.runner.elastic.host_polling import HostPolling
from hvdgloo.runner.elastic_launch import ElasticJob
from hvdgloo.runner.job.spec import ElasticSpec, LaunchSpec
from hvdgloo.runner.supervise.supervisor import Supervisor
from tests.support.elastic_clients import Workers
from tests.support.rendezvous import SECRET, until
from tests.support.threads import Task
from tests.unit.runner.test_elastic_launch import Nothing


class Recorder(ElasticJob):
    """Starts nothing, and remembers what it was asked for."""

    def __init__(self, unusable: str = "") -> None:
        self.started: list[Spawn] = []
        self.stopped: dict[str, str] = {}
        self.asked_about: list[str] = []
        self.told: list[str] = []
        self.left_out: list[str] = []
        self._unusable = unusable
        spec, nothing = LaunchSpec(("true",), (), None, "/", {}, SECRET), cast(Any, Nothing())
        around = SimpleNamespace(spawner=nothing, signals=())
        super().__init__(spec, ElasticSpec(Rules(size=1, smallest=1), FixedHosts({})), cast(Any, around))
        self.on_start = lambda: None
        observer = SimpleNamespace(news=self.told.append, notice=lambda text: None, suspend=None)
        self.supervisor = Supervisor(spec, nothing, [], cast(Any, observer), self)
        self.supervisor.job_observers = cast(
            Any, SimpleNamespace(host=lambda name, state: self.left_out.append(name), placed=lambda *_: None)
        )

    def _come(self, name: str) -> None:
        self.asked_about.append(name)

    def start_worker(self, spawn: Spawn) -> None:
        if spawn.host == self._unusable:
            self._feed_lost(spawn.host, f"host {spawn.host} has no Python")
            return
        number = self.workers[spawn.worker] = len(self._ids)
        self._ids[number] = spawn.worker
        self.supervisor.policy.started(number)
        self.started.append(spawn)

    def stop_worker(self, worker: str, reason: str) -> None:
        self.stopped[worker] = reason

    def exited(self, worker: str, status: int, reason: str) -> None:
        """A worker has ended."""
        self.supervisor.policy.gone([self.workers[worker]])
        self.feed(Gone(worker, status, reason))

    def ids(self, number: int) -> list[str]:
        """Return the workers, once so many were started."""
        until(lambda: len(self.started) >= number, f"{number} workers to be started")
        return [spawn.worker for spawn in self.started]


class Job:
    """An elastic job, whose loop runs on a thread of its own, and the workers of its rendezvous server."""

    def __init__(self, elastic: Recorder, workers: Workers) -> None:
        self.workers = workers
        self._elastic = elastic
        self._over = False
        self._loop = Task(self._turn)

    def _turn(self) -> None:
        while not self._over and self._elastic.end is None:
            self._elastic.supervisor.loop.turn(time.monotonic() + 0.005)
            self._elastic.on_turn(time.monotonic())

    def close(self) -> None:
        self._over = True
        self._loop.result(10)
        self._elastic.supervisor.loop.close()

    def result(self) -> Ended:
        """Return how it has ended."""
        self._loop.result(10)
        assert self._elastic.end is not None
        return self._elastic.end


@contextmanager
def job(rules: Rules, hosts: object, elastic: Recorder, **options: float) -> Iterator[Job]:
    epochs = ElasticEpochs(rules, act=elastic.act)
    elastic.feed = epochs.feed
    polling = HostPolling(
        hosts,  # type: ignore[arg-type]
        elastic.listed,
        elastic.tell_soon,
        **({"interval": 0.01} | options),
    )
    elastic.on_turn = polling.keep_time
    with (
        polling,
        RendezvousServer(secret=SECRET, elastic=epochs) as server,
        ExitStack() as stack,
        closing(Job(elastic, Workers(server.endpoint, stack))) as made,
    ):
        yield made


def test_a_worker_fails_is_started_again_and_all_finish() -> None:
    elastic = Recorder()
    with job(Rules(size=2, smallest=1, failures_per_host=2), FixedHosts({"h1": 2}), elastic) as it:
        first, second = elastic.ids(2)
        assert [(s.host, s.slot, s.plan.ranks[s.worker], s.plan.size) for s in elastic.started] == [
            ("h1", 0, 0, 2),
            ("h1", 1, 1, 2),
        ]
        it.workers.place(first, second)
        it.workers.train(first, second, epoch=0)
        elastic.exited(first, -9, "was killed by signal 9 (SIGKILL)")
        third = elastic.ids(3)[2]
        assert elastic.started[2].slot == 0
        it.workers.place(second, after=0, serial=1)
        it.workers.train(second, epoch=1)
        joining = it.workers.ask(third)
        assert it.workers[second].news(0, timeout=10).update == 2
        it.workers.place(second, after=1, serial=2)
        joining.result(10)
        it.workers.train(second, third, epoch=2)
        for worker in (second, third):
            it.workers[worker].finished()
            elastic.exited(worker, 0, "has ended")
        assert it.result().failure is None
        changes = elastic.changes
    assert [change.assignment.size for _, change in changes] == [2, 1, 2]
    assert changes == sorted(changes, key=lambda timed: timed[0])
    assert changes[1][1].why == "rank 0 on host h1 (process 2) was killed by signal 9 (SIGKILL)"
    assert [line.partition("; ")[0] for line in elastic.told] == [
        "rank 0 on host h1 (process 2) was killed by signal 9 (SIGKILL)",
        "a new worker was ready",
    ]


def test_an_assignment_is_known_before_its_members_are_told_their_ranks() -> None:
    """Output that they write from then on must not have their previous rank."""
    happened: list[int] = []

    class Cautious(Recorder):
        def act(self, action: Action) -> None:
            super().act(action)
            if isinstance(action, Formed):
                assert not epochs._answers
                assert self.supervisor.loop._urgent
                happened.append(action.assignment.epoch)

    elastic = Cautious()
    epochs = ElasticEpochs(Rules(size=1, smallest=1), act=elastic.act)
    elastic.feed = epochs.feed
    elastic.listed([("h1", 1)])
    with (
        closing(elastic.supervisor.loop),
        RendezvousServer(secret=SECRET, elastic=epochs) as server,
        ExitStack() as stack,
    ):
        elastic.supervisor.loop.turn(
            time.monotonic()
        )  # nothing else that the job decides is done, so nothing else is in time
        (worker,) = elastic.ids(1)
        Workers(server.endpoint, stack).place(worker)
        assert happened == [0]


def test_hosts_come_and_go() -> None:
    elastic, hosts = Recorder(), FixedHosts({"h1": 1})
    with job(Rules(size=1, smallest=1), hosts, elastic) as it:
        (first,) = elastic.ids(1)
        it.workers.place(first)
        it.workers.train(first, epoch=0)
        hosts.set({"h1": 1, "h2": 1})
        second = elastic.ids(2)[1]
        assert elastic.started[1].host == "h2"
        hosts.set({"h1": 1})
        until(lambda: second in elastic.stopped, "the newcomer to be stopped")
        assert elastic.stopped[second] == "host h2 was removed"
        elastic.exited(first, 0, "has ended")
        assert it.result().failure is None


def test_a_host_that_cannot_be_used_is_left_out() -> None:
    elastic = Recorder(unusable="h2")
    with job(Rules(size=2, smallest=1), FixedHosts({"h1": 1, "h2": 1, "h3": 1}), elastic) as it:
        ids = elastic.ids(2)
        it.workers.place(*ids)
        assert {spawn.host for spawn in elastic.started} == {"h1", "h3"}
        until(lambda: elastic.told, "a line for the user")
    assert elastic.told == ["host h2 is left out: host h2 has no Python"]
    until(lambda: elastic.left_out, "those who look at the job to be told")
    assert elastic.left_out == ["h2"]


def test_a_discovery_that_hangs_is_told_and_the_job_goes_on() -> None:
    release = threading.Event()

    class Hanging(FixedHosts):
        asked = 0

        def find_available_hosts_and_slots(self) -> dict[str, int]:
            self.asked += 1
            if self.asked > 1:
                release.wait(20)
            return super().find_available_hosts_and_slots()

    elastic = Recorder()
    with job(Rules(size=1, smallest=1), Hanging({"h1": 1}), elastic, hang_time=0.05) as it:
        (only,) = elastic.ids(1)
        until(lambda: elastic.told, "a line for the user")
        elastic.exited(only, 0, "has ended")
        assert it.result().failure is None
        release.set()
    assert len(elastic.told) == 1
    assert elastic.told[0].startswith("host discovery has not answered for 0 s. The job goes on")


def test_the_end_of_a_job_ends_what_still_runs() -> None:
    elastic = Recorder()
    with job(Rules(size=2, smallest=2), FixedHosts({"h1": 1, "h2": 1}), elastic) as it:
        first, second = elastic.ids(2)
        elastic._feed_lost("h1", "has been silent for 5 s")
        elastic._feed_lost("h2", "has been silent for 5 s")
        failure = it.result().failure
    assert failure is not None
    assert failure.reason == "host h2 could not be used: has been silent for 5 s"
    assert elastic.stopped == {first: "the job is over", second: "the job is over"}


def test_hosts_without_slots_are_used_once_it_is_known_how_many_they_have() -> None:
    elastic, hosts = Recorder(), FixedHosts({"h1": None, "h2": 1})
    with job(Rules(size=2, smallest=1), hosts, elastic):
        until(lambda: elastic.asked_about, "the agent of h1 to be started")
        assert elastic.asked_about == ["h1"]
        assert elastic.started == []  # nor is h2 used yet: the job starts on all the slots that there are
        elastic._note_slots("h1", 2)
        elastic.ids(3)
        assert sorted((s.host, s.slot) for s in elastic.started) == [("h1", 0), ("h1", 1), ("h2", 0)]


def test_a_host_whose_slots_cannot_be_found_out_is_left_out() -> None:
    elastic = Recorder()
    rules = Rules(size=1, smallest=1, hosts_may_come=False)
    with job(rules, FixedHosts({"h1": None, "h2": 1}), elastic):
        until(lambda: elastic.asked_about, "the agent of h1 to be started")
        elastic._feed_lost("h1", "ssh is refused")
        elastic.ids(1)
        assert [spawn.host for spawn in elastic.started] == ["h2"]
        until(lambda: elastic.told, "a line for the user")
    assert elastic.told == ["host h1 is left out: ssh is refused"]
