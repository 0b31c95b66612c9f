"""Leaders between rank 0 and all others, in whole worlds of threads: what only many hosts show."""

from __future__ import annotations

import numpy as np

from hvdgloo._engine.messages import Request
from hvdgloo._job.context import Context
from hvdgloo.types import Collective, ReduceOp
from tests.contract.test_engine import allgather, allreduce, result
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
        world.run(train, 40)
