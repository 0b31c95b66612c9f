"""Elastic training with Keras 3, on its three backends, and with tf_keras.

::

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
    ]

    @hvd.elastic.run
    def train(state):
        model.fit(data(), epochs=epochs - state.epoch, callbacks=callbacks)

    train(state)

**What runs again.** When workers were lost or joined, the function is called again, and ``fit`` begins an
epoch. After a failure it starts from the last commit; after a change of hosts nothing is lost. ``state.epoch`` is the
number of epochs that have ended. ``state.batch`` is the index of the last batch in the epoch that was under way, 0
between epochs: the epoch begins again, with all its batches, unless the program leaves some out
(``steps_per_epoch=steps - state.batch`` for the first epoch).

**Order of callbacks.** A commit contains the batch and the epoch that have just ended wherever these callbacks are in
the list. What stands behind the CommitStateCallback is not called for the batch or the epoch at whose end it lets the
workers change, so callbacks that do other things are best placed before it.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

from hvdgloo.elastic import State
from hvdgloo.elastic._variables import ModelState, run
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.keras.callbacks import ForTfKeras
from hvdgloo.numpy._frontend import FRONTEND

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

if keras.backend.backend() == "jax":  # whose failed functions must not run on in the job's next epoch
    run = importlib.import_module("hvdgloo.jax.elastic").run


class KerasState(ModelState):
    """A model, its optimizer, and plain attributes.

    Args:
        model: of Keras 3 on any of its backends, or of tf_keras; must be built.
        optimizer: by default the one that the model was compiled with.
        kwargs: attributes and their first values, ``batch=0, epoch=0`` for the callbacks; see
            ``hvdgloo.elastic.ObjectState``.

    Raises:
        InvalidArgumentError: (a ValueError) the model is not built: call ``model.build(input_shape)``, or the model.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(FRONTEND, model, optimizer, **kwargs)


class _StateCallback(ForTfKeras, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that concerns a state. A ``fit``'s callbacks know each other, so their order makes no difference."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._elastic_state = state

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        state: Any = self._elastic_state
        # All callbacks of a ``fit`` are given one and the same object.
        fit, known = getattr(state, "_callbacks_of_fit", (None, []))
        if fit is None or fit is not self.params:
            known = []
        state._callbacks_of_fit = self.params, [*known, self]

    def _update(self, *, batch: int | None = None, epoch: int | None = None) -> None:
        """Write into the state that a batch or an epoch has ended; the second time changes nothing."""


class CommitStateCallback(_StateCallback):
    """Commits the state after every so many batches, and at each epoch's end.

    Args:
        state: an elastic state.
        batches_per_commit: how many batches a failure may cost. A commit copies the model.

    Raises:
        InvalidArgumentError: (a ValueError) ``batches_per_commit`` is not a whole number from 1.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        if not isinstance(batches_per_commit, int) or isinstance(batches_per_commit, bool) or batches_per_commit < 1:
            raise InvalidArgumentError(f"batches_per_commit must be a whole number from 1, not {batches_per_commit!r}")
        self.batches_per_commit = batches_per_commit
        self._batches = 0  # since the last commit
        self._previous = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        super().on_train_begin(logs)
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._previous = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras; not for each batch if it executes several steps at once."""
        self._batches += batch - self._previous
        self._previous = batch
        if self._batches >= self.batches_per_commit:
            self._batches %= self.batches_per_commit
            self._commit(batch=batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._commit(epoch=epoch)

    def _commit(self, **ended: int) -> None:
        state: Any = self._elastic_state
        for callback in state._callbacks_of_fit[1]:
            callback._update(**ended)
        state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Keeps ``state.batch``: the index of the last batch in this epoch, 0 once the epoch has ended.

    Args:
        state: an elastic state.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._update(batch=batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._update(epoch=epoch)

    def _update(self, *, batch: int | None = None, epoch: int | None = None) -> None:
        state: Any = self._elastic_state
        state.batch = 0 if batch is None else batch


class UpdateEpochStateCallback(_StateCallback):
    """Keeps ``state.epoch``: the number of epochs that have ended, before this ``fit`` and in it.

    Args:
        state: an elastic state.

    ``fit(epochs=epochs - state.epoch)`` and ``fit(initial_epoch=state.epoch, epochs=epochs)`` are both understood.
    """

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._initial = 0
        self._is_first = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        super().on_train_begin(logs)
        state: Any = self._elastic_state
        self._initial = getattr(state, "epoch", 0)
        self._is_first = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if self._is_first and epoch == self._initial:
            self._initial = 0  # Keras counts from where the state is
        self._is_first = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._update(epoch=epoch)

    def _update(self, *, batch: int | None = None, epoch: int | None = None) -> None:
        if epoch is not None:
            state: Any = self._elastic_state
            state.epoch = self._initial + epoch + 1
