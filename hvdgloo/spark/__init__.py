"""Training on Spark: ``hvdgloo.spark.run(fn, num_proc=4)`` calls a function in processes next to Spark's tasks.

::

    import hvdgloo.spark

    def train(learning_rate):
        import hvdgloo.torch as hvd

        hvd.init()
        ...
        return loss

    losses = hvdgloo.spark.run(train, args=(0.01,), num_proc=4)

Estimators, which train on a DataFrame, are in ``hvdgloo.spark.keras`` and ``hvdgloo.spark.torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdgloo.spark import task
    from hvdgloo.spark._run import run, run_elastic

__all__ = ["run", "run_elastic", "task"]

# Imported lazily: estimators' ranks import other modules of this package, but do not need the launcher's.
_FROM = {"run": "hvdgloo.spark._run", "run_elastic": "hvdgloo.spark._run"}
_MODULES = ("task",)


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"hvdgloo.spark.{name}")
    raise AttributeError(f"module 'hvdgloo.spark' has no attribute {name!r}")
