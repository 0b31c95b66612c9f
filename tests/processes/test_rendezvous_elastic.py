"""The rendezvous server of an elastic job, and its workers as clients on threads."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from hvdgloo._net.ports import hold_free_port
from hvdgloo.errors import ConfigError, DismissedError, RendezvousError, RendezvousRefusedError, RendezvousTimeoutError
from hvdgloo.rendezvous import Alone, ElasticClient, RendezvousClient, RendezvousServer
from hvdgloo.rendezvous._elastic import messages as elastic
from hvdgloo.rendezvous._elastic.events import Action, Changed, Ended, Gone, HostsListed, Rules, Spawn
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support.elastic_clients import Workers, placed
from tests.support.rendezvous import SECRET, RawClient, info, until
from tests.support.threads import Task

RULES = Rules(size=2, smallest=1, largest=4, launched=False)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES)) as server:
        yield server


@pytest.fixture
def workers(server: RendezvousServer) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(server.endpoint, stack)


@pytest.fixture
def port() -> int:
    """Return a port where a server can listen, and another one after it."""
    with hold_free_port() as hold:
        return hold.port


def listen(server: RendezvousServer, workers: Workers, *ids: str) -> list[Task[elastic.News]]:
    """They wait for news, of which there has been none."""
    tasks = [Task(lambda id=id: workers[id].news(0, timeout=60)) for id in ids]
    until(lambda: server.status()["store"]["waiting_requests"] == len(ids), "all to listen")
    return tasks


@contextmanager
def training(port: int, stack: ExitStack) -> Iterator[tuple[RendezvousServer, Workers]]:
    """A server, and workers a and b, which are in training and outlive it."""
    with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES), port=port) as server:
        workers = Workers(server.endpoint, stack)
        workers.place("a", "b")
        workers.train("a", "b", epoch=0)
        yield server, workers


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


def test_a_failure_while_connecting_is_news_for_the_others(workers: Workers) -> None:
    workers.place("a", "b")
    number = workers["a"].news(-1, timeout=0).number
    news = Task(lambda: workers["a"].news(number, timeout=10))
    second = workers.ask("b", 0, error="cannot connect")
    told = news.result(10)
    assert told.voided == 0
    assert re.fullmatch(r"rank [01] on host pod-b \(process 2\): cannot connect", told.reason)
    assert placed(workers.ask("a", 0)).topology.epoch == placed(second).topology.epoch == 1


def test_a_question_for_news_that_was_overtaken_does_not_say_where_a_worker_is(workers: Workers) -> None:
    """After an epoch is voided, each worker asks for news once more and for the next epoch, at the same time. It
    listens at another port then, and others that tried the old one could not connect: one more useless epoch, of three.
    """
    workers.place("a", "b")
    asking, place = workers["b"], workers["b"]._current
    question = elastic.LISTEN.encode(elastic.Listen("b", -1, place))
    second = workers.ask("b", 0, error="cannot connect", port=8)
    assert workers["a"].news(0, timeout=10).voided == 0
    asking._wait("/v1/elastic/news", question, 0.0)
    ports = {worker.port for worker in placed(workers.ask("a", 0, port=9)).topology.workers}
    assert ports == {worker.port for worker in placed(second).topology.workers} == {8, 9}


def test_one_that_leaves_is_told_so(workers: Workers) -> None:
    workers.place("a", "b")
    workers.train("a", "b", epoch=0)
    workers["b"].leaving()
    assert workers["a"].news(-1, timeout=10).update == 1
    leaver, stayer = workers.ask("b", 0, serial=1), workers.ask("a", 0, serial=1)
    error = leaver.failure(10)
    assert isinstance(error, DismissedError)
    assert error.fate == "removed"
    assert re.match(r"rank [01] on host pod-b \(process 2\) leaves", str(error))
    assert placed(stayer).topology.size == 1


def test_who_comes_back_after_another_has_finished_is_told_so(workers: Workers) -> None:
    workers.place("a", "b")
    workers.train("a", "b", epoch=0)
    workers["a"].finished()
    error = workers.ask("b", 0, error="a peer was lost").failure(10)
    assert isinstance(error, DismissedError)
    assert (error.fate, "has finished its training" in str(error)) == ("over", True)


def test_a_server_that_is_restarted_while_they_train(port: int) -> None:
    with ExitStack() as stack:
        with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES), port=port) as server:
            workers = Workers(server.endpoint, stack)
            first = workers.place("a", "b")
            workers.train("a", "b", epoch=0)
        with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES), port=port):
            second = workers.place("a", "b", after=0, serial=3)
    assert {placement.topology.epoch for placement in second} == {1}
    assert all(placement.everyone and not placement.fresh for placement in second)
    assert len(first) == 2


def test_a_server_that_is_restarted_hears_of_those_in_training_before_it_forms_anything(port: int) -> None:
    """Newcomers that would be enough for a job of their own join the one that there is: no split brain."""
    with ExitStack() as stack:
        with training(port, stack) as (server, workers):
            listening = listen(server, workers, "a", "b")
        epochs = ElasticEpochs(RULES, hold=20.0)
        with RendezvousServer(secret=SECRET, elastic=epochs, port=port) as server:
            newcomers = [workers.ask(id, ready=False) for id in ("c", "d")]
            assert all(isinstance(task.result(15), Alone) for task in newcomers)
            until(lambda: len(server.status()["elastic"]["workers"]) == 2, "both to have been heard of")
            assert server.status()["elastic"]["phase"] == "running"
            assert {row["host"] for row in server.status()["elastic"]["workers"]} == {"pod-a", "pod-b"}
            ready = [workers.ask(id) for id in ("c", "d")]
            assert all(task.result(15).update == 2 for task in listening)
            back = [workers.ask(id, 0, serial=3) for id in ("a", "b")]
            placements = [placed(task) for task in (*back, *ready)]
            assert {(p.topology.epoch, p.topology.size) for p in placements} == {(1, 4)}


def test_a_server_that_is_restarted_hears_of_the_epoch_that_has_just_been_formed(port: int) -> None:
    """Those who train listened while the last one was under way, and nothing was new since."""
    with ExitStack() as stack:
        with training(port, stack) as (server, workers):
            listen(server, workers, "a", "b")
            workers.place("a", "b", after=0, serial=3)
        with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES, hold=20.0), port=port) as server:
            until(lambda: len(server.status()["elastic"]["workers"]) == 2, "both to have been heard of")
            assert server.status()["elastic"]["epoch"] == 1


def test_what_is_reported_survives_a_restart(port: int) -> None:
    """A worker whose training ends just then says so to the new server, which knows what that means."""
    with ExitStack() as stack:
        with training(port, stack) as (_, workers):
            pass
        with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(RULES), port=port):
            workers["a"].finished()
            error = workers.ask("b", 0, error="a peer was lost").failure(10)
            assert isinstance(error, DismissedError)
            assert error.fate == "over"


def test_after_the_end_workers_that_are_started_again_form_another_job(
    workers: Workers, server: RendezvousServer
) -> None:
    workers.place("a", "b")
    workers.train("a", "b", epoch=0)
    workers["a"].finished()
    workers["b"].finished()
    assert server.status()["elastic"]["phase"] == "over"
    late = workers.ask("late").failure(10)
    assert isinstance(late, DismissedError), "the others have not gone yet"
    assert late.fate == "removed"
    for id in ("a", "b", "late"):
        workers.die(id)
    until(lambda: not server.status()["store"]["connected_clients"], "all to have gone")
    placements = workers.place("c", "d")
    assert {placement.topology.epoch for placement in placements} == {1}, "what was stored for epoch 0 is not theirs"


def test_a_worker_s_id_is_its_own(workers: Workers, server: RendezvousServer) -> None:
    workers.place("a", "b")
    with RendezvousClient(server.endpoint, SECRET) as client:
        impostor = ElasticClient(client, "a")
        with pytest.raises(RendezvousRefusedError, match="there is a worker a already: process 2 on host pod-a"):
            impostor.next_epoch(-1, info(pid=3), ready=True, timeout=5)
        with pytest.raises(RendezvousRefusedError, match="this client is worker a's, not b's"):
            ElasticClient(workers["a"]._client, "b").leaving()


@pytest.mark.parametrize("forged", [False, True], ids=["as it is", "with the worker's own facts"])
def test_no_other_reports_for_a_worker_that_is_there(workers: Workers, server: RendezvousServer, forged: bool) -> None:
    workers.place("a", "b")
    workers.train("a", "b", epoch=0)
    with RendezvousClient(server.endpoint, SECRET) as client:
        impostor = ElasticClient(client, "a")
        if forged:
            impostor._current = workers["a"]._current
        for say in (impostor.finished, impostor.leaving, lambda: impostor.news(-1, timeout=5)):
            with pytest.raises(RendezvousRefusedError, match="worker a speaks for itself"):
                say()
    assert server.status()["elastic"]["phase"] == "running"
    workers["a"].finished()
    workers["b"].finished()
    assert server.status()["elastic"]["phase"] == "over"


def test_waiting_workers_need_no_threads() -> None:
    """256 of them, each with a question and listening to news."""
    rules = Rules(size=300, smallest=1, launched=False)
    with RendezvousServer(secret=SECRET, elastic=ElasticEpochs(rules)) as server, ExitStack() as stack:
        run = server.status()["run"]
        for number in range(256):
            told, id = info(host_identity=str(number)).to_dict(), f"w{number}"
            raw = RawClient(server.endpoint, run)
            for what, body in (
                ("next", elastic.REGISTER.encode(elastic.Register(id, -1, False, -1, "", "", [], 0.0, told))),
                ("news", elastic.LISTEN.encode(elastic.Listen(id, 0, None))),
            ):
                sock = stack.enter_context(socket.create_connection((raw.host, raw.port), timeout=20))
                sock.sendall(raw.head("POST", f"/v1/elastic/{what}?timeout=40", body) + body)
        until(lambda: server.status()["store"]["waiting_requests"] == 512, "all to wait")
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("hvdgloo-rendezvous")]
        assert len(threads) < 5, threads


def test_a_worker_waits_no_longer_than_it_wants(workers: Workers) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"within 0\.2 s; waiting for workers: 1 of 2 .* \(h 1\)"):
        workers["a"].next_epoch(-1, info(), ready=True, timeout=0.2)


def test_a_launcher_feeds_what_it_sees_and_does_what_it_is_told() -> None:
    actions: list[Action] = []
    epochs = ElasticEpochs(Rules(size=2, smallest=1, failures_per_host=3), act=actions.append)
    with RendezvousServer(secret=SECRET, elastic=epochs) as server, ExitStack() as stack:
        workers = Workers(server.endpoint, stack)
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


@pytest.mark.parametrize("path", ["next?timeout=0", "news?timeout=0", "reports"])
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


def test_a_worker_of_a_fixed_number_is_told_that_the_job_is_elastic(server: RendezvousServer) -> None:
    with RendezvousClient(server.endpoint, SECRET) as client:
        assert client.is_elastic()
        with pytest.raises(
            RendezvousRefusedError, match="this job is elastic, and the worker has registered as one of"
        ):
            client.register(0, info(), timeout=5)
    with RendezvousServer(secret=SECRET, size=1) as fixed, RendezvousClient(fixed.endpoint, SECRET) as client:
        assert not client.is_elastic()


def test_the_workers_of_an_elastic_job_are_not_fixed() -> None:
    with pytest.raises(ConfigError, match="not fixed by size or hosts"):
        RendezvousServer(secret=SECRET, size=2, elastic=ElasticEpochs(RULES))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this kernel has no such option")
def test_only_where_no_launcher_sees_them_connections_end_that_owe_an_acknowledgement() -> None:
    """A fixed number of workers, and workers that a launcher has started, cannot go on without the lost one."""

    def user_timeout(**workers: Any) -> int:
        with RendezvousServer(secret=SECRET, **workers) as server, RendezvousClient(server.endpoint, SECRET) as client:
            client.store("s").set("k", b"v")
            assert server._front is not None
            (connection,) = server._front._connections
            return int(connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    assert user_timeout(elastic=ElasticEpochs(RULES)) == 5000
    assert user_timeout(elastic=ElasticEpochs(Rules(size=2, smallest=1))) == user_timeout(size=1) == 0


def test_nothing_is_kept_of_one_that_has_gone() -> None:
    epochs = ElasticEpochs(RULES)
    with RendezvousServer(secret=SECRET, elastic=epochs) as server, ExitStack() as stack:
        workers = Workers(server.endpoint, stack)
        waiting = workers.ask("a")
        until(lambda: bool(epochs._waiters), "its request to wait")
        workers.die("a")
        with pytest.raises(RendezvousError):
            waiting.result(5)
        tables = (epochs._clients, epochs._waiters, epochs._clients_of, epochs._infos, epochs._answers)
        until(lambda: not any(tables), "it to be forgotten")


def test_what_members_of_old_epochs_have_stored_goes_and_what_users_have_stays() -> None:
    epochs = ElasticEpochs(RULES)
    with RendezvousServer(secret=SECRET, elastic=epochs) as server, RendezvousClient(server.endpoint, SECRET) as client:
        old = [f"{name}{ElasticClient.scope(0)}" for name in ("control", "gloo")]
        users = ["results@0", "control@0", "user@example.0", ElasticClient.scope(0)[1:]]
        for scope in (*old, *users):
            client.store(scope).set("k", b"v")
        epochs.on_formed(2)
        for scope in users:
            assert client.store(scope).get("k", timeout=0) == b"v"
        for scope in old:
            with pytest.raises(RendezvousTimeoutError):
                client.store(scope).get("k", timeout=0)
