"""Elastic training with numpy, or without a framework: ``hvd.elastic`` after ``import hvdgloo.numpy as hvd``.

::

    @hvd.elastic.run
    def train(state):
        ...

    train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, weights=weights, batch=0))
"""

from __future__ import annotations

from hvdgloo.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "run"]
