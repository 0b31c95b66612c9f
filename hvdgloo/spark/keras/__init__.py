"""``import hvdgloo.spark.keras as hvd``: train Keras models on DataFrames, with ``KerasEstimator``.

Names are imported when they are first used: ranks import other modules of this package, and need no Spark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdgloo.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hvdgloo.spark.keras.estimator"), name)
