"""``TorchEstimator`` and ``TorchModel``."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pyspark import keyword_only

from hvdgloo.errors import ConfigError
from hvdgloo.spark.common import util
from hvdgloo.spark.common.estimator import ColumnShape, DataShapes, HorovodEstimator, HorovodModel, Rows
from hvdgloo.spark.common.params import parameter, shapes
from hvdgloo.spark.torch._codecs import ModuleCodec, OptimizerCodec
from hvdgloo.spark.torch._losses import as_list, check_constructor, for_each_label, unreduced
from hvdgloo.spark.torch._predictor import TorchPredictor, shapes_of_outputs
from hvdgloo.spark.torch._remote import OFFERED, TorchJob, takes, train

if TYPE_CHECKING:
    from typing_extensions import Self

    from hvdgloo.spark.common._checkpoints import Signature
    from hvdgloo.spark.common._predicting import Predictor
    from hvdgloo.spark.common._training import Training, TrainingResult
    from hvdgloo.spark.common.backend import Backend
    from hvdgloo.spark.common.store import Store

__all__ = ["TorchEstimator", "TorchModel"]


class TorchEstimator(HorovodEstimator):
    """Estimator that trains a PyTorch model on a DataFrame.

    Args:
        num_proc: number of ranks; by default as many as Spark runs tasks at once. Not together with ``backend``.
        data_module: class of the DataModule that provides the batches; by default they are read from Parquet.
        model: a ``torch.nn.Module`` that is called with a tensor for each of ``feature_cols``, and returns a tensor
            for each of ``label_cols``.
        backend: the backend that runs the ranks; by default ``SparkBackend(num_proc)``.
        store: the store for data, checkpoints and logs.
        optimizer: an optimizer over the model's parameters. Its learning rates are multiplied by the number of ranks
            during training; checkpoints and the returned model have the given ones.
        loss: a function of output and label, or a list with one for each label.
        loss_constructors: functions that make the losses on each rank, instead of ``loss``. They may take ``model``,
            ``optimizer``, ``hvd``, ``feature_columns``, ``label_columns`` and ``device``, by these names.
        metrics: groups of functions of output and label: a group is a function, or a list with one for each label.
        loss_weights: the weight of each label's loss; by default they are equal and add up to 1.
        sample_weight_col: column with a weight for each row, by which its loss is multiplied.
        gradient_compression: ``hvd.Compression.fp16``, for example.
        feature_cols: the model's input columns, each passed as a float32 tensor of shape (rows, numbers), or (rows,)
            for columns of single numbers.
        continuous_cols, categorical_cols: kept but not used.
        input_shapes: the shape of each feature's tensor, the batch first as -1: ``[[-1, 1, 28, 28]]``.
        validation: the fraction of the rows for validation, or a column that is above 0 for these rows.
        label_cols: columns that the model learns to predict, each as a float32 tensor.
        callbacks: not supported for torch: an error unless empty.
        batch_size, val_batch_size: rows of a batch on each rank.
        epochs: number of epochs, including an earlier ``fit`` with the same ``run_id``.
        verbose: 0 to be silent.
        random_seed: seed of the validation split, the order of rows and torch's random numbers; by default 0.
        shuffle: shuffle rows differently in each epoch.
        shuffle_buffer_size: number of rows that are shuffled together; 0 for none, by default as many as memory allows.
        partitions_per_process: number of files of the data set for each rank.
        run_id: the run's name in the store. A run with a checkpoint continues after its last whole epoch.
        train_minibatch_fn: a training step: ``fn(model, optimizer, transform_outputs, loss_fn, inputs, labels,
            sample_weights)``, or with ``backward_passes_per_step, batch_idx`` as well; it returns outputs and loss.
        train_steps_per_epoch, validation_steps_per_epoch: steps per epoch; by default as many as it takes to see every
            row once.
        transformation_fn, transformation_edit_fields, transformation_removed_fields: a function from a
            pandas.DataFrame to another one, applied as data are read; and the columns that it changes or adds, and
            removes.
        train_reader_num_workers, val_reader_num_workers: number of threads that read.
        reader_pool_type: 'thread'; 'process' and 'dummy' mean the same.
        label_shapes: the shape of each label's tensor, the batch first as -1; by default the output's, if it has as
            many numbers.
        inmemory_cache_all: keep each rank's rows in memory.
        use_gpu: train on the task's GPU, or the local rank's.
        mp_start_method: multiprocessing's start method in the ranks.
        backward_passes_per_step: number of batches whose gradients add up to one step.
        compress_sparse_cols: store sparse vectors compressed.

    Raises:
        ConfigError: (a ValueError) an argument cannot be used, or two contradict each other.
    """

    _run_prefix: ClassVar[str] = "pytorch"
    _checkpoint_filename: ClassVar[str] = "checkpoint"
    _codecs = {"model": ModuleCodec(), "optimizer": OptimizerCodec()}

    input_shapes = parameter("input_shapes", "shape of each feature, the batch first as -1", shapes)
    loss_constructors = parameter("loss_constructors", "functions that make the losses on each rank")
    train_minibatch_fn = parameter("train_minibatch_fn", "a training step, instead of the usual one")

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        data_module: type[Any] | None = None,
        model: torch.nn.Module | None = None,
        backend: Backend | None = None,
        store: Store | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Any = None,
        loss_constructors: Any = None,
        metrics: Sequence[Any] | None = None,
        loss_weights: Sequence[float] | None = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        feature_cols: Sequence[str] | None = None,
        continuous_cols: Sequence[str] | None = None,
        categorical_cols: Sequence[str] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        validation: float | str | None = None,
        label_cols: Sequence[str] | None = None,
        callbacks: Sequence[Any] | None = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        random_seed: int | None = None,
        shuffle: bool | None = None,
        shuffle_buffer_size: int | None = None,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_minibatch_fn: Callable[..., Any] | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Callable[..., Any] | None = None,
        transformation_edit_fields: Sequence[Any] | None = None,
        transformation_removed_fields: Sequence[str] | None = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        inmemory_cache_all: bool | None = None,
        use_gpu: bool | None = None,
        mp_start_method: str | None = None,
        backward_passes_per_step: int | None = None,
        compress_sparse_cols: bool | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(input_shapes=None, loss_constructors=None, train_minibatch_fn=None)
        self._initialize(self._input_kwargs)

    def setInputShapes(self, value: Sequence[Sequence[int]] | None) -> Self:
        return self._with(input_shapes=value)

    def getInputShapes(self) -> list[list[int]] | None:
        return self._value("input_shapes")

    def setLossConstructors(self, value: Any) -> Self:
        return self._with(loss_constructors=value)

    def getLossConstructors(self) -> Any:
        return self._value("loss_constructors")

    def setTrainMinibatchFn(self, value: Callable[..., Any] | None) -> Self:
        return self._with(train_minibatch_fn=value)

    def getTrainMinibatchFn(self) -> Callable[..., Any] | None:
        return self._value("train_minibatch_fn")

    # Checks.

    def _check_contradictions(self) -> None:
        super()._check_contradictions()
        if self.getLoss() is not None and self.getLossConstructors() is not None:
            raise ConfigError("loss and loss_constructors exclude each other: give only one")
        if self.getCallbacks():
            raise ConfigError(
                "callbacks are not supported by a TorchEstimator: use a train_minibatch_fn, which sees each batch, or "
                "metrics, which see each output"
            )

    def _check_settings(self) -> None:
        super()._check_settings()
        model, optimizer, labels = self.getModel(), self.getOptimizer(), self.getLabelCols() or []
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model={model!r}: a TorchEstimator trains a torch.nn.Module")
        if any(isinstance(each, torch.nn.UninitializedParameter) for each in model.parameters()):
            raise ConfigError("model has lazy modules without parameters yet: call it once with a batch")
        if optimizer is None:
            raise ConfigError(
                "optimizer is not set: TorchEstimator(optimizer=torch.optim.SGD(model.parameters(), ...))"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer={optimizer!r}: it must be an optimizer of torch.optim")
        own = {id(each) for each in model.parameters()}
        if not all(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            raise ConfigError(
                "optimizer belongs to another model: create it with model.parameters() of the given model"
            )
        self._check_losses(labels)
        if self.getInputShapes() is not None:
            self._one_for_each("input_shapes", self.getInputShapes(), "feature_cols", self.getFeatureCols())
        if self.getLabelShapes() is not None:
            self._one_for_each("label_shapes", self.getLabelShapes(), "label_cols", labels)
        step = self.getTrainMinibatchFn()
        if step is not None and takes(step) is None:
            raise ConfigError(
                "train_minibatch_fn must take (model, optimizer, transform_outputs, loss_fn, inputs, labels, "
                "sample_weights), or these and (backward_passes_per_step, batch_idx)"
            )

    def _check_losses(self, labels: Sequence[str]) -> None:
        loss, constructors = self.getLoss(), self.getLossConstructors()
        if loss is None and constructors is None:
            raise ConfigError("loss is not set: TorchEstimator(loss=...), or loss_constructors=...")
        if loss is not None:
            losses = for_each_label("loss", loss, labels)
            if self.getSampleWeightCol() is not None:
                for each in losses:
                    unreduced(each)
        else:
            for constructor in for_each_label("loss_constructors", constructors, labels):
                check_constructor(constructor, OFFERED)
        for group in self.getMetrics():
            for_each_label("metrics", group, labels)

    def _one_for_each(self, name: str, given: Any, columns_name: str, columns: Any) -> None:
        if len(given) != len(columns):
            raise ConfigError(f"{name} has {len(given)} shapes for {len(columns)} {columns_name}: give one for each")

    def _check_model(self, data: DataShapes, rows: Rows) -> None:
        if self.getTransformationFn() is not None:
            return  # the model's inputs are known only when the data are read
        features = self.getFeatureCols() or []  # a column may be there twice
        util.check_shape_compatibility(
            data.metadata,
            features,
            list(data.labels),
            input_shapes=self.getInputShapes(),
            label_shapes=self.getLabelShapes(),
        )
        for name, column in {**data.features, **data.labels}.items():
            if column.size is None:
                raise ConfigError(f"column {name!r} is binary: convert it to numbers in a transformation_fn")
        if _needs_gpu(self.getModel()):
            return
        zeros = [(name, _zeros(2, data.features[name])) for name in features]
        labels = self.getLabelCols() or []
        outputs = shapes_of_outputs(copy.deepcopy(self.getModel()), zeros, self.getInputShapes(), labels)
        if len(outputs) != len(labels):
            raise ConfigError(f"the model has {len(outputs)} outputs for {len(labels)} label_cols")

    # Training.

    def _signature(self) -> Signature:
        return [(name, tuple(each.shape)) for name, each in self.getModel().named_parameters()]

    def _trainer(self, training: Training) -> Callable[[], TrainingResult | None]:
        labels = self.getLabelCols() or []
        loss = self.getLoss()
        constructors = self.getLossConstructors()
        # A backend may call this in the driver's process; the user's objects must stay unchanged, for another fit().
        model, optimizer = copy.deepcopy((self.getModel(), self.getOptimizer()))
        job = TorchJob(
            model=model,
            optimizer=optimizer,
            losses=None if loss is None else for_each_label("loss", loss, labels),
            loss_constructors=None if constructors is None else as_list(constructors),
            loss_weights=self.getLossWeights(),
            metrics=self.getMetrics(),
            input_shapes=self.getInputShapes(),
            label_shapes=self.getLabelShapes(),
            train_minibatch_fn=self.getTrainMinibatchFn(),
        )
        return functools.partial(train, training, job)

    def _make_model(self, result: TrainingResult, run_id: str, metadata: dict[str, dict[str, Any]]) -> TorchModel:
        # Copied together, so that the optimizer's copy refers to the parameters of the model's copy.
        model, optimizer = copy.deepcopy((self.getModel(), self.getOptimizer()))
        state = torch.load(io.BytesIO(result.state), map_location="cpu", weights_only=True)
        model.to("cpu").load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return TorchModel(
            history=result.history,
            model=model,
            feature_columns=self.getFeatureCols(),
            input_shapes=self.getInputShapes(),
            label_columns=self.getLabelCols(),
            optimizer=optimizer,
            run_id=run_id,
            _metadata=metadata,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
        )


class TorchModel(HorovodModel):
    """A trained PyTorch model: ``transform`` adds its outputs to a DataFrame.

    Args:
        history: a dictionary for each epoch: ``{"epoch": 0, "train": {"loss": ..., "all_metrics": [...]}}``, and
            ``"validation"`` if there was any.
        model: the model.
        feature_columns, input_shapes, label_columns: as for the estimator.
        optimizer: the optimizer over the model's parameters, with its state after training and learning rates for one
            rank.
        run_id: the run that trained the model.
        loss, loss_constructors: as for the estimator.
    """

    _codecs = {"model": ModuleCodec(), "optimizer": OptimizerCodec()}

    optimizer = parameter("optimizer", "the optimizer, with its state after training")
    input_shapes = parameter("input_shapes", "shape of each feature, the batch first as -1", shapes)
    loss = parameter("loss", "the loss with which it was trained")
    loss_constructors = parameter("loss_constructors", "functions that made the losses")

    @keyword_only
    def __init__(
        self,
        *,
        history: list[dict[str, Any]] | None = None,
        model: torch.nn.Module | None = None,
        feature_columns: Sequence[str] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        label_columns: Sequence[str] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        run_id: str | None = None,
        _metadata: Mapping[str, Any] | None = None,
        loss: Any = None,
        loss_constructors: Any = None,
    ) -> None:
        super().__init__()
        self._setDefault(optimizer=None, input_shapes=None, loss=None, loss_constructors=None)
        self._with(**{name: value for name, value in self._input_kwargs.items() if value is not None})

    def getModel(self) -> torch.nn.Module:
        """Return the trained model, on the CPU."""
        return self._value("model")

    def getHistory(self) -> list[dict[str, Any]]:
        """Return a dictionary for each epoch."""
        return self._value("history")

    def setOptimizer(self, value: torch.optim.Optimizer | None) -> Self:
        return self._with(optimizer=value)

    def getOptimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer over the model's parameters, with its state after training."""
        return self._value("optimizer")

    def setInputShapes(self, value: Sequence[Sequence[int]] | None) -> Self:
        return self._with(input_shapes=value)

    def getInputShapes(self) -> list[list[int]] | None:
        return self._value("input_shapes")

    def setLoss(self, value: Any) -> Self:
        return self._with(loss=value)

    def getLoss(self) -> Any:
        return self._value("loss")

    def setLossConstructors(self, value: Any) -> Self:
        return self._with(loss_constructors=value)

    def getLossConstructors(self) -> Any:
        return self._value("loss_constructors")

    def _predictor(self) -> Predictor:
        return TorchPredictor(self.getModel(), self.getInputShapes(), self.getLabelColumns() or [])

    def _outputs(self) -> Sequence[tuple[int, ...]]:
        metadata, shapes = self._get_metadata() or {}, self.getInputShapes()
        zeros = []
        for number, name in enumerate(self.getFeatureColumns() or []):
            if shapes is not None:
                numbers = math.prod(size for size in shapes[number] if size != -1)
                zeros.append((name, np.zeros((2, numbers), np.float32)))
            elif name in metadata:
                zeros.append((name, _zeros(2, DataShapes.of(metadata, [name], []).features[name])))
            else:
                raise ConfigError("the shapes of the model's outputs are not known: set input_shapes")
        return shapes_of_outputs(copy.deepcopy(self.getModel()), zeros, shapes, self.getLabelColumns() or [])


def _zeros(rows: int, column: ColumnShape) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros((rows,) if column.scalar else (rows, column.size or 1), np.float32)


def _needs_gpu(model: torch.nn.Module) -> bool:
    return any(each.device.type != "cpu" for each in (*model.parameters(), *model.buffers()))
