"""Elastic training for programs of ``tf.keras``: ``hvdgloo.keras.elastic``."""

from __future__ import annotations

from hvdgloo.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
