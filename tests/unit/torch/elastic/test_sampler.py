"""ElasticSampler alone, under any schedule: each index of an epoch once, but for padding."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from hvdgloo.torch.elastic import sampler as module
from hvdgloo.torch.elastic.sampler import ElasticSampler


@dataclass
class Place:
    """The front-end's functions that the sampler calls."""

    now: tuple[int, int] = (0, 1)

    def is_initialized(self) -> bool:
        return True

    def rank(self) -> int:
        return self.now[0]

    def size(self) -> int:
        return self.now[1]


def samplers(place: Place, size: int, examples: int, state: dict[str, int]) -> list[ElasticSampler]:
    """All ranks' samplers, from the state of one."""
    made = []
    for rank in range(size):
        place.now = rank, size
        made.append(ElasticSampler(range(examples), seed=3))
        made[-1].load_state_dict(state)
    return made


def trained(ranks: list[ElasticSampler], batch: int, steps: int) -> list[list[int]]:
    """Return the indices that the ranks have seen in each of at most so many steps."""
    shares = [list(sampler) for sampler in ranks]
    assert len({len(share) for share in shares}) == 1  # or some rank would wait for the others' steps
    seen = []
    for number in range(steps):
        step = [share[number * batch : (number + 1) * batch] for share in shares]
        if not step[0]:
            break
        for sampler, indices in zip(ranks, step, strict=True):
            sampler.record_batch(number, len(indices))
        seen.append(list(itertools.chain(*step)))
    return seen


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    examples=st.integers(0, 60),
    batch=st.integers(1, 5),
    schedule=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6), st.booleans()), max_size=8),
    epoch=st.integers(0, 3),
)
def test_each_index_of_an_epoch_once_but_for_padding(
    examples: int, batch: int, schedule: list[tuple[int, int, bool]], epoch: int
) -> None:
    """``schedule``: sizes, how many steps are made, and whether one more fails before its commit."""
    place = Place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mpi_ops", place)
        state = {"epoch": epoch, "processed_num": 0}
        counts: Counter[int] = Counter()
        padding = 0
        for size, steps, fails in [*schedule, (2, examples + 1, False)]:
            ranks = samplers(place, size, examples, state)
            padding += size - 1
            for step in trained(ranks, batch, steps):
                counts.update(step)
            state = ranks[-1].state_dict()
            if fails:  # a batch that was not committed
                trained(ranks, batch, steps + 1)
        assert set(counts) == set(range(examples))
        assert sum(counts.values()) - examples <= padding


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(examples=st.integers(1, 60), batch=st.integers(1, 5), size=st.integers(1, 7), steps=st.integers(0, 6))
def test_continued_on_as_many_ranks_each_has_the_batches_of_an_epoch_without_an_interruption(
    examples: int, batch: int, size: int, steps: int
) -> None:
    place = Place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mpi_ops", place)
        begin = {"epoch": 1, "processed_num": 0}
        whole = trained(samplers(place, size, examples, begin), batch, examples)
        first = samplers(place, size, examples, begin)
        before = trained(first, batch, steps)
        after = trained(samplers(place, size, examples, first[0].state_dict()), batch, examples)
        assert before + after == whole
