"""The Params of estimators and of the models that they return, with Horovod's names.

Each Param has a ``set`` and a ``get`` method; ``estimator.explainParams()`` shows what the Params are for. None stands
for "not given", and every setter accepts it.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.param import Param, Params

from hvdgloo.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from hvdgloo.spark.common.backend import Backend
    from hvdgloo.spark.common.store import Store

__all__ = ["EstimatorParams", "ModelParams"]

T = TypeVar("T")


# Converters from a given value to the one that is kept. pyspark does not call them for None.


def _at_least(least: int) -> Callable[[str], Callable[[Any], int]]:
    def of(name: str) -> Callable[[Any], int]:
        def convert(value: Any) -> int:
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # as in pyspark.ml; values read from JSON, for example
            try:
                number = operator.index(value)
            except TypeError:
                raise ConfigError(f"{name}={value!r}: it must be a whole number") from None
            if isinstance(value, bool) or number < least:
                raise ConfigError(f"{name}={value!r}: it must be a whole number of at least {least}")
            return number

        return convert

    return of


def _a_bool(name: str) -> Callable[[Any], bool]:
    def convert(value: Any) -> bool:
        if value not in (True, False):
            raise ConfigError(f"{name}={value!r}: it must be True or False")
        return bool(value)

    return convert


def _text(name: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name}={value!r}: it must be a nonempty string")
        return value

    return convert


def _run_name(name: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        text = _text(name)(value)
        if not {"", ".", ".."}.isdisjoint(text.split("/")):
            raise ConfigError(f"{name}={value!r}: it must name a directory below the store's runs")
        return text

    return convert


def _names(name: str) -> Callable[[Any], list[str]]:
    def convert(value: Any) -> list[str]:
        if isinstance(value, str):
            raise ConfigError(f"{name}={value!r}: give a list of names: [{value!r}]")
        if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{name}={value!r}: it must be a list of names")
        return list(value)

    return convert


def _a_list(name: str) -> Callable[[Any], list[Any]]:
    def convert(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise ConfigError(f"{name}={value!r}: it must be a list")
        return list(value)

    return convert


def _numbers(name: str) -> Callable[[Any], list[float]]:
    def convert(value: Any) -> list[float]:
        try:
            numbers = [float(each) for each in value]
        except (TypeError, ValueError):
            raise ConfigError(f"{name}={value!r}: it must be a list of numbers") from None
        if not all(math.isfinite(each) for each in numbers):
            raise ConfigError(f"{name}={value!r}: a number in it is not finite")
        return numbers

    return convert


def shapes(name: str) -> Callable[[Any], list[list[int]]]:
    def convert(value: Any) -> list[list[int]]:
        try:
            shapes = [[operator.index(size) for size in shape] for shape in value]
        except TypeError:
            raise ConfigError(f"{name}={value!r}: it must be a list of shapes, for example [[-1, 28, 28]]") from None
        for shape in shapes:
            if sum(size == -1 for size in shape) > 1 or any(size < -1 or size == 0 for size in shape):
                raise ConfigError(f"{name}={value!r}: a shape must have positive sizes and one -1, for the batch")
        return shapes

    return convert


def _a_function(name: str) -> Callable[[Any], Callable[..., Any]]:
    def convert(value: Any) -> Callable[..., Any]:
        if not callable(value):
            raise ConfigError(f"{name}={value!r}: it must be a function")
        return value

    return convert


def _a_validation(name: str) -> Callable[[Any], float | str]:
    def convert(value: Any) -> float | str:
        if isinstance(value, str) and value:
            return value
        try:
            part = float(value)
        except (TypeError, ValueError):
            part = math.nan
        if isinstance(value, (bool, str)) or not 0 <= part < 1:
            raise ConfigError(f"{name}={value!r}: give a fraction of the rows in [0, 1), or the name of a column")
        return part

    return convert


def _a_pool(name: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in ("thread", "process", "dummy"):
            raise ConfigError(f"{name}={value!r}: it must be 'thread' ('process' and 'dummy' mean the same)")
        return str(value)

    return convert


def _a_backend(name: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, type) or not all(
            callable(getattr(value, each, None)) for each in ("run", "num_processes")
        ):
            raise ConfigError(
                f"{name}={value!r}: give a SparkBackend(num_proc), a LocalBackend(num_proc), or an object of a class "
                "with run() and num_processes()"
            )
        return value

    return convert


def _a_store(name: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        from hvdgloo.spark.common.store import Store

        if isinstance(value, (str, os.PathLike)):
            raise ConfigError(f"{name}={value!r}: make a store of the path: Store.create({os.fspath(value)!r})")
        if not isinstance(value, Store):
            raise ConfigError(f"{name}={value!r}: it must be a store, such as Store.create(path) returns")
        return value

    return convert


def _a_compression(name: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not all(callable(getattr(value, each, None)) for each in ("compress", "decompress")):
            raise ConfigError(f"{name}={value!r}: give one of the framework's hvd.Compression, hvd.Compression.fp16")
        return value

    return convert


def parameter(name: str, doc: str, convert: Callable[[str], Callable[[Any], T]] | None = None) -> Any:
    """Declare a Param of the class in whose body this is called; ``convert(name)`` checks its values."""
    if convert is None:
        return Param(Params._dummy(), name, doc)
    return Param(Params._dummy(), name, doc, typeConverter=convert(name))


class _Values(Params):
    """Access to Params by name, for short accessors."""

    def _with(self, **values: Any) -> Self:
        """Set the Params, and return self. None removes a value."""
        return self._set(**values)

    def _value(self, name: str) -> Any:
        """Return the value that was set unless it is None, otherwise the default, otherwise None."""
        param = self.getParam(name)
        value = self.getOrDefault(param) if self.isDefined(param) else None
        return self._defaultParamMap.get(param) if value is None else value


class EstimatorParams(_Values):
    """Params of all estimators."""

    num_proc = parameter("num_proc", "number of ranks; by default as many as Spark runs tasks at once", _at_least(1))
    model = parameter("model", "the model to train")
    backend = parameter("backend", "the backend that runs the ranks; by default SparkBackend(num_proc)", _a_backend)
    store = parameter("store", "the store for data, checkpoints and logs", _a_store)
    optimizer = parameter(
        "optimizer",
        "the optimizer; its learning rate is multiplied by the number of ranks during training",
    )
    loss = parameter("loss", "a loss, or a list with one for each label")
    metrics = parameter("metrics", "metrics in addition to the loss", _a_list)
    loss_weights = parameter("loss_weights", "the weight of each label's loss", _numbers)
    sample_weight_col = parameter("sample_weight_col", "column with each row's weight in the loss", _text)
    gradient_compression = parameter(
        "gradient_compression",
        "compression of gradients: hvd.Compression.fp16, for example",
        _a_compression,
    )
    compress_sparse_cols = parameter("compress_sparse_cols", "store columns of sparse vectors compressed", _a_bool)
    feature_cols = parameter("feature_cols", "the model's input columns, in this order", _names)
    label_cols = parameter("label_cols", "columns that the model learns to predict", _names)
    continuous_cols = parameter("continuous_cols", "kept but not used: for NVTabular", _names)
    categorical_cols = parameter("categorical_cols", "kept but not used: for NVTabular", _names)
    validation = parameter(
        "validation",
        "fraction of the rows for validation, in [0, 1), or a column that is above 0 for these rows",
        _a_validation,
    )
    callbacks = parameter("callbacks", "callbacks of the framework", _a_list)
    batch_size = parameter("batch_size", "rows of a batch on each rank", _at_least(1))
    val_batch_size = parameter("val_batch_size", "the same for validation; by default batch_size", _at_least(1))
    epochs = parameter("epochs", "number of epochs", _at_least(1))
    train_steps_per_epoch = parameter(
        "train_steps_per_epoch",
        "steps per epoch; by default as many as it takes to see each row once",
        _at_least(1),
    )
    validation_steps_per_epoch = parameter("validation_steps_per_epoch", "the same for validation", _at_least(1))
    verbose = parameter("verbose", "0: silent; 1: a line for each epoch; 2: more", _at_least(0))
    shuffle = parameter("shuffle", "shuffle the training data differently in each epoch", _a_bool)
    shuffle_buffer_size = parameter(
        "shuffle_buffer_size",
        "number of rows that are shuffled together; 0 for none, by default as many as memory allows",
        _at_least(0),
    )
    partitions_per_process = parameter(
        "partitions_per_process",
        "number of files of the written data set for each rank",
        _at_least(1),
    )
    run_id = parameter(
        "run_id",
        "the run's name in the store; a run of the same name continues after its last whole epoch",
        _run_name,
    )
    transformation_fn = parameter(
        "transformation_fn",
        "function from a pandas.DataFrame to another one, applied to the data as they are read",
        _a_function,
    )
    transformation_edit_fields = parameter(
        "transformation_edit_fields",
        "columns that transformation_fn changes or adds: (name, numpy dtype, shape of a row, nullable)",
        _a_list,
    )
    transformation_removed_fields = parameter(
        "transformation_removed_fields",
        "columns that transformation_fn removes",
        _names,
    )
    train_reader_num_workers = parameter(
        "train_reader_num_workers",
        "threads that read the training data",
        _at_least(0),
    )
    val_reader_num_workers = parameter("val_reader_num_workers", "threads that read the validation data", _at_least(0))
    reader_pool_type = parameter(
        "reader_pool_type",
        "'thread'; 'process' and 'dummy' are accepted and mean the same",
        _a_pool,
    )
    inmemory_cache_all = parameter("inmemory_cache_all", "keep all of a rank's rows in its memory", _a_bool)
    label_shapes = parameter("label_shapes", "shape of each label, the batch first as -1", shapes)
    random_seed = parameter(
        "random_seed",
        "seed of the validation split, the order of rows and the framework's random numbers; 0 by default",
        _at_least(0),
    )
    use_gpu = parameter("use_gpu", "train on the rank's GPU if there is one", _a_bool)
    mp_start_method = parameter("mp_start_method", "multiprocessing's start method in the ranks", _text)
    backward_passes_per_step = parameter(
        "backward_passes_per_step",
        "number of batches whose gradients add up to one step",
        _at_least(1),
    )
    data_module = parameter("data_module", "class of the DataModule that provides the batches")
    tensorflow_dataset_prefetch_buffer_size = parameter(
        "tensorflow_dataset_prefetch_buffer_size",
        "kept but not used: threads read ahead",
        _at_least(0),
    )

    def setNumProc(self, value: int | None) -> Self:
        return self._with(num_proc=value)

    def getNumProc(self) -> int | None:
        return self._value("num_proc")

    def setModel(self, value: Any) -> Self:
        return self._with(model=value)

    def getModel(self) -> Any:
        return self._value("model")

    def setBackend(self, value: Backend | None) -> Self:
        return self._with(backend=value)

    def getBackend(self) -> Backend | None:
        return self._value("backend")

    def setStore(self, value: Store | None) -> Self:
        return self._with(store=value)

    def getStore(self) -> Store | None:
        return self._value("store")

    def setOptimizer(self, value: Any) -> Self:
        return self._with(optimizer=value)

    def getOptimizer(self) -> Any:
        return self._value("optimizer")

    def setLoss(self, value: Any) -> Self:
        return self._with(loss=value)

    def getLoss(self) -> Any:
        return self._value("loss")

    def setMetrics(self, value: list[Any]) -> Self:
        return self._with(metrics=value)

    def getMetrics(self) -> list[Any]:
        return self._value("metrics")

    def setLossWeights(self, value: list[float] | None) -> Self:
        return self._with(loss_weights=value)

    def getLossWeights(self) -> list[float] | None:
        return self._value("loss_weights")

    def setSampleWeightCol(self, value: str | None) -> Self:
        return self._with(sample_weight_col=value)

    def getSampleWeightCol(self) -> str | None:
        return self._value("sample_weight_col")

    def setGradientCompression(self, value: Any) -> Self:
        return self._with(gradient_compression=value)

    def getGradientCompression(self) -> Any:
        return self._value("gradient_compression")

    def setCompressSparseCols(self, value: bool) -> Self:
        return self._with(compress_sparse_cols=value)

    def getCompressSparseCols(self) -> bool:
        return self._value("compress_sparse_cols")

    def setFeatureCols(self, value: list[str] | None) -> Self:
        return self._with(feature_cols=value)

    def getFeatureCols(self) -> list[str] | None:
        return self._value("feature_cols")

    def setLabelCols(self, value: list[str] | None) -> Self:
        return self._with(label_cols=value)

    def getLabelCols(self) -> list[str] | None:
        return self._value("label_cols")

    def setContinuousCols(self, value: list[str] | None) -> Self:
        return self._with(continuous_cols=value)

    def getContinuousCols(self) -> list[str] | None:
        return self._value("continuous_cols")

    def setCategoricalCols(self, value: list[str] | None) -> Self:
        return self._with(categorical_cols=value)

    def getCategoricalCols(self) -> list[str] | None:
        return self._value("categorical_cols")

    def setValidation(self, value: float | str | None) -> Self:
        return self._with(validation=value)

    def getValidation(self) -> float | str | None:
        return self._value("validation")

    def setCallbacks(self, value: list[Any]) -> Self:
        return self._with(callbacks=value)

    def getCallbacks(self) -> list[Any]:
        return self._value("callbacks")

    def setBatchSize(self, value: int) -> Self:
        return self._with(batch_size=value)

    def getBatchSize(self) -> int:
        return self._value("batch_size")

    def setValBatchSize(self, value: int | None) -> Self:
        return self._with(val_batch_size=value)

    def getValBatchSize(self) -> int | None:
        return self._value("val_batch_size")

    def setEpochs(self, value: int) -> Self:
        return self._with(epochs=value)

    def getEpochs(self) -> int:
        return self._value("epochs")

    def setTrainStepsPerEpoch(self, value: int | None) -> Self:
        return self._with(train_steps_per_epoch=value)

    def getTrainStepsPerEpoch(self) -> int | None:
        return self._value("train_steps_per_epoch")

    def setValidationStepsPerEpoch(self, value: int | None) -> Self:
        return self._with(validation_steps_per_epoch=value)

    def getValidationStepsPerEpoch(self) -> int | None:
        return self._value("validation_steps_per_epoch")

    def setVerbose(self, value: int) -> Self:
        return self._with(verbose=value)

    def getVerbose(self) -> int:
        return self._value("verbose")

    def setShuffle(self, value: bool) -> Self:
        return self._with(shuffle=value)

    def getShuffle(self) -> bool:
        return self._value("shuffle")

    def setShufflingBufferSize(self, value: int | None) -> Self:
        return self._with(shuffle_buffer_size=value)

    def getShufflingBufferSize(self) -> int | None:
        return self._value("shuffle_buffer_size")

    def setPartitionsPerProcess(self, value: int | None) -> Self:
        return self._with(partitions_per_process=value)

    def getPartitionsPerProcess(self) -> int | None:
        return self._value("partitions_per_process")

    def setRunId(self, value: str | None) -> Self:
        return self._with(run_id=value)

    def getRunId(self) -> str | None:
        return self._value("run_id")

    def setTransformationFn(self, value: Callable[..., Any] | None) -> Self:
        return self._with(transformation_fn=value)

    def getTransformationFn(self) -> Callable[..., Any] | None:
        return self._value("transformation_fn")

    def setTransformationEditFields(self, value: list[Any] | None) -> Self:
        return self._with(transformation_edit_fields=value)

    def getTransformationEditFields(self) -> list[Any] | None:
        return self._value("transformation_edit_fields")

    def setTransformationRemovedFields(self, value: list[str] | None) -> Self:
        return self._with(transformation_removed_fields=value)

    def getTransformationRemovedFields(self) -> list[str] | None:
        return self._value("transformation_removed_fields")

    def setTrainReaderNumWorker(self, value: int) -> Self:
        return self._with(train_reader_num_workers=value)

    def getTrainReaderNumWorker(self) -> int:
        return self._value("train_reader_num_workers")

    def setValReaderNumWorker(self, value: int) -> Self:
        return self._with(val_reader_num_workers=value)

    def getValReaderNumWorker(self) -> int:
        return self._value("val_reader_num_workers")

    def setReaderPoolType(self, value: str) -> Self:
        return self._with(reader_pool_type=value)

    def getReaderPoolType(self) -> str:
        return self._value("reader_pool_type")

    def setInMemoryCacheAll(self, value: bool) -> Self:
        return self._with(inmemory_cache_all=value)

    def getInMemoryCacheAll(self) -> bool:
        return self._value("inmemory_cache_all")

    def setLabelShapes(self, value: list[list[int]] | None) -> Self:
        return self._with(label_shapes=value)

    def getLabelShapes(self) -> list[list[int]] | None:
        return self._value("label_shapes")

    def setRandomSeed(self, value: int | None) -> Self:
        return self._with(random_seed=value)

    def getRandomSeed(self) -> int | None:
        return self._value("random_seed")

    def setUseGpu(self, value: bool) -> Self:
        return self._with(use_gpu=value)

    def getUseGpu(self) -> bool:
        return self._value("use_gpu")

    def setMpStartMethod(self, value: str | None) -> Self:
        return self._with(mp_start_method=value)

    def getMpStartMethod(self) -> str | None:
        return self._value("mp_start_method")

    def setBackwardPassesPerStep(self, value: int) -> Self:
        return self._with(backward_passes_per_step=value)

    def getBackwardPassesPerStep(self) -> int:
        return self._value("backward_passes_per_step")

    def setDataModule(self, value: type[Any] | None) -> Self:
        return self._with(data_module=value)

    def getDataModule(self) -> type[Any] | None:
        return self._value("data_module")

    def setTensorflowDatasetPrefetchBufferSize(self, value: int) -> Self:
        return self._with(tensorflow_dataset_prefetch_buffer_size=value)

    def getTensorflowDatasetPrefetchBufferSize(self) -> int:
        return self._value("tensorflow_dataset_prefetch_buffer_size")


class ModelParams(_Values):
    """Params of all trained models."""

    history = parameter("history", "metrics of each epoch")
    model = parameter("model", "the trained model")
    feature_columns = parameter("feature_columns", "the model's input columns, in this order", _names)
    label_columns = parameter("label_columns", "columns that it predicts", _names)
    run_id = parameter("run_id", "the run that trained it", _text)
    outputCols = parameter("outputCols", "columns that transform() adds; by default <label>__output", _names)

    def setHistory(self, value: Any) -> Self:
        return self._with(history=value)

    def getHistory(self) -> Any:
        return self._value("history")

    def setModel(self, value: Any) -> Self:
        return self._with(model=value)

    def getModel(self) -> Any:
        return self._value("model")

    def setFeatureColumns(self, value: list[str] | None) -> Self:
        return self._with(feature_columns=value)

    def getFeatureColumns(self) -> list[str] | None:
        return self._value("feature_columns")

    def setLabelColumns(self, value: list[str] | None) -> Self:
        return self._with(label_columns=value)

    def getLabelColumns(self) -> list[str] | None:
        return self._value("label_columns")

    def setRunId(self, value: str | None) -> Self:
        return self._with(run_id=value)

    def getRunId(self) -> str | None:
        return self._value("run_id")

    def setOutputCols(self, value: list[str]) -> Self:
        return self._with(outputCols=value)

    def getOutputCols(self) -> list[str]:
        return self._value("outputCols")

    _metadata = parameter("_metadata", "types and shapes of the columns")

    def _get_metadata(self) -> Any:
        return self._value("_metadata")

    # The misspelling of Horovod's first versions, which programs still use.
    setLabelColoumns = setLabelColumns
