"""The callbacks of ``hvdgloo.keras``, where Horovod's programs look for them."""

from __future__ import annotations

from hvdgloo.keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    LocalSGDCallback,
    LogCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "LogCallback",
    "MetricAverageCallback",
]
