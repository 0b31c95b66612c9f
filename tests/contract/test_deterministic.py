"""HVDGLOO_DETERMINISTIC: the bits of a sum do not depend on when it was asked for, and what was asked for besides."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.types import ReduceOp
from tests.support.world import MakeWorld

BACKENDS = ("local", "gloo", "shm", "hierarchical")


def test_deterministic_results_do_not_depend_on_what_is_fused(world: MakeWorld) -> None:
    """Sums of three ranks are rounded differently where they are added in another order."""
    made = world(3, deterministic=True, inline_threshold=4096)
    shapes = [(1000 + 70_001 * i,) for i in range(5)]

    def rank_body(context: Context) -> list[bytes]:
        frontend: Frontend[Any] = Frontend(NumpyAdapter(), lambda: context)
        random = np.random.default_rng(context.rank)
        arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        alone = [frontend.allreduce(array, op=ReduceOp.SUM, name=f"alone{i}") for i, array in enumerate(arrays)]
        handles = [frontend.allreduce_async(array, op=ReduceOp.SUM, name=f"x{i}") for i, array in enumerate(arrays)]
        together = [frontend.synchronize(handle) for handle in handles]
        grouped = frontend.grouped_allreduce(arrays[::-1], op=ReduceOp.SUM, name="g")[::-1]
        for results in (together, grouped):
            assert [a.tobytes() for a in alone] == [a.tobytes() for a in results]
        tiny = random.standard_normal(3).astype(np.float32)
        with_agreement = frontend.allreduce(tiny, op=ReduceOp.SUM, name="t0")
        among_others = [frontend.allreduce_async(tiny, op=ReduceOp.SUM, name=f"t{i}") for i in range(1, 4)]
        assert {frontend.synchronize(handle).tobytes() for handle in among_others} == {with_agreement.tobytes()}
        return [a.tobytes() for a in alone]

    first, *others = made.run(rank_body)
    assert all(other == first for other in others)
