"""A thread that carries out what has to wait in between: order, failures, and when memory is free again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from hvdgloo._backends.progress_thread import ProgressThread
from hvdgloo.errors import BackendError, ConnectError


class Scene:
    """A progress thread, and a gate at which it stands when it settles after a failure."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.settling = threading.Event()
        self.progress = ProgressThread("hvdgloo-test-progress", self._settle)

    def _settle(self) -> None:
        self.settling.set()
        assert self.gate.wait(10)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.gate.set()
    made.progress.close()


def nothing() -> None:
    pass


def failing(error: Exception) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def test_operations_are_carried_out_one_after_another_on_one_thread(scene: Scene) -> None:
    seen: list[tuple[int, int]] = []
    works = [
        scene.progress.begin("x", lambda number=number: seen.append((number, threading.get_ident())))  # type: ignore[misc]
        for number in range(20)
    ]
    assert works[-1].completes_within(5)
    assert all(work.completes_within(0) for work in works)
    assert [number for number, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.01])
def test_who_waits_too_short_may_ask_again(scene: Scene, seconds: float) -> None:
    gate = threading.Event()
    work = scene.progress.begin("x", lambda: gate.wait(10) and None)
    assert not work.completes_within(seconds)
    assert not work.completes_within(seconds)
    gate.set()
    assert work.completes_within(5)
    assert work.completes_within(0)


def test_a_failure_is_raised_at_once_and_again_when_no_memory_is_touched_any_more(scene: Scene) -> None:
    cause = RuntimeError("[pair.cc:1] Connection closed by peer. This is typically caused by something")
    work = scene.progress.begin("allreduce of 4 bytes", failing(cause))
    with pytest.raises(BackendError, match=r"^Gloo allreduce of 4 bytes: Connection closed by peer$") as raised:
        work.completes_within(5)
    assert raised.value.__cause__ is cause
    assert scene.settling.wait(5)
    for seconds in (0.0, 0.01):
        assert not work.completes_within(seconds)
        assert not work.has_ended
    scene.gate.set()
    for _ in range(2):
        with pytest.raises(BackendError, match="Connection closed by peer"):
            work.completes_within(5)
    assert work.has_ended


def test_what_follows_a_failure_is_not_begun_and_fails_alike(scene: Scene) -> None:
    begun = threading.Event()
    first = scene.progress.begin("x", failing(ConnectError("no rank answers")))
    second = scene.progress.begin("y", begun.set)
    with pytest.raises(ConnectError, match="no rank answers"):
        first.completes_within(5)
    assert not second.completes_within(0)  # the thread still settles what the first one began
    scene.gate.set()
    third = scene.progress.begin("z", begun.set)
    for work in (second, third):
        for _ in range(2):
            with pytest.raises(ConnectError, match="no rank answers"):
                work.completes_within(5)
    assert not begun.is_set()


def test_an_idle_thread_ends_with_its_owner_and_one_that_is_stuck_is_left_alone(scene: Scene) -> None:
    def running() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "hvdgloo-test-progress"]

    idle = ProgressThread("hvdgloo-test-progress", nothing)
    idle.close()  # it never had a thread
    assert idle.begin("x", nothing).completes_within(5)
    assert running()
    idle.close()
    assert not running()
    gate = threading.Event()
    stuck = scene.progress.begin("y", lambda: gate.wait(10) and None)
    assert not stuck.completes_within(0)
    scene.progress.close()
    assert len(running()) == 1
    gate.set()
    running()[0].join(5)
    assert not running()
