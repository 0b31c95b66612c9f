"""Callbacks that the estimator adds to a rank's ``fit``, for checkpoints after each epoch and their learning rate.

This module imports Keras: see ``_library``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdgloo.keras.callbacks import ForTfKeras
from hvdgloo.spark.keras._library import Library
from hvdgloo.spark.keras._models import archive_of, array_of

__all__ = ["EpochEnded", "EpochEnds", "History", "LearningRate", "Seeds", "Unscaled"]

History = dict[str, list[Any]]
"""Metrics by name, each with a value for each epoch."""

EpochEnded = Callable[[int, bytes], None]


class LearningRate:
    """An optimizer's learning rate, multiplied by the number of ranks from construction on.

    The batches of all ranks together are larger by this factor. Stored optimizers must not contain it, since a later
    run may have another number of ranks.

    Args:
        optimizer: an optimizer of either library; its rate is a number or a schedule.
        factor: the number of ranks.
    """

    def __init__(self, library: Library, optimizer: Any, factor: int) -> None:
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._factor = factor
        rate = getattr(self._optimizer, "_learning_rate", None)
        rate = self._optimizer.learning_rate if rate is None else rate
        self._is_schedule = callable(rate)
        self._plain = rate if self._is_schedule else self._value()
        self._scaled = _scaled(library, rate, factor) if self._is_schedule else self._plain * factor
        self._optimizer.learning_rate = self._scaled
        if not self._is_schedule:
            self._scaled = self._value()  # in the optimizer's precision

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Give the optimizer the rate for one process while the context lasts, in which it is stored."""
        now = self._scaled if self._is_schedule else self._value()
        # A rate that no callback changed is restored exactly.
        plain = self._plain if self._is_schedule or now == self._scaled else now / self._factor
        self._optimizer.learning_rate = plain
        try:
            yield
        finally:
            self._optimizer.learning_rate = now

    def _value(self) -> float:
        return float(array_of(self._optimizer.learning_rate))


def _scaled(library: Library, schedule: Any, factor: int) -> Any:
    base = library.module.optimizers.schedules.LearningRateSchedule
    if not isinstance(schedule, base):
        return lambda: schedule() * factor

    class Scaled(base):  # type: ignore[misc, valid-type]
        """A schedule multiplied by the number of ranks; never stored."""

        def __call__(self, step: Any) -> Any:
            return schedule(step) * factor

        def get_config(self) -> dict[str, Any]:
            return dict(schedule.get_config())

    return Scaled()


class Seeds(ForTfKeras, keras.callbacks.Callback):
    """Callback that sets new seeds for each epoch, so that a resumed run has the same dropout as an uninterrupted one.

    Args:
        seed: the training's seed; not below 0.
        rank: this rank, since each has its own random numbers.
    """

    def __init__(self, library: Library, seed: int, rank: int) -> None:
        super().__init__()
        self._library, self._seed, self._rank = library, seed, rank

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        set_seeds(self._library, self.model, [self._seed, epoch, self._rank])


def set_seeds(library: Library, model: Any, entropy: Sequence[int]) -> None:
    """Set the seeds of Python, numpy, the backend, and each of a model's layers.

    Args:
        entropy: numbers, not below 0, from which the seeds are derived.
    """
    generators = _stateful_generators(model) if library.name == "tf_keras" else _seed_states(model)
    own, *each = (np.random.SeedSequence(entropy).generate_state(1 + len(generators)) >> 1).tolist()
    library.module.utils.set_random_seed(own)
    for generator, seed in zip(generators, each, strict=True):
        if library.name == "tf_keras":
            generator.reset_from_seed(seed)
        else:
            generator.assign(np.array([seed, 0], generator.dtype))


def _seed_states(model: Any) -> list[Any]:
    """Return the variables of Keras's SeedGenerators, which are not among a model's weights."""
    return [variable for variable in model.variables if variable.name == "seed_generator_state"]


def _stateful_generators(model: Any) -> list[Any]:
    """Return TensorFlow's generators in a tf_keras model, after making its layers use them.

    By default random numbers depend on how often a traced function has been called, which cannot be reset.
    """
    found = []
    for layer in model.submodules:
        numbers = getattr(layer, "_random_generator", None)
        if numbers is None or numbers._rng_type == numbers.RNG_STATELESS:
            continue
        if numbers._rng_type != numbers.RNG_STATEFUL:
            # The type itself is not changed, since it is part of the layer's configuration, which goes into archives.
            numbers.RNG_STATEFUL, numbers._built = numbers._rng_type, False
        numbers._maybe_init()
        found.append(numbers._generator)
    return found


class EpochEnds(ForTfKeras, keras.callbacks.Callback):
    """Callback, on the first rank, that keeps the history and reports each epoch.

    Args:
        history: the history of earlier epochs, to which new ones are added.
        ended: called with the number of whole epochs and the model's archive; None if these are not needed.
    """

    def __init__(self, rate: LearningRate, history: History, ended: EpochEnded | None) -> None:
        super().__init__()
        self._rate, self._history, self._ended = rate, history, ended

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        for name, value in (logs or {}).items():
            self._history.setdefault(name, []).append(np.asarray(value).tolist())
        if self._ended is not None:
            with self._rate.unscaled():
                archive = archive_of(self.model)
            self._ended(epoch + 1, archive)


class Unscaled(ForTfKeras, keras.callbacks.Callback):
    """Callback that calls another one, which stores the model, with the learning rate for one process set.

    Args:
        inner: the user's ``checkpoint_callback``.
    """

    def __init__(self, rate: LearningRate, inner: Any) -> None:
        super().__init__()
        self._rate, self._inner = rate, inner
        self._by_batch = getattr(inner, "save_freq", "epoch") != "epoch"

    def set_params(self, params: Any) -> None:
        """Called by Keras."""
        super().set_params(params)
        self._inner.set_params(params)

    def set_model(self, model: Any) -> None:
        """Called by Keras."""
        super().set_model(model)
        self._inner.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._inner.on_train_begin(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Called by Keras."""
        with self._rate.unscaled():
            self._inner.on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._inner.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        with self._rate.unscaled():
            self._inner.on_epoch_end(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._inner.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if not self._by_batch:
            return
        with self._rate.unscaled():
            self._inner.on_train_batch_end(batch, logs)
