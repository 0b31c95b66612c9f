"""The rendezvous server of an elastic job, and its workers as clients on threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hvdgloo._net.ports import hold_free_port
from hvdgloo.errors import ConfigError, DismissedError, RendezvousError, RendezvousRefusedError, RendezvousTimeoutError
from hvdgloo.rendezvous import Alone, ElasticClient, RendezvousClient, RendezvousServer
from hvdgloo.rendezvous._elastic.events import Action, Changed, Ended, Gone, HostsListed, Rules, Spawn
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support.elastic_clients import Workers, placed
from tests.support.rendezvous import SECRET, RawClient, Task, info, until

RULES = Rules(size=2, smallest=1, largest=4, launched=False)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES)) as server:
        yield server


@pytest.fixture
def workers(server: RendezvousServer) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(server, stack)


def test_workers_come_go_and_return(workers: Workers) -> None:
    first = workers.place("a", "b")
    assert sorted(placement.rank for placement in first) == [0, 1]
    assert all(placement.fresh and placement.topology == first[0].topology for placement in first)
    assert (first[0].topology.control_fanin, first[0].topology.control_tree_ranks) == (3, 2)
    workers.train("a", "b", epoch=0)
    newcomer = workers.ask("c", ready=False).result(5)
    assert newcomer == Alone(rank=2, size=3, local_rank=0, local_size=1, cross_rank=2, cross_size=3)
    assert workers["a"].news(-1, timeout=0).update == 0

    waiting = workers.ask("c")
    assert workers["a"].news(0, timeout=10).update == 2
    back = [workers.ask("a", 0, serial=4), workers.ask("b", 0, serial=5)]
    second = [placed(task) for task in (*back, waiting)]
    by_name = {host.name: rank for rank, host in enumerate(second[0].topology.hosts)}
    assert [placement.rank for placement in second] == [by_name["pod-a"], by_name["pod-b"], 2]
    assert {(p.topology.epoch, p.root, p.everyone, p.fresh) for p in second} == {(1, by_name["pod-b"], False, False)}
    workers.train("a", "b", "c", epoch=1)
    assert workers["b"].news(-1, timeout=0).update == 0

    workers.die("a")
    started = time.monotonic()
    third = workers.place("b", "c", after=1, serial=6, error="a peer was lost")
    assert time.monotonic() - started < 5
    assert all(placement.everyone and placement.topology.size == 2 for placement in third)


def test_who_repeats_a_question_gets_the_same_answer(workers: Workers) -> None:
    first = workers.place("a", "b")
    assert placed(workers.ask("b")) == first[1]


def test_a_failure_while_connecting_is_news_for_the_others(workers: Workers) -> None:
    workers.place("a", "b")
    number = workers["a"].news(-1, timeout=0).number
    news = Task(lambda: workers["a"].news(number, timeout=10))
    second = workers.ask("b", 0, error="cannot connect")
    told = news.result(10)
    assert told.voided == 0
    assert re.fullmatch(r"rank [01] on host pod-b \(process 2\): cannot connect", told.reason)
    assert placed(workers.ask("a", 0)).topology.epoch == placed(second).topology.epoch == 1


def test_one_that_leaves_is_told_so(workers: Workers) -> None:
    workers.place("a", "b")
    workers.train("a", "b", epoch=0)
    workers["b"].leaving()
    assert workers["a"].news(-1, timeout=10).update == 1
    leaver, stayer = workers.ask("b", 0, serial=1), workers.ask("a", 0, serial=1)
    error = leaver.failure(10)
    assert isinstance(error, DismissedError)
    assert (error.fate, "leaves, as it was asked to end" in str(error)) == ("removed", True)
    assert placed(stayer).topology.size == 1


def test_who_comes_back_after_another_has_finished_is_told_so(workers: Workers) -> None:
    workers.place("a", "b")
    workers.train("a", "b", epoch=0)
    workers["a"].finished()
    error = workers.ask("b", 0, error="a peer was lost").failure(10)
    assert isinstance(error, DismissedError)
    assert (error.fate, "has finished its training" in str(error)) == ("over", True)


def test_a_server_that_is_restarted_while_they_train() -> None:
    with hold_free_port() as hold:
        port = hold.port
    with ExitStack() as stack:
        with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES), port=port) as server:
            workers = Workers(server, stack)
            first = workers.place("a", "b")
            workers.train("a", "b", epoch=0)
        with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES), port=port):
            second = workers.place("a", "b", after=0, serial=3)
    assert {placement.topology.epoch for placement in second} == {1}
    assert all(placement.everyone and not placement.fresh for placement in second)
    assert len(first) == 2


def test_a_worker_waits_no_longer_than_it_wants(workers: Workers) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"within 0\.2 s; waiting for workers: 1 of 2 .* \(h 1\)"):
        workers["a"].next_epoch(-1, info(), ready=True, timeout=0.2)


def test_a_launcher_feeds_what_it_sees_and_does_what_it_is_told() -> None:
    actions: list[Action] = []
    epochs = ElasticEpochs(Rules(size=2, smallest=1, failures_per_host=3), act=actions.append)
    with RendezvousServer(secret=SECRET, elastic=epochs) as server, ExitStack() as stack:
        workers = Workers(server, stack)
        epochs.feed(HostsListed((("h1", 2),)))
        first, second = (action.worker for action in actions if isinstance(action, Spawn))
        placements = workers.place(first, second)
        assert [host.name for host in placements[0].topology.hosts] == ["h1"]
        workers.train(first, second, epoch=0)
        assert isinstance(actions[-1], Changed)
        workers.die(first)
        assert server.status()["elastic"]["phase"] == "running", "the launcher says when a process has ended"
        epochs.feed(Gone(first, -9, "was killed by signal 9 (SIGKILL)"))
        again = actions[-1]
        assert isinstance(again, Spawn)
        assert (again.host, again.slot) == ("h1", 0)
        workers.place(second, after=0, serial=1)
        workers.train(second, epoch=1)
        epochs.feed(Gone(second, 3, "exited with status 3"))
        ended = actions[-1]
        assert isinstance(ended, Ended)
        assert ended.failure is not None
        assert ended.failure.status == 3
        error = workers.ask(again.worker).failure(10)
        assert isinstance(error, DismissedError)
        assert error.fate == "failed"


def test_stop_ends_long_polls_within_a_second() -> None:
    server = RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES)).start()
    with ExitStack() as stack:
        workers = Workers(server, stack)
        tasks = [workers.ask("a"), Task[object](lambda: workers["b"].news(0, timeout=60))]
        until(lambda: server.status()["store"]["waiting_requests"] == 2, "both to wait")
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 1
        for task in tasks:
            assert isinstance(task.failure(25), RendezvousError)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("hvdgloo-rendezvous")]


@pytest.mark.parametrize("path", ["next?timeout=0", "reports"])
def test_what_is_no_question_is_refused(server: RendezvousServer, path: str) -> None:
    raw = RawClient(server.endpoint, server.status()["run"])
    for body in (b"", b"\x80", b"[]", b"\x91" * 10_000):
        status, text = raw.request("POST", f"/v1/elastic/{path}", body)
        assert status == 400, text


def test_a_job_of_fixed_size_has_no_next_epoch() -> None:
    with (
        RendezvousServer(secret=SECRET, size=1) as server,
        RendezvousClient(server.endpoint, SECRET) as client,
        pytest.raises(RendezvousRefusedError, match="this job is not elastic: its workers are fixed"),
    ):
        ElasticClient(client, "a").next_epoch(-1, info(), ready=True, timeout=5)


def test_the_workers_of_an_elastic_job_are_not_fixed() -> None:
    with pytest.raises(ConfigError, match="not fixed by size or hosts"):
        RendezvousServer(secret=SECRET, size=2, elastic=ElasticEpochs(RULES))
