"""The code that each rank of a KerasEstimator's job runs.

Keras is imported only when the library and its backend are known.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

import hvdgloo.numpy
from hvdgloo.spark.common import _logs
from hvdgloo.spark.common._training import Batch, Reader, Training, TrainingResult
from hvdgloo.spark.keras._layout import Layout
from hvdgloo.spark.keras._library import Library
from hvdgloo.spark.keras._models import (
    Compilation,
    archive_of,
    load_state,
    load_weights,
    model_of,
    rate_of,
    register,
    set_rate,
)
from hvdgloo.spark.keras._run_files import RunFiles
from hvdgloo.spark.task import gpu_index

if TYPE_CHECKING:
    from hvdgloo.spark.keras._callbacks import EpochEnded, History

__all__ = ["Job", "train"]

_GPUS = "CUDA_VISIBLE_DEVICES"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """Keras's part of the instructions for ranks, in addition to ``Training``.

    Args:
        model: archive of the built model.
        compilation: its compilation.
        layout: correspondence of columns to inputs and targets.
        custom_objects: classes and functions by their names in the archive.
        callbacks, checkpoint_callback: the user's callbacks.
    """

    model: bytes
    compilation: Compilation
    layout: Layout
    custom_objects: Mapping[str, Any]
    callbacks: Sequence[Any]
    checkpoint_callback: Any


def train(library: Library, packed: bytes, training: Training) -> TrainingResult | None:
    """Train on one rank; the first rank returns the result.

    Args:
        library: the library to set up before ``packed`` is unpickled, which imports it.
        packed: a ``Job``, pickled by cloudpickle.
    """
    # A backend that calls this in its own process may have initialized hvd itself.
    own = not hvdgloo.numpy.is_initialized()
    if own:
        hvdgloo.numpy.init()
    try:
        if library.name not in sys.modules:
            _choose_gpu(training.use_gpu, hvdgloo.numpy.local_rank())
        library.use()
        job: Job = cloudpickle.loads(packed)
        register(library, job.custom_objects)
        library.module.backend.set_floatx(job.layout.floatx)
        return _Rank(library, job, training).train()
    finally:
        if own:
            hvdgloo.numpy.shutdown()


def _choose_gpu(use_gpu: bool, local_rank: int) -> None:
    """Show this process one GPU, or none, before a backend looks for them."""
    if not use_gpu:
        os.environ[_GPUS] = "-1"
        return
    index = gpu_index(local_rank)
    visible = os.environ.get(_GPUS)
    names = [str(number) for number in range(index + 1)] if visible is None else visible.split(",")
    if index < len(names):
        os.environ[_GPUS] = names[index]


class _Rank:
    def __init__(self, library: Library, job: Job, training: Training) -> None:
        self.library, self.job, self.training = library, job, training
        self.rank, self.size = hvdgloo.numpy.rank(), hvdgloo.numpy.size()

    def train(self) -> TrainingResult | None:
        # These modules import Keras.
        from hvdgloo.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
        from hvdgloo.spark.keras._callbacks import EpochEnds, LearningRate, Seeds, Unscaled
        from hvdgloo.spark.keras._feeding import FollowEpochs, feed_of

        job, training = self.job, self.training
        # For random numbers before the first epoch; weights are broadcast.
        self.library.module.utils.set_random_seed(training.seed + self.rank)
        model = model_of(self.library, job.model, job.custom_objects)
        job.compilation.compile(self.library, model, job.custom_objects, wrap=self._distributed)
        checkpoint = training.resume() if self.rank == 0 else None
        if checkpoint is not None:
            load_state(model, checkpoint.archive)
        # Including the rate, which is not among the variables of tf_keras's optimizers, which are broadcast.
        resumed = (checkpoint.epoch, checkpoint.history) if checkpoint is not None else (0, {})
        done, history, plain_rate = hvdgloo.numpy.broadcast_object((*resumed, rate_of(model.optimizer)))
        set_rate(model.optimizer, plain_rate)
        rate = LearningRate(self.library, model.optimizer, self.size)
        with ExitStack() as stack:
            batches = stack.enter_context(training.batches(self.rank, self.size))
            feed = feed_of(self.library, len(batches), self._reading(batches), done)
            validation_feed = None
            if training.validation_rows:
                validation = stack.enter_context(training.batches(self.rank, self.size, validation=True))
                validation_feed = feed_of(self.library, len(validation), self._reading(validation), 0)
            files = stack.enter_context(RunFiles(training)) if self.rank == 0 and training.store.saving_runs else None
            callbacks = [
                FollowEpochs(feed),
                Seeds(self.library, training.seed, self.rank),
                BroadcastGlobalVariablesCallback(0),
                MetricAverageCallback(),
                *self._users_callbacks(files),
            ]
            saved = None
            if files is not None and job.checkpoint_callback is not None:
                saved = files.keep(job.checkpoint_callback, history)
                callbacks.append(Unscaled(rate, job.checkpoint_callback))
            if self.rank == 0:
                callbacks.append(EpochEnds(rate, history, self._epoch_ended(history, files)))
            if done < training.epochs:
                model.fit(
                    feed,
                    initial_epoch=done,
                    epochs=training.epochs,
                    validation_data=validation_feed,
                    callbacks=callbacks,
                    shuffle=False,
                    # A progress bar is unreadable among the lines of other ranks.
                    verbose=2 if self.rank == 0 and training.verbose else 0,
                )
            if self.rank:
                return None
            outputs = self._outputs(model, batches)
            best = None if files is None or saved is None else files.saved(saved)
            if best is not None and zipfile.is_zipfile(io.BytesIO(best)):
                return TrainingResult(history, best, outputs)
            with rate.unscaled():
                if best is not None:
                    load_weights(model, best)
                return TrainingResult(history, archive_of(model), outputs)

    def _distributed(self, optimizer: Any) -> Any:
        from hvdgloo.keras import Compression, DistributedOptimizer

        return DistributedOptimizer(
            optimizer,
            compression=self.training.gradient_compression or Compression.none,
            backward_passes_per_step=self.training.backward_passes_per_step,
            average_aggregated_gradients=True,
        )

    def _users_callbacks(self, files: RunFiles | None) -> list[Any]:
        """Return the user's callbacks; TensorBoard's only on the first rank, where it writes to the run's directory."""
        kind = self.library.module.callbacks.TensorBoard
        kept = []
        for callback in self.job.callbacks:
            if isinstance(callback, kind):
                if self.rank:
                    continue
                if not _logs.are_possible():
                    logger.warning("TensorBoard is not installed, so its callback is skipped: pip install tensorboard")
                    continue
                if files is not None:
                    callback.log_dir = files.logs
            kept.append(callback)
        return kept

    def _epoch_ended(self, history: History, files: RunFiles | None) -> EpochEnded | None:
        if files is None:
            return None
        has_own = any(isinstance(each, self.library.module.callbacks.TensorBoard) for each in self.job.callbacks)

        def ended(epochs: int, archive: bytes) -> None:
            self.training.save(epochs, archive, history, self.size)
            if not has_own:
                files.write_logs(epochs - 1, {name: values[-1] for name, values in history.items()})
            files.sync()

        return ended

    def _reading(self, reader: Reader) -> Callable[[int], Iterator[Any]]:
        return lambda epoch: (self._arranged(batch) for batch in reader.epoch(epoch))

    def _arranged(self, batch: Batch) -> tuple[Any, ...]:
        layout = self.job.layout
        arranged = layout.features(batch.features), layout.labels(batch.labels)
        return arranged if batch.weights is None else (*arranged, batch.weights.astype(layout.floatx, copy=False))

    def _outputs(self, model: Any, reader: Reader) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each output without the batch dimension, by applying the model to a row."""
        batch = next(reader.epoch(0))
        predicted = model.predict_on_batch(self.job.layout.features([column[:1] for column in batch.features]))
        return tuple(tuple(array.shape[1:]) for array in self.job.layout.targets.arrays(predicted))
