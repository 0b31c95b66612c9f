"""The code that every rank of a ``TorchEstimator``'s job runs. It needs torch, but not Spark."""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch

import hvdgloo.torch as hvd
from hvdgloo._backends import gpu
from hvdgloo.errors import ConfigError
from hvdgloo.spark.common._logs import ScalarLogs, are_possible
from hvdgloo.spark.common._training import Array, Batch, Reader, Training, TrainingResult
from hvdgloo.spark.task import gpu_index
from hvdgloo.spark.torch._losses import Loss, Metrics, TotalLoss, constructed

Tensor = torch.Tensor
Shapes = Sequence[Sequence[int]] | None


@dataclasses.dataclass(frozen=True)
class TorchJob:
    """Torch's part of the instructions for ranks, in addition to ``Training``.

    It is pickled as one object, so that the optimizer still refers to the model's parameters.

    Attributes:
        losses: one for each label; None where ``loss_constructors`` make them.
        metrics: groups of functions.
        train_minibatch_fn: the user's step; None for the usual one.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: Sequence[Loss] | None
    loss_constructors: Sequence[Callable[..., Loss]] | None
    loss_weights: Sequence[float] | None
    metrics: Sequence[Any]
    input_shapes: Shapes
    label_shapes: Shapes
    train_minibatch_fn: Callable[..., tuple[Any, Tensor]] | None


OFFERED = ("model", "optimizer", "hvd", "feature_columns", "label_columns", "device")
"""Names of the arguments that constructors of losses may take."""


def train(training: Training, job: TorchJob) -> TrainingResult | None:
    """Train from the last whole epoch on; rank 0 returns the result."""
    # A backend that calls this in its own process may have initialized hvd itself.
    own = not hvd.is_initialized()
    if own:
        hvd.init()
    try:
        return _Loop(training, job, _device(training.use_gpu)).run()
    finally:
        if own:
            hvd.shutdown()


def _device(use_gpu: bool) -> torch.device:
    return gpu.choose(gpu_index(hvd.local_rank())) if use_gpu and gpu.count() else torch.device("cpu")


class _Loop:
    def __init__(self, training: Training, job: TorchJob, device: torch.device) -> None:
        self._training = training
        self._job = job
        self._device = device
        self._model = job.model.to(device)
        _move(job.optimizer, device)
        self._history: list[dict[str, Any]] = []
        self._epoch = self._resume()
        self._rates = [group["lr"] for group in job.optimizer.param_groups]
        for group in job.optimizer.param_groups:
            group["lr"] = group["lr"] * hvd.size()
        self._optimizer = hvd.DistributedOptimizer(
            job.optimizer,
            named_parameters=list(self._model.named_parameters()),
            compression=training.gradient_compression or hvd.Compression.none,
            backward_passes_per_step=training.backward_passes_per_step,
        )
        losses = job.losses
        if losses is None:
            offered = dict(
                zip(
                    OFFERED,
                    (self._model, self._optimizer, hvd, training.feature_cols, training.label_cols, device),
                    strict=True,
                )
            )
            losses = constructed(job.loss_constructors or (), offered)
            losses = losses * len(training.label_cols) if len(losses) == 1 else losses
        weighted = training.sample_weight_col is not None
        self._loss = TotalLoss(losses, job.loss_weights, weighted_rows=weighted)
        self._metrics = Metrics(job.metrics, training.label_cols)
        self._step = _step_of(job.train_minibatch_fn)
        self._outputs: tuple[tuple[int, ...], ...] = ()

    def _resume(self) -> int:
        """Restore the last whole epoch from rank 0's checkpoint, and return the number of the next one."""
        checkpoint = hvd.broadcast_object(self._training.resume() if hvd.rank() == 0 else None, root_rank=0)
        if checkpoint is None:
            return 0
        state = torch.load(io.BytesIO(checkpoint.archive), map_location=self._device, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._job.optimizer.load_state_dict(state["optimizer"])
        self._history = checkpoint.history
        if hvd.rank() == 0 and self._training.verbose:
            print(f"run {self._training.run_id!r} continues after epoch {checkpoint.epoch}", flush=True)  # noqa: T201
        return int(checkpoint.epoch)

    def run(self) -> TrainingResult | None:
        training, rank, size = self._training, hvd.rank(), hvd.size()
        validation: Any = nullcontext()
        if training.validation_rows:
            validation = training.batches(rank, size, validation=True, dtype=np.float32)
        with ExitStack() as stack:
            # Numbers are read as float32, which is what ``tensor`` needs, so that the loop converts nothing.
            batches = stack.enter_context(training.batches(rank, size, dtype=np.float32))
            validation_batches = stack.enter_context(validation)
            logs = stack.enter_context(_Logs(training)) if rank == 0 and training.store.saving_runs else None
            stack.enter_context(_own_random_numbers(self._device))
            for epoch in range(self._epoch, training.epochs):
                record: dict[str, Any] = {"epoch": epoch, "train": self._train(batches, epoch)}
                if validation_batches is not None:
                    record["validation"] = self._validate(validation_batches)
                self._history.append(record)
                if rank == 0:
                    training.save(epoch + 1, self._state(), self._history, size)
                    self._report(record)
                if logs is not None:
                    logs.write(record)
            if not self._outputs:
                self._look(batches)
        return TrainingResult(self._history, self._state(), self._outputs) if rank == 0 else None

    def _train(self, batches: Reader, epoch: int) -> dict[str, Any]:
        # Random numbers depend only on the epoch, so that a resumed run draws the same ones as an uninterrupted one.
        seed = np.random.SeedSequence([self._training.seed, epoch, hvd.rank()]).generate_state(1, np.uint64)
        torch.manual_seed(int(seed[0]))
        self._model.train()
        total = _Total(len(self._metrics), self._device)
        number = -1
        for number, batch in enumerate(batches.epoch(epoch)):
            inputs, labels, weights = self._tensors(batch)
            outputs, loss = self._step(
                self._model,
                self._optimizer,
                self._transform,
                self._loss,
                inputs,
                labels,
                weights,
                self._training.backward_passes_per_step,
                number,
            )
            self._count(total, len(batch), outputs, labels, loss)
        if self._step is train_minibatch and (number + 1) % self._training.backward_passes_per_step:
            self._optimizer.step()  # for the last batches, which are too few for a whole step
        return self._averaged(total)

    def _validate(self, batches: Reader) -> dict[str, Any]:
        self._model.eval()
        total = _Total(len(self._metrics), self._device)
        with torch.no_grad():
            for batch in batches.epoch(0):
                inputs, labels, weights = self._tensors(batch)
                outputs, reshaped = self._transform(self._model(*inputs), labels)
                self._count(total, len(batch), outputs, labels, self._loss(outputs, reshaped, weights))
        return self._averaged(total)

    def _count(self, total: _Total, rows: int, outputs: Any, labels: Sequence[Tensor], loss: Tensor) -> None:
        measured: list[Tensor] = []
        if len(self._metrics) or not self._outputs:
            with torch.no_grad():
                outputs, reshaped = self._transform(outputs, labels)
                self._outputs = self._outputs or tuple(tuple(output.shape[1:]) for output in outputs)
                measured = self._metrics.values(outputs, reshaped)
        total.add(rows, [loss.detach(), *measured])

    def _averaged(self, total: _Total) -> dict[str, Any]:
        """Return the means over the rows of all ranks."""
        loss, *metrics = total.mean()
        return {"loss": loss, "all_metrics": self._metrics.named(metrics)}

    def _tensors(self, batch: Batch) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        job = self._job
        inputs = tensors(batch.features, job.input_shapes, self._device)
        labels = tensors(batch.labels, job.label_shapes, self._device)
        weights = None if batch.weights is None else tensor(batch.weights).to(self._device)
        return inputs, labels, weights

    def _transform(self, outputs: Any, labels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs as a list, and the labels in the outputs' shapes."""
        listed = outputs_of(outputs, self._training.label_cols)
        if len(listed) != len(labels):
            raise ConfigError(f"the model has {len(listed)} outputs for {len(labels)} label_cols")
        if self._job.label_shapes is not None:
            return listed, list(labels)
        return listed, [like(output, label) for output, label in zip(listed, labels, strict=True)]

    def _look(self, batches: Reader) -> None:
        """Determine the shapes of the outputs for a run that has nothing left to train."""
        self._model.eval()
        with torch.no_grad():
            inputs, _, _ = self._tensors(next(batches.epoch(0)))
            outputs = outputs_of(self._model(*inputs), self._training.label_cols)
            self._outputs = tuple(tuple(each.shape[1:]) for each in outputs)

    def _state(self) -> bytes:
        """Save model and optimizer, with learning rates for one rank, for ``torch.load(weights_only=True)``."""
        optimizer = self._job.optimizer.state_dict()
        for group, own, rate in zip(
            optimizer["param_groups"], self._job.optimizer.param_groups, self._rates, strict=True
        ):
            # A rate that was not changed is restored exactly.
            group["lr"] = rate if own["lr"] == rate * hvd.size() else own["lr"] / hvd.size()
        buffer = io.BytesIO()
        torch.save({"model": self._model.state_dict(), "optimizer": optimizer}, buffer)
        return buffer.getvalue()

    def _report(self, record: dict[str, Any]) -> None:
        if self._training.verbose:
            text = f"epoch {record['epoch'] + 1}/{self._training.epochs}: loss {record['train']['loss']:.4g}"
            if "validation" in record:
                text += f", validation loss {record['validation']['loss']:.4g}"
            print(text, flush=True)  # noqa: T201


class _Logs:
    """Logs of metrics for TensorBoard, in the run's directory; none if TensorBoard is not installed."""

    def __init__(self, training: Training) -> None:
        self._store = training.store
        self._stack = ExitStack()
        self._logs: dict[str, ScalarLogs] = {}

    def __enter__(self) -> _Logs:
        if are_possible():
            self._folder = self._stack.enter_context(self._store.get_local_output_dir())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Add an epoch's values, and copy the files to the store."""
        if not are_possible():
            return
        for part in ("train", "validation"):
            if part not in record:
                continue
            if part not in self._logs:
                folder = os.path.join(self._folder, self._store.logs_subdir, part)
                self._logs[part] = self._stack.enter_context(ScalarLogs(folder))
            measured = record[part]
            values = {name: value for group in measured["all_metrics"] for name, value in group.items()}
            self._logs[part].write(record["epoch"], {"loss": measured["loss"], **values})
        self._store.sync(self._folder)


_TOGETHER = 256
"""Number of batches whose values are added up at once, which takes as many operations as a small step."""


class _Total:
    """Sums over batches, weighted by rows. They stay on the device until the end of the epoch."""

    def __init__(self, metrics: int, device: torch.device) -> None:
        self._sums = torch.zeros(2 + metrics, dtype=torch.float64, device=device)
        self._rows: list[int] = []
        self._values: list[Sequence[Tensor]] = []

    def add(self, rows: int, values: Sequence[Tensor]) -> None:
        """Add a batch.

        Args:
            rows: its number of rows.
            values: scalars: the loss, then the metrics.
        """
        self._rows.append(rows)
        self._values.append(values)
        if len(self._rows) == _TOGETHER:
            self._fold()

    def _fold(self) -> None:
        device = self._sums.device
        rows = torch.tensor(self._rows, dtype=torch.float64, device=device)
        values = [torch.stack([value.to(device) for value in of_one]) for of_one in zip(*self._values, strict=True)]
        self._sums[0] += rows.sum()
        self._sums[1:] += torch.stack([of_one.to(torch.float64) @ rows for of_one in values])
        self._rows, self._values = [], []

    def mean(self) -> list[float]:
        if self._rows:
            self._fold()
        rows, *sums = hvd.allreduce(self._sums, op=hvd.Sum, name="estimator.mean").tolist()
        return [each / rows for each in sums]


def train_minibatch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    transform_outputs: Callable[[Any, Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]],
    loss_fn: TotalLoss,
    inputs: Sequence[Tensor],
    labels: Sequence[Tensor],
    sample_weights: Tensor | None,
    backward_passes_per_step: int = 1,
    batch_idx: int = 0,
) -> tuple[list[Tensor], Tensor]:
    """Train on one batch; the default ``train_minibatch_fn``."""
    if batch_idx % backward_passes_per_step == 0:
        optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    scaled = loss if backward_passes_per_step == 1 else loss / backward_passes_per_step
    scaled.backward()  # type: ignore[no-untyped-call]
    if (batch_idx + 1) % backward_passes_per_step == 0:
        optimizer.step()
    return outputs, loss


_SHORT = 7
"""Number of arguments of a ``train_minibatch_fn`` in Horovod's first versions; two were added later."""


def _step_of(function: Callable[..., Any] | None) -> Callable[..., tuple[Any, Tensor]]:
    if function is None:
        return train_minibatch
    if takes(function) == _SHORT:
        return lambda *arguments: function(*arguments[:_SHORT])
    return function


def takes(function: Callable[..., Any]) -> int | None:
    """Return the number of a step's arguments that a function takes, 7 or 9; None if it accepts neither number.

    A parameter with a default does not count unless it has the name of a step's argument, since it may be the
    function's own.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    variadic = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    named = "backward_passes_per_step" in signature.parameters
    required = sum(each.default is each.empty for each in parameters if each.kind is not each.VAR_KEYWORD)
    number = _SHORT + 2 if variadic or named or required > _SHORT else _SHORT
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return None
    return number


def tensor(values: Array) -> Tensor:
    """Convert numbers to a float32 tensor, as in Horovod; losses convert labels for indexing with ``long()``."""
    return torch.from_numpy(values.astype(np.float32, copy=not values.flags.writeable))


def tensors(columns: Sequence[Array], shapes: Shapes, device: torch.device) -> list[Tensor]:
    """Convert columns to tensors in the requested shapes; the batch's size may be -1 or missing in them."""
    found = []
    for number, values in enumerate(columns):
        value = tensor(values).to(device)
        if shapes is not None:
            shape = list(shapes[number])
            value = value.reshape(shape if -1 in shape else [len(values), *shape])
        found.append(value)
    return found


def like(output: Tensor, label: Tensor) -> Tensor:
    """Reshape a label to its output's shape, if they differ only in axes of length 1, or one of them is flat.

    A label with another number of values, such as a class index, is returned unchanged.

    Raises:
        ConfigError: both have several axes that differ, so that reshaping would mix up values.
    """
    if label.shape == output.shape or label.numel() != output.numel():
        return label
    long_label, long_output = ([length for length in each.shape if length != 1] for each in (label, output))
    flat = label.shape[:1] == output.shape[:1] and any(
        sum(length != 1 for length in each.shape[1:]) <= 1 for each in (label, output)
    )
    if long_label != long_output and not flat:
        raise ConfigError(
            f"an output of shape {tuple(output.shape)} and its label of shape {tuple(label.shape)} have equally many "
            f"values in different axes: give the label's shape in label_shapes"
        )
    return label.reshape(output.shape)


def outputs_of(outputs: Any, labels: Sequence[str]) -> list[Tensor]:
    """Return a model's outputs in the order of their labels; a dictionary's by name, unless it has only one.

    Raises:
        ConfigError: a dictionary does not have the labels' names, or an output is not a tensor.
    """
    if isinstance(outputs, Mapping):
        if set(labels) <= set(outputs):
            outputs = [outputs[name] for name in labels]
        elif len(outputs) == len(labels) == 1:
            outputs = list(outputs.values())
        else:
            raise ConfigError(
                f"the model returns a dictionary of {', '.join(map(repr, outputs))}, but label_cols are "
                f"{', '.join(map(repr, labels))}: name its outputs like the labels, or return them in the labels' order"
            )
    listed = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    for number, output in enumerate(listed):
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"output {number} of the model is of type {type(output).__name__}: return a tensor, or for several "
                "labels a tuple of tensors or a dictionary with the labels' names"
            )
    return listed


def _move(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer that has been used before to the device; parameters are moved in place."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _own_random_numbers(device: torch.device) -> Any:
    """Keep the caller's random numbers unaffected where a backend trains in the caller's process."""
    # Only this rank's GPU: the others belong to other ranks, and accessing one takes some of its memory.
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
