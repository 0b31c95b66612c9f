"""``TorchEstimator`` trains a PyTorch model on a Spark DataFrame, and returns a ``TorchModel``: a Transformer.

::

    estimator = TorchEstimator(
        num_proc=4, store=Store.create("hdfs://..."), model=model, optimizer=optimizer, loss=F.cross_entropy,
        feature_cols=["features"], label_cols=["label"], batch_size=64, epochs=10,
    )
    model = estimator.fit(train_df)
    predictions = model.transform(test_df)

Names are imported when they are first used: ranks import other modules of this package, and need no Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdgloo.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdgloo.spark.torch import estimator

    return getattr(estimator, name)
