"""ElasticSampler under any schedule of sizes: each index once per epoch, but for what pads the shares to one length."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from hvdgloo.torch.elastic import sampler as module
from hvdgloo.torch.elastic.sampler import ElasticSampler
from hvdgloo.torch.elastic.state import SamplerStateHandler


class Rank:
    """In the place of the module's ``mpi_ops``: one rank of a job of some size."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = lambda: rank
        self.size = lambda: size
        self.is_initialized = lambda: True


@given(
    length=st.integers(0, 60),
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    turns=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), max_size=6),
    last=st.integers(1, 5),
)
def test_each_index_is_seen_once_but_for_padding(
    length: int, batch: int, shuffle: bool, turns: list[tuple[int, int, bool]], last: int
) -> None:
    """A turn: the size, the batches until it changes, and whether a failure takes back the last of them."""
    seen: Counter[int] = Counter()
    padding = 0
    state = {"epoch": 1, "processed_num": 0}
    with pytest.MonkeyPatch.context() as patch:
        for size, batches, fails in [*turns, (last, length + 1, False)]:
            batches -= fails and batches > 0
            states = []
            for rank in range(size):
                patch.setattr(module, "mpi_ops", Rank(rank, size))
                sampler = ElasticSampler(range(length), shuffle=shuffle, seed=3)
                handler = SamplerStateHandler(sampler)
                sampler.load_state_dict(state)
                padding += (sampler.total_size - len(sampler.remaining_indices)) * (rank == 0)
                share = list(sampler)
                assert len(share) == len(sampler)
                for i in range(batches):
                    part = share[i * batch : (i + 1) * batch]
                    if part:
                        seen.update(part)
                        sampler.record_batch(i, len(part))
                handler.save()
                sampler.record_batch(batches, batch)  # of a step that is taken back
                handler.restore()
                states.append(sampler.state_dict())
            assert all(each == states[0] for each in states)
            state = states[0]
    assert seen.keys() == set(range(length))
    assert sum(seen.values()) - length <= padding
