"""Parquet data sets as batches of numpy arrays, from which the estimators of ``hvdgloo.spark`` train.

It needs pyarrow (and pandas for a ``transformation_fn``), but neither Spark nor a framework: your own training loop can
read data that Spark wrote.
"""

from hvdgloo.spark.data._reader import ParquetBatches

__all__ = ["ParquetBatches"]
