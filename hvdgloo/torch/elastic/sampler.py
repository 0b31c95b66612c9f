"""Each rank's share of a dataset, which can be divided again in the middle of an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hvdgloo.torch import mpi_ops
from hvdgloo.torch._compilation import uncompiled_methods


class ElasticSampler(Sampler[int]):
    """Divides a dataset's indices among the ranks, leaving out those that have been processed.

    All ranks see the same shuffled order. ``record_batch`` after each batch, ``state_dict`` at a commit and
    ``load_state_dict`` after a restart let an epoch continue where it stopped, on any number of ranks: each index is
    then seen once, except for the few that pad the shares to one length.

    Args:
        dataset: has a length.
        shuffle: take a new order in each epoch, instead of ascending.
        seed: of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing has been processed yet. Call it at the end of the previous one."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that all ranks have processed a batch of ``batch_size`` each; ``batch_idx`` is for the caller."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's part of a checkpoint: ``epoch`` and ``processed_num``."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint was made, possibly on a different number of ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the current ranks."""
        self.num_replicas = mpi_ops.size() if mpi_ops.is_initialized() else 1
        self.rank = mpi_ops.rank() if mpi_ops.is_initialized() else 0
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        # The first indices of the whole epoch: continued on as many ranks as before, it is padded as it would be.
        missing = self.total_size - len(self.remaining_indices)
        self._padding = [order[i % len(order)] for i in range(missing)]

    def __iter__(self) -> Iterator[int]:
        padded = [*self.remaining_indices, *self._padding]
        return iter(padded[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


# Dynamo would compile again for each number of processed samples.
uncompiled_methods(ElasticSampler)
