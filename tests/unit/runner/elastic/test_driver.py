"""The driver of an elastic job, with hosts and workers that are no more than the test says."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest

from hvdgloo.rendezvous import RendezvousServer
from hvdgloo.rendezvous._elastic.assignment import Assignment
from hvdgloo.rendezvous._elastic.events import Ended, Rules, Spawn
from hvdgloo.runner.elastic.discovery import DiscoveryError, FixedHosts, HostDiscoveryScript
from hvdgloo.runner.elastic.driver import ElasticDriver
from tests.support.elastic_clients import Workers
from tests.support.rendezvous import SECRET, Task, until


class Starter:
    """Starts nothing, and remembers what it was asked for."""

    def __init__(self, unusable: str = "") -> None:
        self.started: list[Spawn] = []
        self.stopped: dict[str, str] = {}
        self.asked_about: list[str] = []
        self.told: list[str] = []
        self.left_out_hosts: list[str] = []
        self.over = False
        self.lose: Callable[[str, str], None] = lambda host, reason: None
        self.actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.tell = self.told.append
        self.left_out = self.left_out_hosts.append
        self.soon = self.actions.put
        self._unusable = unusable

    def listed(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        self.asked_about += [name for name, slots in hosts if slots is None]

    def placed(self, assignment: Assignment) -> None:
        pass

    def start_worker(self, spawn: Spawn) -> None:
        if spawn.host == self._unusable:
            self.lose(spawn.host, f"host {spawn.host} has no Python")
        else:
            self.started.append(spawn)

    def stop_worker(self, worker: str, reason: str) -> None:
        self.stopped[worker] = reason

    def finish(self, ended: Ended) -> None:
        self.over = True

    def ids(self, number: int) -> list[str]:
        """Return the workers, once so many were started."""
        until(lambda: len(self.started) >= number, f"{number} workers to be started")
        return [spawn.worker for spawn in self.started]


class Job:
    """A driver whose starter has a loop on a thread of its own, and its rendezvous server."""

    def __init__(self, driver: ElasticDriver, workers: Workers, starter: Starter) -> None:
        self.driver = driver
        self.workers = workers
        self.told = starter.told
        self.left_out = starter.left_out_hosts
        self._starter = starter
        self._loop = Task(self._turn)

    def _turn(self) -> None:
        while not self._starter.over:
            try:
                self._starter.actions.get(timeout=0.005)()
            except queue.Empty:
                self.driver.keep_time(time.monotonic())

    def close(self) -> None:
        self._starter.over = True
        self._loop.result(10)

    def result(self) -> Ended:
        """Return how it has ended."""
        self._loop.result(10)
        assert self.driver.ended is not None
        return self.driver.ended


@contextmanager
def job(rules: Rules, hosts: object, starter: Starter, **options: float) -> Iterator[Job]:
    driver = ElasticDriver(rules, hosts, starter, **({"interval": 0.01} | options))  # type: ignore[arg-type]
    starter.lose = driver.host_lost
    with (
        driver,
        RendezvousServer(secret=SECRET, elastic=driver.epochs) as server,
        ExitStack() as stack,
        closing(Job(driver, Workers(server.endpoint, stack), starter)) as made,
    ):
        yield made


def test_a_worker_fails_is_started_again_and_all_finish() -> None:
    starter = Starter()
    with job(Rules(size=2, smallest=1, failures_per_host=2), FixedHosts({"h1": 2}), starter) as it:
        first, second = starter.ids(2)
        assert [(s.host, s.slot, s.plan.ranks[s.worker], s.plan.size) for s in starter.started] == [
            ("h1", 0, 0, 2),
            ("h1", 1, 1, 2),
        ]
        it.workers.place(first, second)
        it.workers.train(first, second, epoch=0)
        it.driver.exited(first, -9, "was killed by signal 9 (SIGKILL)")
        third = starter.ids(3)[2]
        assert starter.started[2].slot == 0
        it.workers.place(second, after=0, serial=1)
        it.workers.train(second, epoch=1)
        joining = it.workers.ask(third)
        assert it.workers[second].news(0, timeout=10).update == 2
        it.workers.place(second, after=1, serial=2)
        joining.result(10)
        it.workers.train(second, third, epoch=2)
        for worker in (second, third):
            it.workers[worker].finished()
            it.driver.exited(worker, 0, "has ended")
        assert it.result().failure is None
        changes = it.driver.changes
    assert [change.assignment.size for _, change in changes] == [2, 1, 2]
    assert changes == sorted(changes, key=lambda timed: timed[0])
    assert changes[1][1].why == "rank 0 on host h1 (process 2) was killed by signal 9 (SIGKILL)"
    assert [line.partition("; ")[0] for line in it.told] == [
        "rank 0 on host h1 (process 2) was killed by signal 9 (SIGKILL)",
        "a new worker was ready",
    ]


def test_an_assignment_is_known_before_its_members_are_told_their_ranks() -> None:
    """Output that they write from then on must not have their previous rank."""
    happened: list[int] = []
    starter = Starter()

    def placed(assignment: Assignment) -> None:
        assert not driver.epochs._answers
        happened.append(assignment.epoch)

    starter.placed = placed  # type: ignore[method-assign]
    driver = ElasticDriver(Rules(size=1, smallest=1), FixedHosts({"h1": 1}), starter, interval=60.0)
    with driver, RendezvousServer(secret=SECRET, elastic=driver.epochs) as server, ExitStack() as stack:
        starter.actions.get(timeout=10)()  # nothing else that the job decides is done, so nothing else can be in time
        (worker,) = starter.ids(1)
        Workers(server.endpoint, stack).place(worker)
        assert happened == [0]


def test_hosts_come_and_go() -> None:
    starter, hosts = Starter(), FixedHosts({"h1": 1})
    with job(Rules(size=1, smallest=1), hosts, starter) as it:
        (first,) = starter.ids(1)
        it.workers.place(first)
        it.workers.train(first, epoch=0)
        hosts.set({"h1": 1, "h2": 1})
        second = starter.ids(2)[1]
        assert starter.started[1].host == "h2"
        hosts.set({"h1": 1})
        until(lambda: second in starter.stopped, "the newcomer to be stopped")
        assert starter.stopped[second] == "host h2 was removed"
        it.driver.exited(first, 0, "has ended")
        assert it.result().failure is None


def test_nothing_is_started_if_hosts_cannot_be_discovered() -> None:
    class Broken:
        def find_available_hosts_and_slots(self) -> Mapping[str, int]:
            raise KeyError("pods")

    starter = Starter()
    with (
        pytest.raises(DiscoveryError, match="KeyError: 'pods'"),
        job(Rules(size=1, smallest=1), Broken(), starter),
    ):
        pass
    assert starter.started == []
    assert not any(thread.name == "hvdgloo-discovery" for thread in threading.enumerate())


def test_a_script_that_hangs_ends_with_the_job(tmp_path: Path) -> None:
    script, pid = tmp_path / "hosts.sh", tmp_path / "pid"
    again = f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 1000"
    script.write_text(f"#!/bin/sh\n[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; echo h1; exit; }}\n{again}\n")
    script.chmod(0o755)
    with job(Rules(size=1, smallest=1), HostDiscoveryScript(str(script)), Starter()) as it:
        until(pid.exists, "the script to hang")
    until(lambda: not psutil.pid_exists(int(pid.read_text())), "the script to be ended", 2)
    assert it.told == [], "that it was ended is no trouble"


def test_a_host_that_cannot_be_used_is_left_out() -> None:
    starter = Starter(unusable="h2")
    with job(Rules(size=2, smallest=1), FixedHosts({"h1": 1, "h2": 1, "h3": 1}), starter) as it:
        ids = starter.ids(2)
        it.workers.place(*ids)
        assert {spawn.host for spawn in starter.started} == {"h1", "h3"}
        until(lambda: it.told, "a line for the user")
    assert it.told == ["host h2 is left out: host h2 has no Python"]
    until(lambda: it.left_out, "those who look at the job to be told")
    assert it.left_out == ["h2"]


def test_a_discovery_that_hangs_is_told_and_the_job_goes_on() -> None:
    release = threading.Event()

    class Hanging(FixedHosts):
        asked = 0

        def find_available_hosts_and_slots(self) -> dict[str, int]:
            self.asked += 1
            if self.asked > 1:
                release.wait(20)
            return super().find_available_hosts_and_slots()

    starter = Starter()
    with job(Rules(size=1, smallest=1), Hanging({"h1": 1}), starter, hang_time=0.05) as it:
        (only,) = starter.ids(1)
        until(lambda: it.told, "a line for the user")
        it.driver.exited(only, 0, "has ended")
        assert it.result().failure is None
        release.set()
    assert len(it.told) == 1
    assert it.told[0].startswith("host discovery has not answered for 0 s. The job goes on")


def test_the_end_of_a_job_ends_what_still_runs() -> None:
    starter = Starter()
    with job(Rules(size=2, smallest=2), FixedHosts({"h1": 1, "h2": 1}), starter) as it:
        first, second = starter.ids(2)
        it.driver.host_lost("h1", "has been silent for 5 s")
        it.driver.host_lost("h2", "has been silent for 5 s")
        failure = it.result().failure
    assert failure is not None
    assert failure.reason == "host h2 could not be used: has been silent for 5 s"
    assert starter.stopped == {first: "the job is over", second: "the job is over"}


def test_hosts_without_slots_are_used_once_it_is_known_how_many_they_have() -> None:
    starter, hosts = Starter(), FixedHosts({"h1": None, "h2": 1})
    with job(Rules(size=2, smallest=1), hosts, starter) as it:
        assert starter.asked_about == ["h1"]
        assert starter.started == []  # nor is h2 used yet: the job starts on all the slots that there are
        it.driver.slots_found("h1", 2)
        starter.ids(3)
        assert sorted((s.host, s.slot) for s in starter.started) == [("h1", 0), ("h1", 1), ("h2", 0)]


def test_a_host_whose_slots_cannot_be_found_out_is_left_out() -> None:
    starter = Starter()
    rules = Rules(size=1, smallest=1, hosts_may_come=False)
    with job(rules, FixedHosts({"h1": None, "h2": 1}), starter) as it:
        it.driver.host_lost("h1", "ssh is refused")
        starter.ids(1)
        assert [spawn.host for spawn in starter.started] == ["h2"]
        until(lambda: it.told, "a line for the user")
    assert it.told == ["host h1 is left out: ssh is refused"]
