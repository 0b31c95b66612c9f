"""Callbacks for ``fit``, under the names and with the arguments that Horovod's programs use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdgloo._collectives.logged import Pause, fitting
from hvdgloo._job import process
from hvdgloo._training.weights import broadcast_made, expect_broadcast
from hvdgloo.errors import InvalidArgumentError, MismatchError
from hvdgloo.keras._functions import array_of, broadcast_weights
from hvdgloo.numpy._adapter import Array
from hvdgloo.numpy._frontend import FRONTEND
from hvdgloo.numpy._outer import OuterOptimizer
from hvdgloo.types import ReduceOp

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "LogCallback",
    "MetricAverageCallback",
]

Multiplier = float | Callable[[float], float]


class ForTfKeras:
    """Answers to tf_keras, which leaves out callbacks that have nothing to do with batches."""

    def _implements_train_batch_hooks(self) -> bool:
        hooks = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
        return any(getattr(type(self), hook) is not getattr(keras.callbacks.Callback, hook) for hook in hooks)

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallback(ForTfKeras, keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's weights, and the state of its optimizer, when training begins.

    This happens at once if the model is built on all ranks, and again after the first batch, when the optimizer's state
    exists.
    Random seeds, of Dropout for example, stay each rank's own.

    Args:
        root_rank: global rank of the source.
        device: accepted for programs that pass it.
        local_variables: variables that each rank keeps for itself.

    Raises:
        MismatchError: when training begins, on all ranks: their models are built, and not the same.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(variable) for variable in local_variables or ()}
        self._done = False
        self._token = object()

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        if self._done:
            return
        weights, state = self._weights(), self._state()
        is_built = bool(weights) and all(layer.built for layer in self.model.layers)
        mine = is_built, [(_name(weight), tuple(weight.shape)) for weight in weights], [tuple(v.shape) for v in state]
        everyone = FRONTEND.allgather_object(mine)
        if all(built for built, _, _ in everyone):
            _check_models([described for _, described, _ in everyone])
        shapes = [([shape for _, shape in described], of_state) for _, described, of_state in everyone]
        if all(others == shapes[0] for others in shapes):
            broadcast_weights([*weights, *state], self.root_rank)
        expect_broadcast(FRONTEND.context, self._token)  # until the first batch has ended, which may be several steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if not self._done:
            broadcast_weights([*self._weights(), *self._state()], self.root_rank)
            self._done = True
            broadcast_made(FRONTEND.context, self._token)

    def _weights(self) -> list[Any]:
        try:
            weights = self.model.weights
        except ValueError:  # this is how tf_keras says that the model is not built
            return []
        return self._shared(weights)

    def _state(self) -> list[Any]:
        optimizer = getattr(self.model, "optimizer", None)
        state = getattr(optimizer, "variables", ())
        # What has added up since the last step is of a rank's own batches.
        sums = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_accumulated_gradients", ())
        own = {id(variable) for variable in sums}
        # In tf_keras, what has the variables can be called.
        return self._shared([each for each in (state() if callable(state) else state) if id(each) not in own])

    def _shared(self, variables: Sequence[Any]) -> list[Any]:
        return [variable for variable in variables if id(variable) not in self._local]


class _Readable:
    """A Keras variable of whichever backend, for an ``OuterOptimizer``."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def numpy(self) -> Array:
        """Return its value."""
        return array_of(self._variable)

    def assign(self, value: Array) -> None:
        """Set it."""
        self._variable.assign(value)


class LocalSGDCallback(ForTfKeras, keras.callbacks.Callback):  # type: ignore[misc]
    """Lets each rank train on its own, and averages what all have changed every ``sync_every`` batches; for a plain
    optimizer, without ``hvd.DistributedOptimizer``, on a network that is too slow for it (docs/slow-networks.md).

    All ranks begin with rank 0's weights, so no other callback needs to broadcast them. Weights are also averaged
    before validation and at the end of each epoch, so all ranks need equally many batches, and must validate at the
    same times. Put it first in the list: callbacks after it, such as a checkpoint's, then see the same weights on all
    ranks.

    Args:
        sync_every: batches from one outer step to the next; with ``steps_per_execution``, executions.
        outer_lr, outer_momentum, outer_clip, start, fragments, overlap, compression, process_set: as for
            ``hvdgloo.numpy.OuterOptimizer``.

    Raises:
        InvalidArgumentError: (a ValueError) when training begins: the optimizer is distributed, or Keras runs on JAX.
    """

    def __init__(self, sync_every: int, **options: Any) -> None:
        super().__init__()
        self._make: Callable[..., OuterOptimizer] = functools.partial(OuterOptimizer, sync_every=sync_every, **options)
        self._outer: OuterOptimizer | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        if keras.backend.backend() == "jax":
            raise InvalidArgumentError(
                "fit on JAX keeps weights where callbacks cannot change them; use hvdgloo.numpy.OuterOptimizer in a "
                "loop of your own, or hvd.DistributedOptimizer"
            )
        optimizer = getattr(self.model, "optimizer", None)
        if hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_hvd"):
            raise InvalidArgumentError(
                "LocalSGDCallback is for an optimizer that averages no gradients; compile the model with the plain "
                "optimizer, not with hvd.DistributedOptimizer"
            )
        if self._outer is None and self.model.built:
            self._begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if self._outer is None:
            self._begin()  # the first batch has built the model, with weights that differ
        else:
            self._outer.step()

    def on_test_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._finish()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._finish()

    def _begin(self) -> None:
        broadcast_weights(self.model.weights, 0)
        trained = [_Readable(variable) for variable in self.model.trainable_variables]
        others = [each for each in self.model.non_trainable_variables if array_of(each).dtype.kind == "f"]
        self._outer = self._make(trained, statistics=[_Readable(variable) for variable in others])

    def _finish(self) -> None:
        if self._outer is not None:
            self._outer.finish()


class MetricAverageCallback(ForTfKeras, keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch with their averages over all ranks; arrays are averaged element by element.

    Metrics that are not numbers of one shape on all ranks stay as they are. Put callbacks that look at metrics after
    this one in the list: they then decide alike on all ranks.

    Args:
        device: accepted for programs that pass it.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if not logs:
            return
        label = "metrics"  # on all ranks, whichever metrics each of them has
        values = {name: array for name in sorted(logs) if (array := _numbers(logs[name])) is not None}
        shapes = {name: array.shape for name, array in values.items()}
        everyone = FRONTEND.allgather_object(shapes, label)
        names = [name for name in values if all(others.get(name) == shapes[name] for others in everyone)]
        averages = FRONTEND.grouped_allreduce([values[name] for name in names], op=ReduceOp.AVERAGE, name=label)
        for name, average in zip(names, averages, strict=True):
            logs[name] = average if average.shape else float(average)


class LogCallback(ForTfKeras, keras.callbacks.Callback):  # type: ignore[misc]
    """Shows the metrics and the progress of ``fit`` on the job's page, in its report, ``hvdgloo-run top`` and
    ``/metrics``; see ``hvd.log``.

    Batches' metrics, which Keras averages over the epoch so far, are logged once a second (more often in the first
    seconds), and an epoch's when it ends. Put this callback last in the list: it then logs what others, such as
    MetricAverageCallback, have added. Of more than 64 metrics, the first 64 are shown.

    What rank 0 saves during ``fit`` by ``model.save()`` or ``model.save_weights()``, as Keras's ModelCheckpoint and
    BackupAndRestore do, is marked on the charts.

    Args:
        average: log averages over all ranks of an epoch's metrics. A batch's metrics are always rank 0's.
    """

    def __init__(self, average: bool = False) -> None:
        super().__init__()
        self._average = average
        self._pause = Pause()
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        for method in _SAVING:  # shadows the class's: Keras tells no callback what others save
            self.model.__dict__.setdefault(method, functools.partial(_save_and_count, self.model, method))

    def on_train_end(self, logs: Any = None) -> None:
        """Called by Keras."""
        for method in _SAVING:
            if getattr(self.model.__dict__.get(method), "func", None) is _save_and_count:
                del self.model.__dict__[method]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        values = _scalars(logs) if self._pause.over() else None
        params = self.params or {}
        FRONTEND.log(
            values, step=batch, steps=params.get("steps") or None, epoch=self._epoch, epochs=params.get("epochs")
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        FRONTEND.log(_scalars(logs), average=self._average, epoch=epoch, epochs=(self.params or {}).get("epochs"))


_SAVING = ("save", "save_weights")
"""A model's methods that write checkpoints."""


def _save_and_count(model: Any, method: str, *args: Any, **kwargs: Any) -> None:
    getattr(type(model), method)(model, *args, **kwargs)
    process.group_counters().count_save("checkpoint")


def _scalars(logs: Any) -> dict[str, float]:
    """Return the metrics that are single numbers, as many as can be logged."""
    found = {name: array for name, value in (logs or {}).items() if (array := _numbers(value)) is not None}
    scalars = {name: array for name, array in found.items() if array.shape == ()}
    return fitting(scalars, process.group_counters().logged)


class LearningRateScheduleCallback(ForTfKeras, keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier`` from one epoch to another.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch (of fractions of it, if not ``staircase``); or a number, which stands for
            ``multiplier ** (epoch - start_epoch)``; without an ``initial_lr`` it is a constant factor.
        start_epoch, end_epoch: the first epoch, and the first after the last (None: no end).
        staircase: change it once an epoch, and not with every batch.
        momentum_correction: while it changes, scale the momentum in the same way (Goyal et al., 2017), where the
            optimizer's momentum is a variable (tf_keras); Keras 3 compiles it in as a constant.
        steps_per_epoch: batches in an epoch, if Keras does not know.

    Programs of Horovod 0.19 pass ``(multiplier, start_epoch, ..., initial_lr=None)``: a call whose first argument is a
    function, or that names ``initial_lr``, or that has only one argument, is understood in that way; without an
    ``initial_lr`` the optimizer's learning rate counts, and a number is a constant factor of it, as it was there.

    Raises:
        InvalidArgumentError: (a ValueError) there is no multiplier.
    """

    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in (
                ("initial_lr", inspect.Parameter.empty),
                ("multiplier", inspect.Parameter.empty),
                ("start_epoch", 0),
                ("end_epoch", None),
                ("staircase", True),
                ("momentum_correction", True),
                ("steps_per_epoch", None),
            )
        ]
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = _bind(_SCHEDULE, _SCHEDULE_OLD, args, kwargs, is_old=_is_old_schedule(args, kwargs))
        multiplier = given.get("multiplier")
        if not callable(multiplier) and not isinstance(multiplier, (int, float)):
            raise InvalidArgumentError("multiplier is a number or a function of the epoch")
        self.initial_lr: float | None = given.get("initial_lr")
        self.start_epoch: int = given.get("start_epoch", 0)
        self.end_epoch: int | None = given.get("end_epoch")
        self.staircase: bool = given.get("staircase", True) if callable(multiplier) else True
        self.momentum_correction: bool = given.get("momentum_correction", True)
        self.steps_per_epoch: int | None = given.get("steps_per_epoch")
        self._multiplier: Multiplier = multiplier
        self._is_constant = self.initial_lr is None
        self._epoch = 0
        self._momentum: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras.

        Raises:
            InvalidArgumentError: (a ValueError) ``steps_per_epoch`` is needed, and Keras does not know it.
        """
        if self.initial_lr is None:
            self.initial_lr = float(_learning_rate(self.model))
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise InvalidArgumentError("steps_per_epoch= is needed: Keras does not know how many batches there are")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(self._epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if self._momentum is not None:
            self.model.optimizer.momentum.assign(self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if logs is not None:
            logs["lr"] = float(_learning_rate(self.model))

    def factor(self, epoch: float) -> float:
        """Return the multiplier of the learning rate at a given time, counted in epochs."""
        if callable(self._multiplier):
            return float(self._multiplier(epoch))
        if self._is_constant:
            return float(self._multiplier)
        return float(self._multiplier ** (epoch - self.start_epoch))

    def _adjust(self, epoch: float) -> None:
        assert self.initial_lr is not None
        optimizer = self.model.optimizer
        before, after = float(_learning_rate(self.model)), self.initial_lr * self.factor(epoch)
        optimizer.learning_rate = after
        momentum: Any = getattr(optimizer, "momentum", None)
        if self.momentum_correction and hasattr(momentum, "assign") and before and after != before:
            self._momentum = float(array_of(momentum))
            momentum.assign(self._momentum * after / before)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs (Goyal et al., 2017).

    Args:
        initial_lr: the learning rate after the warm-up; usually one process's times the number of ranks.
        warmup_epochs: how many epochs it takes.
        momentum_correction, steps_per_epoch: as for ``LearningRateScheduleCallback``.
        verbose: 1 to print the learning rate when the warm-up has ended.

    Programs of Horovod 0.19 pass ``(warmup_epochs=5, ..., initial_lr=None)``: a call that names ``initial_lr``, or
    whose first argument is a whole number that no number follows, is understood in that way.
    """

    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in (
                ("initial_lr", inspect.Parameter.empty),
                ("warmup_epochs", 5),
                ("momentum_correction", True),
                ("steps_per_epoch", None),
                ("verbose", 0),
            )
        ]
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(_WARMUP, _WARMUP_OLD, args, kwargs, is_old=_is_old_warmup(args, kwargs))
        self.warmup_epochs: int = given.get("warmup_epochs", 5)
        self.verbose: int = given.get("verbose", 0)
        super().__init__(
            multiplier=self._warm,
            initial_lr=given.get("initial_lr"),
            start_epoch=0,
            end_epoch=self.warmup_epochs,
            staircase=False,
            momentum_correction=given.get("momentum_correction", True),
            steps_per_epoch=given.get("steps_per_epoch"),
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0:
            rate = float(_learning_rate(self.model))
            # Beside Keras's own progress and, like it, independent of log levels.
            print(f"\nEpoch {epoch + 1}: the warm-up has ended at a learning rate of {rate:g}", flush=True)  # noqa: T201

    def _warm(self, epoch: float) -> float:
        # The rate is the one at the batch's end, so that the last batch of the warm-up has the full one.
        assert self.steps_per_epoch is not None
        size = FRONTEND.size()
        return ((epoch + 1.0 / self.steps_per_epoch) * (size - 1) / self.warmup_epochs + 1) / size


class BestModelCheckpoint(ForTfKeras, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras's ModelCheckpoint that keeps the best model, and whose ``filepath`` is set later.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as for ``keras.callbacks.ModelCheckpoint``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            f"unset{ending}",  # which Keras checks here, and looks at when it saves
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras.

        Raises:
            InvalidArgumentError: (a ValueError) ``filepath`` has not been set.
        """
        if self.filepath is None:
            raise InvalidArgumentError("set the callback's filepath before training: where should the model be saved?")
        super().on_train_begin(logs)


_SCHEDULE = (
    "initial_lr",
    "multiplier",
    "start_epoch",
    "end_epoch",
    "staircase",
    "momentum_correction",
    "steps_per_epoch",
)
_SCHEDULE_OLD = (*_SCHEDULE[1:], "initial_lr")
_WARMUP = ("initial_lr", "warmup_epochs", "momentum_correction", "steps_per_epoch", "verbose")
_WARMUP_OLD = (*_WARMUP[1:], "initial_lr")


def _is_old_schedule(args: Sequence[Any], kwargs: Any) -> bool:
    if not args:
        return False
    return callable(args[0]) or "initial_lr" in kwargs or (len(args) == 1 and "multiplier" not in kwargs)


def _is_old_warmup(args: Sequence[Any], kwargs: Any) -> bool:
    if not args:
        return False
    if "initial_lr" in kwargs:
        return True
    is_count = isinstance(args[0], int) and not isinstance(args[0], bool)
    return is_count and "warmup_epochs" not in kwargs and (len(args) == 1 or isinstance(args[1], bool))


def _bind(new: Sequence[str], old: Sequence[str], args: Sequence[Any], kwargs: Any, *, is_old: bool) -> dict[str, Any]:
    order = old if is_old else new
    if len(args) > len(order):
        raise TypeError(f"at most {len(order)} arguments: {', '.join(order)}; got {len(args)}")
    given = dict(zip(order, args, strict=False))
    for name, value in kwargs.items():
        if name not in order or name in given:
            raise TypeError(f"unknown argument {name!r}" if name not in order else f"{name} is given twice")
        given[name] = value
    return given


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))  # tf_keras's variables have no path


def _check_models(models: Sequence[Sequence[tuple[str, Any]]]) -> None:
    """Check that the weights of all ranks' models, by name and shape, can be one model's.

    Raises:
        MismatchError: they cannot; the error is the same on all ranks.
    """
    first = models[0]
    for rank, other in enumerate(models):
        for (name, shape), (_, others) in zip(first, other, strict=False):
            if shape != others:
                raise MismatchError(
                    f"ranks have different models: {name} has the shape {shape} on rank 0 and {others} on rank {rank}; "
                    "build the same one on all",
                    name=name,
                )
        if len(other) != len(first):
            longer = max(first, other, key=len)
            name, shape = longer[min(len(first), len(other))]
            raise MismatchError(
                f"ranks have different models: {len(first)} weights on rank 0 and {len(other)} on rank {rank}, which "
                f"{'lacks' if longer is first else 'alone has'} {name} with the shape {shape}; build the same on all",
                name=name,
            )


def _numbers(value: Any) -> Array | None:
    """Return a metric's number or numbers, None if it is something else."""
    try:
        array = array_of(value)
    except InvalidArgumentError:
        raise
    except ValueError:  # rows of different lengths
        return None
    return array.astype(np.float64) if array.dtype.kind in "biuf" else None


def _learning_rate(model: Any) -> Any:
    return array_of(model.optimizer.learning_rate)
