"""Leaders between rank 0 and all others, in whole worlds of threads: what only many hosts show."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hvdgloo._engine import tree
from hvdgloo._engine.messages import Request
from hvdgloo._job.context import Context
from hvdgloo.errors import HorovodInternalError, PeerLostError
from hvdgloo.types import Collective, ReduceOp
from tests.contract.test_engine import allgather, allreduce, result
from tests.contract.test_timeline import rows_of, spans
from tests.support.world import World


def test_64_ranks_on_8_hosts_train() -> None:
    """Steps of operations that are new, known by number, tiny, of some ranks only, and joined."""
    slots = [8] * 8
    size = sum(slots)

    def train(ctx: Context) -> None:
        rank = ctx.rank
        for step in range(4):
            handles = [allreduce(ctx, f"allreduce.g{i}", np.full(40 + i, rank + step, np.float32)) for i in range(5)]
            for handle in handles:
                assert result(handle)[0] == size * step + size * (size - 1) / 2
            tiny = allreduce(ctx, "allreduce.loss", np.array([rank], np.float64), op=ReduceOp.AVERAGE)
            assert result(tiny)[0] == (size - 1) / 2
        rows = result(allgather(ctx, "allgather.rows", np.full((rank % 3, 2), rank)))
        assert rows.shape[0] == sum(r % 3 for r in range(size))
        if rank % 8:
            assert result(allreduce(ctx, "allreduce.some", np.ones(1000, np.float32)))[0] == size - 8
        last = ctx.engine.submit(Request("join", Collective.JOIN))
        last.wait(20)

    with World(size, "tree", slots=slots, control_fanin=2) as world:
        world.run(train, deadline=40)


def test_rank_0_s_timeline_shows_when_each_rank_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5 comes when rank 0 has seen all others, though the leader of ranks 2 and 3 could have waited for it."""
    monkeypatch.setattr(tree, "PATIENCE_SECONDS", 1e6)
    seen = threading.Event()

    def rank_body(ctx: Context) -> None:
        if ctx.rank == 0:
            ctx.start_timeline(str(tmp_path / "trace"))
        allreduce(ctx, "allreduce.begun", np.ones(1)).wait(10)
        if ctx.rank == 5:
            assert seen.wait(10)
        handle = allreduce(ctx, "allreduce.x", np.ones(1))
        if ctx.rank == 0:
            until = time.monotonic() + 10
            while not set("01234") <= set(spans(rows_of(tmp_path / "trace").get("allreduce.x", []))):
                assert time.monotonic() < until
                time.sleep(0.01)
            seen.set()
        handle.wait(10)
        if ctx.rank == 0:
            ctx.engine.timelines.stop()
        after = allreduce(ctx, "allreduce.after", np.ones(1))
        assert result(after)[0] == 6

    with World(6, "tree", slots=(2, 2, 2), stall_warning_time=1e6) as world:
        world.run(rank_body)
    ticks = {event["name"]: event["ts"] for event in rows_of(tmp_path / "trace")["allreduce.x"]}
    assert {str(rank) for rank in range(6)} | {"NEGOTIATE_ALLREDUCE"} <= set(ticks)
    assert ticks["5"] > max(ticks[str(rank)] for rank in range(5))


@pytest.mark.parametrize("first", [0, 2, 3, 5])
def test_no_rank_is_blamed_for_an_end_that_was_ordered(first: int) -> None:
    """Hosts in a row: rank 0, a leader, one below it, and one at the far end hear first that the epoch is over."""

    def rank_body(ctx: Context) -> HorovodInternalError:
        allreduce(ctx, "allreduce.begun", np.ones(1)).wait(10)
        if ctx.rank == first:
            ctx.engine.abort(PeerLostError("the epoch is over"))
        try:
            while True:
                allreduce(ctx, "allreduce.x", np.ones(1)).wait(10)
        except HorovodInternalError as error:
            return error

    with World(6, "tree", slots=(2, 2, 2), control_fanin=1) as world:
        errors = world.run(rank_body)
    assert [(type(error), str(error), getattr(error, "rank", 0)) for error in errors] == [
        (PeerLostError, "the epoch is over", None)
    ] * 6
