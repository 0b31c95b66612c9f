"""Elastic training with torch: ``hvd.elastic`` after ``import hvdgloo.torch as hvd``.

::

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for batch in loader:  # over an ElasticSampler's indices
                ...
                state.optimizer.step()
                state.sampler.record_batch(...)
                state.commit()

    train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
"""

from __future__ import annotations

from hvdgloo.elastic import run
from hvdgloo.torch.elastic.sampler import ElasticSampler
from hvdgloo.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]
