"""Counters of a real engine that tell which rank delays the others: from the ranks' counters to the readers' view."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hvdgloo._job.context import Context
from hvdgloo._job.observing import _Rank
from hvdgloo._observe import view
from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.reporter import Sampler
from hvdgloo._observe.samples import CODEC, Sample
from tests.contract.test_engine import allreduce
from tests.support.world import World

SIZE, STEPS, SLOW, LAG = 4, 40, 2, 0.01


submitted = threading.Semaphore(0)


def train(context: Context) -> list[bytes]:
    """Steps of two tensors, which one rank begins when all others have submitted theirs.

    Returns:
        What the rank says in the middle and at the end.
    """
    assert context.engine.counters is not None
    sampler = Sampler(context.engine.counters, _Rank(context.config, context.engine, 0.0))
    said = []
    for step in range(STEPS):
        if context.rank == SLOW:
            for _ in range(SIZE - 1):
                assert submitted.acquire(timeout=60)
            time.sleep(LAG)  # for so long the others wait, at least
        handles = [allreduce(context, name, np.ones(256, np.float32)) for name in ("a", "b")]
        if context.rank != SLOW:
            submitted.release()
        for handle in handles:
            handle.wait(60)
        context.end_step()
        if step in (STEPS // 2, STEPS - 1):
            said.append(CODEC.encode(sampler.sample(time.monotonic(), settings=True)))
    return said


@pytest.fixture(scope="module")
def seen() -> view.Snapshot:
    now = 0.0
    observatory = Observatory(job="j", command="c", started=now, versions={}, clock=lambda: now)
    with World(SIZE, "inline") as world:
        said = world.run(train)
    for moment in range(2):
        for rank, samples in enumerate(said):
            sample = CODEC.decode(samples[moment])
            assert isinstance(sample, Sample)
            assert sample.rank == rank
            observatory.observe(f"h{rank // 2}", sample)
        now += 1.0
        observatory.tick()
    return observatory.snapshot()


def test_the_slow_rank_is_the_straggler(seen: view.Snapshot) -> None:
    assert [(straggler.rank, straggler.host, straggler.unit) for straggler in seen.stragglers] == [
        (SLOW, "h1", "steps")
    ]
    assert seen.stragglers[0].share > 0.7
    assert seen.stragglers[0].seconds > LAG / 2
    assert SLOW in seen.heat.rank


def test_others_wait_for_it_and_it_for_no_other(seen: view.Snapshot) -> None:
    waiting = dict(zip(seen.ranks.rank, seen.ranks.waiting, strict=True))

    assert all(share > waiting[SLOW] for rank, share in waiting.items() if rank != SLOW)
    for parts in zip(seen.ranks.computing, seen.ranks.waiting, seen.ranks.communicating, strict=True):
        assert sum(parts) == pytest.approx(1.0, abs=0.01)


def test_totals_cover_all_steps(seen: view.Snapshot) -> None:
    assert seen.job.steps == STEPS
    assert seen.ranks.steps == [STEPS] * SIZE
    assert seen.ranks.operations == [2 * STEPS] * SIZE
    assert seen.ranks.bytes == [2 * STEPS * 1024] * SIZE
    assert sum(plane.bytes for plane in seen.planes) == 2 * STEPS * 1024 * SIZE
    assert STEPS - 2 <= sum(seen.waits) <= STEPS  # it is not known when the first step began
    assert seen.settings
