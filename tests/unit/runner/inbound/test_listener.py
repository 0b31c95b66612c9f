"""Waiting for agents that come by themselves: which have arrived, which are missing, what went wrong outside."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hvdgloo._net.handshake import Link
from hvdgloo.errors import LaunchError, UnusableHostsError
from hvdgloo.runner.inbound import listener as module
from hvdgloo.runner.inbound import task
from hvdgloo.runner.inbound.hello import Bootstrap, Reply, TaskHello
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.listener import TaskListener, entries
from hvdgloo.runner.inbound.task import Invitation, bring_agent
from hvdgloo.runner.job.spec import assign
from tests.support.inbound import PATIENCE, arrival, eventually, visit
from tests.support.threads import Task


@pytest.fixture
def comers() -> Iterator[list[socket.socket]]:
    """Connections of tasks, to be closed."""
    socks: list[socket.socket] = []
    yield socks
    for sock in socks:
        sock.close()


def come(listener: TaskListener, comers: list[socket.socket], *who: TaskHello) -> list[str]:
    """These tasks come; returns why they are refused."""
    reasons = []
    for each in who:
        sock, answer = visit(listener, each)
        comers.append(sock)
        reasons.append(answer.refused)
    return reasons


def test_all_tasks_come(comers: list[socket.socket]) -> None:
    told: list[int] = []
    with TaskListener(2, addresses=["127.0.0.1"]) as listener:
        come(listener, comers, arrival(1), arrival(0))
        found = listener.gather(on_arrival=lambda each: told.append(each.index))
    assert [each.index for each in found] == [0, 1]
    assert sorted(told) == [0, 1]


def test_a_timeout_says_who_came_from_where_and_what_to_do(comers: list[socket.socket]) -> None:
    with TaskListener(3, what="Spark tasks", addresses=["127.0.0.1"], start_timeout=0.3) as listener:
        come(listener, comers, arrival(1, name="executor 4"))
        eventually(lambda: len(listener.arrived) == 1)
        with pytest.raises(LaunchError) as caught:
            listener.gather(remedy="Give the cluster more slots")
    assert str(caught.value) == (
        "Timed out waiting for Spark tasks to start: 1 of 3 came within 0.3 s (task 1: h1 (executor 4) from "
        "127.0.0.1); missing: tasks 0, 2. Give the cluster more slots"
    )


def test_one_that_left_again_is_missing_and_another_attempt_may_come(comers: list[socket.socket]) -> None:
    with TaskListener(1, addresses=["127.0.0.1"], start_timeout=0.3) as listener:
        come(listener, comers, arrival(0))
        eventually(lambda: len(listener.arrived) == 1)
        comers[0].close()
        eventually(lambda: listener.arrived == ())
        with pytest.raises(LaunchError, match=r"0 of 1 came.*missing: task 0 \(task 0 came and has gone again \(h1 "):
            listener.gather()
        listener.start_timeout = PATIENCE
        assert come(listener, comers, arrival(0, attempt=1)) == [""]
        assert [each.attempt for each in listener.gather()] == [1]


def test_a_job_does_not_begin_without_one_that_left_after_all_had_come(
    monkeypatch: pytest.MonkeyPatch, comers: list[socket.socket]
) -> None:
    monkeypatch.setattr("hvdgloo.runner.inbound.job._REASON_TIME", 0.1)
    with TaskListener(2, addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        come(listener, comers, arrival(0), arrival(1))
        listener.gather()
        comers[1].close()
        eventually(lambda: len(listener.arrived) == 1)
        with pytest.raises(LaunchError, match=r"^task 1 came and has gone again \(h1 \(task 1\)\)$"):
            run_function(listener, len)
        listener.fail("Spark lost executor 1")
        with pytest.raises(LaunchError, match=r"^Spark lost executor 1$"):
            run_function(listener, len)


def test_never_two_for_one_rank(comers: list[socket.socket]) -> None:
    with TaskListener(2, addresses=["127.0.0.1"]) as listener:
        first, second = come(listener, comers, arrival(0, name="executor 1"), arrival(0, name="executor 2", attempt=1))
        assert first == ""
        assert second == (
            "task 0 (attempt 1) came a second time, from h1 (executor 2), while h1 (executor 1) takes part in the job "
            "as this task: there are never two of one rank"
        )
        eventually(lambda: [each.name for each in listener.arrived] == ["executor 1"])


def test_a_task_that_did_not_hear_in_time_comes_again(comers: list[socket.socket]) -> None:
    with TaskListener(1, addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        assert come(listener, comers, arrival(0, pid=7)) == [""]
        listener.gather()
        assert come(listener, comers, arrival(0, pid=7)) == [""]
        assert comers[0].recv(1) == b""  # the launcher has let go of the first connection
        assert len(listener.gather()) == 1
        (again,) = come(listener, comers, arrival(0, pid=8))
        assert "came a second time" in again


def test_a_handshake_that_takes_too_long_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_PAUSE", 0.01)
    introduce, late = task.introduce, iter([True])

    def slow(secret: bytes, sock: socket.socket, who: TaskHello, deadline: float) -> tuple[Link, Reply]:
        answer = introduce(secret, sock, who, deadline)
        if next(late, False):
            raise TimeoutError("timed out")
        return answer

    monkeypatch.setattr(task, "introduce", slow)
    with TaskListener(1, addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        link = task._connect(listener.invitation, arrival(0), time.monotonic() + PATIENCE)
        with link.sock:
            assert len(listener.gather()) == 1


@pytest.mark.parametrize("index", [2, -1])
def test_there_is_no_place_for_more_tasks(comers: list[socket.socket], index: int) -> None:
    with TaskListener(2, what="Ray actors", addresses=["127.0.0.1"]) as listener:
        assert come(listener, comers, arrival(index)) == [f"task {index} has no place in a job of 2 Ray actors"]


def test_other_versions_are_reported_all_together(comers: list[socket.socket]) -> None:
    with TaskListener(3, what="Spark tasks", addresses=["127.0.0.1"]) as listener:
        come(listener, comers, arrival(0, python="3.9"), arrival(1), arrival(2, version="0.0.1", name="executor 2"))
        with pytest.raises(UnusableHostsError) as caught:
            listener.gather()
    assert set(caught.value.hosts) == {"h1 (task 0)", "h1 (executor 2)"}
    assert "2 of the 3 Spark tasks that came cannot be used" in str(caught.value)
    assert "Python 3.9" in str(caught.value)
    assert "hvdgloo 0.0.1" in str(caught.value)


def test_a_newcomer_that_cannot_be_used_is_sent_away(comers: list[socket.socket]) -> None:
    with TaskListener(None, addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        come(listener, comers, arrival(0))
        listener.gather(least=1)
        (refused,) = come(listener, comers, arrival(1, python="3.9"))
        assert refused.startswith("it has Python 3.9, the launcher has ")
        assert come(listener, comers, arrival(1)) == [""]


def test_those_who_are_late_are_not_waited_for_longer_than_a_moment(
    monkeypatch: pytest.MonkeyPatch, comers: list[socket.socket]
) -> None:
    monkeypatch.setattr(module, "_SETTLE", 0.1)
    with TaskListener(2, addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        come(listener, comers, arrival(0, python="3.9"))
        with pytest.raises(UnusableHostsError):
            listener.gather()


def test_what_goes_wrong_outside_ends_the_wait() -> None:
    cause = ValueError("Py4J")
    with TaskListener(1, addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        timer = threading.Timer(0.05, listener.fail, ["the Spark job was cancelled", cause])
        timer.start()
        with pytest.raises(LaunchError, match=r"^the Spark job was cancelled$") as caught:
            listener.gather()
        timer.join()
        listener.fail("later")
        assert listener.reason == "the Spark job was cancelled"
    assert caught.value.__cause__ is cause


def test_a_fault_while_listening_ends_the_wait(monkeypatch: pytest.MonkeyPatch, comers: list[socket.socket]) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("a fault")

    with TaskListener(2, what="tasks", addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        monkeypatch.setattr(listener, "_watch", fault)
        come(listener, comers, arrival(0))
        with pytest.raises(LaunchError, match=r"^listening for tasks has failed: RuntimeError\('a fault'\)$"):
            listener.gather()
        assert comers[0].recv(1) == b""


def test_the_waiting_thread_may_give_up() -> None:
    def poll() -> None:
        raise KeyboardInterrupt

    with TaskListener(1, addresses=["127.0.0.1"]) as listener, pytest.raises(KeyboardInterrupt):
        listener.gather(poll=poll)


def test_the_waiting_thread_may_know_more_of_what_goes_wrong_outside() -> None:
    with TaskListener(1, addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        calls = iter([None])

        def poll() -> None:
            if next(calls, "again") == "again":
                raise LookupError("executors lack hvdgloo")
            listener.fail("all Spark tasks have ended")

        with pytest.raises(LookupError):
            listener.gather(poll=poll)


def test_what_went_wrong_before_is_passed_on_later() -> None:
    with TaskListener(1, addresses=["127.0.0.1"]) as listener:
        listener.fail("executor 3 was lost")
        heard: list[str] = []
        with listener.passed_to(lambda failure: heard.append(failure.reason)):
            assert heard == ["executor 3 was lost"]


def test_it_listens_in_the_range_that_a_firewall_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("HVDGLOO_PORT_RANGE", f"{port}-{port + 20}")
    with TaskListener(1, addresses=["127.0.0.1"]) as listener:
        ((_, found),) = listener.invitation.endpoints
    assert port <= found <= port + 20


# Hosts of the job.


def test_agents_of_one_machine_are_one_host_of_the_job() -> None:
    came = [
        arrival(0, machine="a", host="h1", name="executor 1"),
        arrival(1, machine="b", host="h2", name="executor 2"),
        arrival(2, machine="a", host="h1", name="executor 3"),
        arrival(3, machine="b", host="h2", name="executor 2"),
    ]
    hosts = entries(came)
    assert [host.name for host in hosts] == [
        "h1 (executor 1)",
        "h1 (executor 3)",
        "h2 (executor 2, task 1)",
        "h2 (executor 2, task 3)",
    ]
    slots = assign(hosts, 4)
    assert [slot.hostname for slot in slots] == ["h1", "h1", "h2", "h2"]
    assert [slot.host for slot in slots] == [0, 1, 2, 3]  # each has an agent of its own
    assert [(slot.local_rank, slot.local_size) for slot in slots] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [(slot.cross_rank, slot.cross_size) for slot in slots] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_two_containers_with_one_name_are_told_apart() -> None:
    hosts = entries([arrival(0, machine="a"), arrival(1, machine="b")])
    assert [host.hostname for host in hosts] == ["h1", "h1-2"]


# The task's side.


@pytest.fixture
def unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``name.invalid`` is unknown at once, also where no server answers questions about names."""
    real = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **options: Any) -> Any:
        if host == "name.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.usefixtures("unknown_name")
def test_a_task_goes_on_to_the_address_that_leads_to_the_launcher() -> None:
    """A closed port, a listener that is something else, an unknown name; then the launcher."""
    with socket.create_server(("127.0.0.1", 0)) as other, TaskListener(1, addresses=["127.0.0.1"]) as listener:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        closed = ("127.0.0.1", 1)
        endpoints = (closed, ("name.invalid", 1), other.getsockname(), *listener.invitation.endpoints)
        invitation = Invitation(endpoints, listener.secret)
        bringing = Task(lambda: bring_agent(invitation, 0))
        assert len(listener.gather()) == 1
    bringing.result(PATIENCE)


@pytest.mark.usefixtures("unknown_name")
def test_a_launcher_that_is_gone_is_an_error_with_every_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = listener.getsockname()
    invitation = Invitation((endpoint, ("name.invalid", 5)), b"secret" * 6)
    with pytest.raises(LaunchError) as caught:
        bring_agent(invitation, 0)
    assert f"127.0.0.1 port {endpoint[1]}: Connection refused" in str(caught.value)
    assert "name.invalid port 5: " in str(caught.value)


def test_a_task_that_was_sent_away_in_a_crowd_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_PAUSE", 0.01)
    with TaskListener(1, addresses=["127.0.0.1"]) as listener:
        real = TaskListener._converse
        crowded = iter([True, True])

        def converse(self: TaskListener, sock: socket.socket, listener: socket.socket) -> module.Steps:
            if next(crowded, False):
                raise EOFError("sent away")
            yield from real(self, sock, listener)

        monkeypatch.setattr(listener._visitors, "_converse", lambda *each: converse(listener, *each))
        bringing = Task(lambda: bring_agent(listener.invitation, 0))
        assert len(listener.gather()) == 1
    bringing.result(PATIENCE)


def test_an_agent_that_ends_before_it_is_told_anything_is_an_error() -> None:
    with socket.socket() as sock:
        told = Bootstrap(
            b"secret", (b"", 1), (b"", 1), sock.fileno(), 1, {"LONG": "x" * 1_000_000}
        )  # more than a pipe holds
        with pytest.raises(LaunchError, match=r"ended at once, with status 3$"):
            task.BroughtAgent(["sh", "-c", "exit 3"], {}, told)


def test_an_invitation_shows_no_secret() -> None:
    assert "secret" not in repr(Invitation((("h", 1),), b"secret"))
