"""A blocking caller's thread does the engine's work for a while, and leaves everything as it was."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._engine.control import Control
from hvdgloo._engine.handle import Handle
from hvdgloo._job.context import Context
from hvdgloo.errors import PeerLostError
from hvdgloo.types import ReduceOp
from tests.support.frameworks import load
from tests.support.world import MakeWorld

BACKENDS = ("inline", "shm")
LONG = 5.0

frontend_of = load("numpy").frontend


def test_answers_are_found_without_the_control_thread(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, list[bool]] = {0: [], 1: []}
    original = Control._spin

    def spin(self: Control, awaited: Handle) -> None:
        original(self, awaited)
        found[self._rank].append(awaited.done())

    monkeypatch.setattr(Control, "_spin", spin)

    def rank_body(frontend: Frontend[Any]) -> None:
        for step in range(20):
            value = np.full(3, step + frontend.rank(), np.float16)  # of a type that is not offered
            assert frontend.allreduce(value, op=ReduceOp.SUM, name="x").tolist() == [2 * step + 1] * 3

    world(2, spin_time=LONG).run(rank_body, frontend_of)
    for rank in (0, 1):
        assert any(found[rank]), found


def test_the_control_thread_listens_again_after(world: MakeWorld) -> None:
    late = threading.Event()

    def rank_body(frontend: Frontend[Any]) -> None:
        frontend.allreduce(np.ones(3), name="together")
        if frontend.rank() == 1:
            handle = frontend.allreduce_async(np.ones(3), op=ReduceOp.SUM, name="first here")
            late.set()
        else:
            assert late.wait(10)
            handle = frontend.allreduce_async(np.ones(3), op=ReduceOp.SUM, name="first here")
        assert frontend.synchronize(handle).tolist() == [2, 2, 2]

    world(2, spin_time=LONG).run(rank_body, frontend_of)


def test_a_peer_that_is_lost_ends_the_search(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        frontend = frontend_of(context)
        frontend.allreduce(np.ones(3), name="together")
        if context.rank == 1:
            context.engine._control.close()  # as a death looks to the others
            return
        with pytest.raises(PeerLostError):
            frontend.allreduce(np.ones(3), name="alone")

    world(2, spin_time=LONG).run(rank_body)
