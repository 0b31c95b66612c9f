"""Autotune over every data plane: settings change while operations are under way, and results stay right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._engine import tuning
from hvdgloo._engine.settings import Choice
from hvdgloo._job.context import Context
from hvdgloo._job.observing import _Rank
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.types import ReduceOp
from tests.support.launching import wait_for
from tests.support.selection import extended
from tests.support.world import MakeWorld

BACKENDS = ("shm", *extended("local", "tree", "hierarchical"))

QUICK = {"autotune": True, "autotune_warmup_samples": 1, "autotune_steps_per_sample": 1, "autotune_noise": 0.0}
_STEPS = 240
_SHAPES = [(40_000,), (9_001,), (30_000,), (7_000,), (1,), (2_000,)]


@pytest.fixture(autouse=True)
def small_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are small, and steps few, too."""
    monkeypatch.setattr(tuning, "LOOKS", 1)  # all ends in ``_STEPS``
    monkeypatch.setattr(tuning, "_FUSION", (1 << 14, 1 << 16, 1 << 18, 1 << 20))
    monkeypatch.setattr(tuning, "_HIERARCHICAL", (1 << 13, 1 << 15, 1 << 17))


def _train(context: Context, arrays: list[np.ndarray], steps: int) -> list[bytes]:
    """Sum the arrays in every step, under the same names; returns the bytes of each step's results."""
    frontend: Frontend[Any] = Frontend(NumpyAdapter(), lambda: context)
    found = []
    for _ in range(steps):
        handles = [frontend.allreduce_async(a, op=ReduceOp.SUM, name=f"x{i}") for i, a in enumerate(arrays)]
        found.append(b"".join(frontend.synchronize(handle).tobytes() for handle in handles))
    return found


def test_results_are_right_while_all_ranks_change_at_the_same_operations(
    world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    made = world(3, **QUICK, inline_threshold=1024)

    def rank_body(context: Context) -> tuple[set[bytes], list[int]]:
        executor, limits = context.engine._executor, []
        plan = executor._planner.plan

        def noting(batch: Any) -> Any:
            limits.extend([executor._planner.limit] * len(batch))
            return plan(batch)

        executor._planner.plan = noting  # type: ignore[method-assign]
        arrays = [np.full(shape, context.rank + 1, np.int64) for shape in _SHAPES]
        return set(_train(context, arrays, _STEPS)), limits

    results = made.run(rank_body, deadline=60.0)
    expected = b"".join(np.full(shape, 6, np.int64).tobytes() for shape in _SHAPES)
    assert all(found == {expected} for found, _ in results)
    limits = [limits for _, limits in results]
    assert limits[0] == limits[1] == limits[2]
    assert len(set(limits[0])) > 2  # something was tried
    (line,) = [record.getMessage() for record in caplog.records if "autotune:" in record.getMessage()]
    assert "samples in" in line
    counters = made.contexts[0].engine.counters
    assert counters is not None
    # It is said first, and then noted for the page and the report.
    noted = wait_for(lambda: [text for _, kind, text in counters.notes if kind == "tuning"], 30.0)
    assert noted == [line]


def test_deterministic_results_have_the_same_bits_in_every_step(world: MakeWorld) -> None:
    made = world(3, **QUICK, deterministic=True, inline_threshold=4096)

    def rank_body(context: Context) -> tuple[int, bytes]:
        random = np.random.default_rng(context.rank)
        arrays = [random.standard_normal(shape).astype(np.float32) for shape in _SHAPES]
        found = _train(context, arrays, _STEPS)
        return len(set(found)), found[-1]

    results = made.run(rank_body, deadline=60.0)
    assert [count for count, _ in results] == [1, 1, 1]
    assert len({last for _, last in results}) == 1


def test_settings_can_be_changed_from_rank_0_and_are_shown_as_they_are(world: MakeWorld) -> None:
    made = world(3)

    def rank_body(context: Context) -> tuple[Choice, Any]:
        shown = _Rank(context.config, context.engine, 0.0)
        if context.rank == 0:
            assert (shown.settings() or {})["params.fusion_threshold_mb"] == 32.0
            start = context.engine.start_settings
            context.engine.tune(replace(start, fusion_threshold=4 << 20, cycle_time=0.002))
        _train(context, [np.ones(shape, np.float32) for shape in _SHAPES], 3)
        return context.engine.settings_in_use, shown.settings()

    (own, shown), *others = made.run(rank_body)
    assert (own.fusion_threshold, own.cycle_time) == (4 << 20, 0.002)
    assert others == [(own, None)] * 2
    assert (shown["params.fusion_threshold_mb"], shown["params.cycle_time_ms"]) == (4.0, 2.0)
