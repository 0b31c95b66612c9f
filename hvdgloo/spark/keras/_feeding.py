"""How ``fit`` gets the batches of a reader. Imports Keras: see ``_library``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras

from hvdgloo.keras.callbacks import ForTfKeras
from hvdgloo.spark.keras._library import Library

__all__ = ["Feed", "FollowEpochs", "feed_of"]


class Feed(Protocol):
    """What ``fit`` takes, in place of arrays.

    Attributes:
        epoch: whose batches it gives.
    """

    epoch: int


def feed_of(library: Library, steps: int, batches: Callable[[int], Iterator[Any]], epoch: int) -> Feed:
    """Batches that are read one after the other, as the indexed ones that ``fit`` can begin anew.

    Keras looks at the first batches before an epoch, and with some backends begins an epoch of validation again where
    the last one has stopped: a generator, which cannot go back, would give it batches twice or not at all.

    Args:
        steps: how many batches an epoch has.
        batches: begins to read an epoch, of which it is given the number.
        epoch: the first one.
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
    """Has a feed give the batches of the epoch that begins."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._feed.epoch = epoch
