"""Adapter from a reader's batches to the input of ``fit``. This module imports Keras: see ``_library``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras

from hvdgloo.keras.callbacks import ForTfKeras
from hvdgloo.spark.keras._library import Library

__all__ = ["Feed", "FollowEpochs", "feed_of"]


class Feed(Protocol):
    """Input of ``fit``, in place of arrays.

    Attributes:
        epoch: number of the epoch whose batches it provides.
    """

    epoch: int


def feed_of(library: Library, steps: int, batches: Callable[[int], Iterator[Any]], epoch: int) -> Feed:
    """Make sequentially read batches accessible by index, so that ``fit`` can restart an epoch.

    Keras looks at the first batches before an epoch, and with some backends restarts validation where the last epoch
    stopped: a generator, which cannot go back, would provide batches twice or not at all.

    Args:
        steps: number of batches in an epoch.
        batches: starts reading the epoch with the given number.
        epoch: number of the first epoch.
    """
    base: Any = library.module.utils.Sequence if library.name == "tf_keras" else library.module.utils.PyDataset

    class Batches(base):
        def __init__(self) -> None:
            super().__init__()
            self.epoch = epoch
            self._reading: Iterator[Any] = iter(())
            self._next = steps

        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            if index < self._next:
                self._reading = batches(self.epoch)
                self._next = 0
            while self._next <= index:
                batch = next(self._reading)
                self._next += 1
            return batch

    feed: Feed = Batches()
    return feed


class FollowEpochs(ForTfKeras, keras.callbacks.Callback):
    """Callback that makes a feed provide the batches of the epoch that begins."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._feed.epoch = epoch
