"""Connecting is given up at once when its epoch is void, whatever it waits for and however long it might."""

from __future__ import annotations

import gc
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import cast

import pytest

from hvdgloo._backends.shm.segment_setup import SegmentSetup
from hvdgloo._job.control_plane import ControlPlane, World, tree_position_of
from hvdgloo._net.abstract import OwnListener
from hvdgloo._net.handshake import Handshake, listen
from hvdgloo._net.tls import Tls
from hvdgloo.config import Config
from hvdgloo.errors import BackendError
from hvdgloo.rendezvous import MemoryStore, RendezvousClient
from tests.support.rendezvous import SECRET, InProcess
from tests.support.threads import Task
from tests.support.topologies import on_hosts

HANDSHAKE = Handshake(SECRET, 0, 0)
NEVER = 60.0
TREE = {"control_fanin": 1, "control_tree_ranks": 2}


class Event:
    """An event that records when it was polled."""

    def __init__(self) -> None:
        self.polls = [time.monotonic()]
        self.said = threading.Event()

    def __call__(self) -> bool:
        self.polls.append(time.monotonic())
        return self.said.is_set()


def describe(rank: int) -> str:
    return f"rank {rank}"


def control_plane(world: World, cancelled: Event, config: Config | None = None) -> ControlPlane:
    patient = config or Config(secret=SECRET, connect_timeout=NEVER, start_timeout=NEVER)
    client = cast(RendezvousClient, InProcess())
    return ControlPlane(patient, SECRET, None, client, world, "127.0.0.1", cancelled=cancelled)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def silent(stack: ExitStack) -> tuple[str, int]:
    """An endpoint that takes connections, and says nothing."""
    listener = stack.enter_context(listen("127.0.0.1", None))
    return cast("tuple[str, int]", listener.getsockname()[:2])


def unanswered(stack: ExitStack) -> tuple[str, int]:
    """An endpoint that does not even take connections: its backlog is full."""
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    for _ in range(2):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return cast("tuple[str, int]", listener.getsockname()[:2])


def for_an_answer(stack: ExitStack, event: Event) -> object:
    return HANDSHAKE.connect(*silent(stack), 1, NEVER, describe, event)


def for_a_connection(stack: ExitStack, event: Event) -> object:
    return HANDSHAKE.connect(*unanswered(stack), 1, NEVER, describe, event)


def for_tls(stack: ExitStack, event: Event) -> object:
    return Handshake(SECRET, 0, 0, tls=Tls()).connect(*silent(stack), 1, NEVER, describe, event)


def for_others(stack: ExitStack, event: Event) -> object:
    listener = stack.enter_context(listen("127.0.0.1", None))
    return HANDSHAKE.accept_all(listener, [1], {}, NEVER, describe, event)


def for_a_listener_on_the_host(stack: ExitStack, event: Event) -> object:
    return HANDSHAKE.connect_here(f"hvdgloo-absent-{os.getpid()}", 1, NEVER, describe, event)


def for_an_answer_on_the_host(stack: ExitStack, event: Event) -> object:
    name = f"hvdgloo-silent-{os.getpid()}"
    stack.enter_context(OwnListener(name))
    return HANDSHAKE.connect_here(name, 1, NEVER, describe, event)


def for_an_endpoint(stack: ExitStack, event: Event) -> object:
    return control_plane(World(1, on_hosts(2, **TREE), "a"), event).connect(None, None, [])


def for_ranks_below_in_a_tree(stack: ExitStack, event: Event) -> object:
    there = on_hosts(2, 2, 2, **TREE)
    world = World(1, there, f"b{os.getpid()}")
    return control_plane(world, event).connect(tree_position_of(1, there), None, [])


def for_shared_memory(rank: int) -> Callable[[ExitStack, Event], object]:
    def wait(stack: ExitStack, event: Event) -> object:
        return SegmentSetup(
            MemoryStore(),
            "",
            rank,
            2,
            HANDSHAKE,
            describe,
            timeout=NEVER,
            limit=1 << 20,
            arena=0,
            pipes=False,
            cancelled=event,
        ).meet()

    return wait


WAITS = {
    "for an answer": for_an_answer,
    "for a connection": for_a_connection,
    "for TLS": for_tls,
    "for others": for_others,
    "for a listener on the host": for_a_listener_on_the_host,
    "for an answer on the host": for_an_answer_on_the_host,
    "for an endpoint": for_an_endpoint,
    "for the leader in a tree": for_ranks_below_in_a_tree,
    "for shared memory, rank 0": for_shared_memory(0),
    "for shared memory, rank 1": for_shared_memory(1),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_wait_that_is_cancelled_ends_at_once(wait: Callable[[ExitStack, Event], object], stack: ExitStack) -> None:
    event = Event()
    waiting = Task(lambda: wait(stack, event))
    deadline = time.monotonic() + 10
    while len(event.polls) == 1:
        assert waiting.thread.is_alive(), waiting.error
        assert time.monotonic() < deadline, "it does not ask whether it is cancelled"
        time.sleep(0.005)
    event.said.set()
    error = waiting.failure(10)  # of the minute that it would take
    assert isinstance(error, BackendError), error
    assert str(error).startswith("the job ended while")
    gc.collect()  # a connection that was left open would be an error here


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_wait_that_has_just_begun_looks_often(wait: Callable[[ExitStack, Event], object]) -> None:
    """A second worker may die while survivors of the first death connect: they stand still until they look."""
    deadline, longest = time.monotonic() + 30, math.inf
    while longest > 0.15:  # on a busy machine one wait alone says little
        assert time.monotonic() < deadline, f"{longest:.3f} s between two looks"
        with ExitStack() as each:
            event = Event()
            waiting = Task(partial(wait, each, event))
            while len(event.polls) < 3 and time.monotonic() < deadline:
                time.sleep(0.005)
            event.said.set()
            assert isinstance(waiting.failure(10), BackendError)
            longest = max(later - earlier for earlier, later in itertools.pairwise(event.polls[:3]))
