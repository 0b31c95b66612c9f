"""Data modules, which replace an estimator's own reader: classes given as ``data_module``."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from hvdgloo.spark.data import ParquetBatches


class DataModule(abc.ABC):
    """Source of one rank's batches. A context manager, which closes in ``__exit__`` what it opened.

    Args:
        train_dir, val_dir: URLs of the data sets.
        num_train_epochs: number of passes over the data.
        has_val: True if there is a data set at ``val_dir``.
        train_batch_size, val_batch_size: rows of a batch.
        shuffle: shuffle training rows.
        transform_fn: function of a DataFrame, as an estimator's ``transformation_fn``.
        inmemory_cache_all: keep all rows in memory.
        cur_shard, shard_count: rank and number of ranks.
        schema_fields: names of the requested columns.
        storage_options: options for fsspec.
        steps_per_epoch_train, steps_per_epoch_val: batches per epoch; None for as many as there are.
        verbose: the estimator's verbosity.
        seed: seed for shuffling.
        kwargs: arguments that later versions add; kept as ``extra``.
    """

    def __init__(
        self,
        train_dir: str,
        val_dir: str,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: Callable[..., Any] | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        steps_per_epoch_train: int | None = None,
        steps_per_epoch_val: int | None = None,
        verbose: int = 1,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        self.train_dir = train_dir
        self.val_dir = val_dir
        self.num_train_epochs = num_train_epochs
        self.has_val = has_val
        self.train_batch_size = train_batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.transform_fn = transform_fn
        self.inmemory_cache_all = inmemory_cache_all
        self.cur_shard = cur_shard
        self.shard_count = shard_count
        self.schema_fields = schema_fields
        self.storage_options = storage_options
        self.steps_per_epoch_train = steps_per_epoch_train
        self.steps_per_epoch_val = steps_per_epoch_val
        self.verbose = verbose
        self.seed = seed
        self.extra = kwargs

    def __enter__(self) -> DataModule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @abc.abstractmethod
    def train_data(self) -> Iterable[Mapping[str, Any]]:
        """Return an iterable that yields one epoch's batches, ``{column: array}``, each time it is iterated over."""

    @abc.abstractmethod
    def val_data(self) -> Iterable[Mapping[str, Any]] | None:
        """Return the batches of the validation data; None if there are none."""


class ParquetDataModule(DataModule):
    """Data module over ``ParquetBatches``, the estimators' own reader."""

    def train_data(self) -> ParquetBatches:
        return self._batches(self.train_dir, self.train_batch_size, self.steps_per_epoch_train, self.shuffle)

    def val_data(self) -> ParquetBatches | None:
        if not self.has_val:
            return None
        return self._batches(self.val_dir, self.val_batch_size, self.steps_per_epoch_val, False)

    def _batches(self, path: str, batch_size: int, steps: int | None, shuffle: bool) -> ParquetBatches:
        return ParquetBatches(
            path,
            self.schema_fields,
            batch_size=batch_size,
            rank=self.cur_shard,
            size=self.shard_count,
            shuffle=shuffle,
            seed=self.seed,
            inmemory_cache_all=self.inmemory_cache_all,
            steps_per_epoch=steps,
            transformation_fn=self.transform_fn,
            storage_options=self.storage_options,
        )


PetastormDataModule = ParquetDataModule
"""Horovod's name. Petastorm is not used here."""
