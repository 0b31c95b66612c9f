"""Parquet data sets as batches of numpy arrays: what the estimators of ``hvdgloo.spark`` train from.

Needs pyarrow (and pandas for a ``transformation_fn``), neither Spark nor a framework: a training loop of one's own can
read what Spark has written.
"""

from hvdgloo.spark.data._reader import ParquetBatches

__all__ = ["ParquetBatches"]
