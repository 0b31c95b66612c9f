"""Instructions for the ranks of an estimator's job, in any framework: the data, the duration, and where to save.

The driver makes a ``Training``, which is sent to the ranks by cloudpickle. Nothing here needs Spark, so that a rank
does not spend seconds on importing it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdgloo._job import process
from hvdgloo.errors import ConfigError
from hvdgloo.spark.common import _checkpoints
from hvdgloo.spark.common._checkpoints import Checkpoint

if TYPE_CHECKING:
    from types import TracebackType

    from hvdgloo.spark.common.store import RemoteStore
    from hvdgloo.spark.data import ParquetBatches

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Result of rank 0.

    Attributes:
        history: each epoch's metrics, in the framework's form; it can be converted to JSON.
        state: the trained model, in the framework's own format.
        outputs: the shape of each of the model's outputs, without the batch dimension.
    """

    history: Any
    state: bytes
    outputs: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some rows, as one array per column.

    Attributes:
        features, labels: arrays of shape (rows,) or (rows, ...), in the order of the columns, with the columns' own
            dtypes or the reader's; binary values are arrays of objects. The receiver may write to them.
        weights: array of shape (rows,); None if there is no column of weights.
    """

    features: list[Array]
    labels: list[Array]
    weights: Array | None

    def __len__(self) -> int:
        return len(self.labels[0])


@dataclasses.dataclass(frozen=True)
class Reading:
    """Options for reading data: the arguments of ``ParquetBatches`` that do not depend on the rank."""

    shuffle: bool = True
    shuffle_buffer_size: int | None = None
    inmemory_cache_all: bool = False
    transformation_fn: Callable[..., Any] | None = None
    edit_fields: Sequence[Any] | None = None
    removed_fields: Sequence[str] | None = None
    train_workers: int = 2
    validation_workers: int = 2
    data_module: type[Any] | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """One call of ``fit``.

    Attributes:
        run_id: the run's name in the store.
        store: the store as ranks see it.
        checkpoint_filename: the checkpoint's name in the run's directory.
        train_rows, validation_rows: rows of the whole data set; 0 validation rows mean no validation.
        feature_cols, label_cols, sample_weight_col: columns of the data set.
        batch_size, validation_batch_size: rows of a batch on each rank.
        epochs: total number of epochs, including an earlier job's of the same run.
        train_steps, validation_steps: steps per epoch; None for as many as it takes to see each row once.
        seed: seed of all random numbers.
        signature: names and shapes of the model's parameters; None if it has none yet.
        use_gpu: use the rank's GPU if it has one.
    """

    run_id: str
    store: RemoteStore
    checkpoint_filename: str
    train_rows: int
    validation_rows: int
    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    sample_weight_col: str | None
    batch_size: int
    validation_batch_size: int
    epochs: int
    train_steps: int | None
    validation_steps: int | None
    seed: int
    reading: Reading
    verbose: int
    use_gpu: bool
    backward_passes_per_step: int
    gradient_compression: Any
    signature: _checkpoints.Signature | None = None

    def batches(self, rank: int, size: int, *, validation: bool = False, dtype: Any = None) -> Reader:
        """Return a reader of this rank's part of the data; all ranks' readers yield equally many batches per epoch.

        Args:
            dtype: dtype of all numbers; by default the columns' own. A ``data_module``'s batches are not converted.
        """
        return Reader(self, rank, size, validation, dtype)

    def resume(self, signature: _checkpoints.Signature | None = None) -> Checkpoint | None:
        """Return the checkpoint of this run's last whole epoch; None if there is none, or the store keeps no runs.

        Args:
            signature: signature of the model that continues; by default ``self.signature``.

        Raises:
            ConfigError: the checkpoint is of another model, or the file is not a checkpoint.
        """
        if not self.store.saving_runs:
            return None
        checkpoint = _checkpoints.load(self.store, self.checkpoint_filename)
        if checkpoint is not None:
            _checkpoints.check(checkpoint, signature or self.signature, self.run_id)
        return checkpoint

    def save(self, epoch: int, archive: bytes, history: Any, size: int) -> None:
        """Replace the run's checkpoint after an epoch; called on rank 0.

        Args:
            epoch: number of whole epochs that have been trained.
            archive: a zip archive with the model and the optimizer, in the framework's own format.
            history: metrics of all these epochs.
            size: number of ranks.
        """
        if self.store.saving_runs:
            checkpoint = Checkpoint(epoch, archive, history, size, self.seed, self.signature)
            _checkpoints.save(self.store, self.checkpoint_filename, checkpoint)
            process.group_counters().count_save("checkpoint")


class Reader:
    """Reader of one rank's batches, epoch by epoch. A context manager, which ends the threads that read."""

    def __init__(self, training: Training, rank: int, size: int, validation: bool, dtype: Any = None) -> None:
        self._training = training
        self._dtype = dtype
        self._rank = rank
        self._size = size
        self._validation = validation
        self._rows = training.validation_rows if validation else training.train_rows
        self._batch_size = training.validation_batch_size if validation else training.batch_size
        self._steps = training.validation_steps if validation else training.train_steps
        self._resources = ExitStack()
        columns = [*training.feature_cols, *training.label_cols]
        if training.sample_weight_col is not None:
            columns.append(training.sample_weight_col)
        columns = self._columns = list(dict.fromkeys(columns))
        if training.reading.data_module is None:
            self._batches: Any = self._resources.enter_context(self._parquet(columns))
        else:
            module = self._resources.enter_context(self._module(training.reading.data_module, columns))
            method = module.val_data if validation else module.train_data
            self._batches = method()
            if self._batches is None:
                self._resources.close()
                raise ConfigError(f"{type(module).__name__}.{method.__name__}() returned None instead of batches")

    def _parquet(self, columns: list[str]) -> ParquetBatches:
        reading, store = self._training.reading, self._training.store
        return store.batches(
            store.val_data_path if self._validation else store.train_data_path,
            columns,
            batch_size=self._batch_size,
            rank=self._rank,
            size=self._size,
            shuffle=reading.shuffle and not self._validation,
            seed=self._training.seed,
            shuffle_buffer_size=reading.shuffle_buffer_size,
            inmemory_cache_all=reading.inmemory_cache_all,
            steps_per_epoch=self._steps,
            transformation_fn=reading.transformation_fn,
            edit_fields=reading.edit_fields,
            removed_fields=reading.removed_fields,
            # In Horovod 0 means that the loop itself reads; here one thread reads ahead in any case.
            num_workers=max(1, reading.validation_workers if self._validation else reading.train_workers),
            dtype=self._dtype,
        )

    def _module(self, kind: type[Any], columns: list[str]) -> Any:
        """Return the user's DataModule, constructed with the documented arguments."""
        training, reading, store = self._training, self._training.reading, self._training.store
        return kind(
            train_dir=store.train_data_path,
            val_dir=store.val_data_path,
            num_train_epochs=training.epochs,
            has_val=training.validation_rows > 0,
            train_batch_size=training.batch_size,
            val_batch_size=training.validation_batch_size,
            shuffle=reading.shuffle,
            transform_fn=reading.transformation_fn,
            inmemory_cache_all=reading.inmemory_cache_all,
            cur_shard=self._rank,
            shard_count=self._size,
            schema_fields=columns,
            storage_options=store.storage_options,
            steps_per_epoch_train=training.train_steps,
            steps_per_epoch_val=training.validation_steps,
            verbose=training.verbose,
            seed=training.seed,
        )

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    def __len__(self) -> int:
        """Return the number of steps per epoch, which is the same on all ranks."""
        if self._steps:
            return self._steps
        if hasattr(self._batches, "__len__"):
            return len(self._batches)
        return math.ceil(math.ceil(self._rows / self._size) / self._batch_size)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, in an order that depends on its number (from 0) and the seed.

        Raises:
            ConfigError: a ``data_module`` yields fewer batches than the requested steps, or it or a
                ``transformation_fn`` omits a required column.
        """
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(number)
        given = 0
        for columns in itertools.islice(self._batches, len(self)):
            yield self._batch(columns)
            given += 1
        if self._steps and given < self._steps:
            raise ConfigError(
                f"data_module yielded {given} batches in an epoch of {self._steps} steps: all ranks need equally many"
            )

    def _batch(self, columns: Mapping[str, Any]) -> Batch:
        training = self._training
        for name in self._columns:
            if name not in columns:
                raise ConfigError(
                    f"there is no column {name!r} in the batches: "
                    f"{'transformation_fn' if training.reading.data_module is None else 'data_module'} returns "
                    f"{', '.join(columns)}. Return {name!r}, too, or remove it from the estimator's columns"
                )
        return Batch(
            [np.asarray(columns[name]) for name in training.feature_cols],
            [np.asarray(columns[name]) for name in training.label_cols],
            None if training.sample_weight_col is None else np.asarray(columns[training.sample_weight_col]),
        )


def on_rank(
    store: RemoteStore, start_method: str | None, train: Callable[[], TrainingResult | None]
) -> TrainingResult | None:
    """Check that this rank shares the store with the driver, and train.

    It takes no ``Training``, so that a framework can prepare its process before unpickling anything that refers to it.

    Args:
        start_method: multiprocessing's start method; None for the platform's.
    """
    store.check()
    if start_method is not None:
        multiprocessing.set_start_method(start_method, force=True)
    return train()
