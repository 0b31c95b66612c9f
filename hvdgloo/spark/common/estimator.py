"""What the estimators of all frameworks do alike, and the models that they return.

``fit`` goes: what was set is checked, the DataFrame is written to the store, shapes are checked, the backend's ranks
train, and what rank 0 brings back becomes a model. A framework's estimator fills in the hooks (``_check_model``,
``_trainer``, ``_make_model``); what ranks run is in modules that need no Spark.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Estimator, Model
from pyspark.sql.types import DoubleType, StructField, StructType

from hvdgloo.errors import ConfigError, JobFailedError
from hvdgloo.spark.common import constants, util
from hvdgloo.spark.common._predicting import Feature, Predictor, predicting
from hvdgloo.spark.common._training import Array, Reading, Training, TrainingResult, on_rank
from hvdgloo.spark.common.backend import Backend, SparkBackend
from hvdgloo.spark.common.params import EstimatorParams, ModelParams
from hvdgloo.spark.common.serialization import HorovodReadable, HorovodWritable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from hvdgloo.spark.common._checkpoints import Signature
    from hvdgloo.spark.common._metadata import Metadata
    from hvdgloo.spark.common.store import RemoteStore, Store

__all__ = ["HorovodEstimator", "HorovodModel"]

_DEFAULT_CHECKPOINT = "checkpoint"
"""What a store calls a checkpoint where the user did not say; the framework then chooses."""


_FEW = 2
"""Rows on which a model is tried: more than one, so that an axis of length 1 is not taken for the batch's."""

Rows = Callable[[], "list[Array]"]


@dataclasses.dataclass(frozen=True)
class ColumnShape:
    """A column as the model meets it.

    Attributes:
        spark_type: the class of its type: pyspark's, or a vector's.
        size: how many numbers a row has; None where only reading the data tells.
        scalar: whether a row is a number, and no vector or array of one.
    """

    spark_type: type[Any]
    size: int | None
    scalar: bool


@dataclasses.dataclass(frozen=True)
class DataShapes:
    """What is known of the data before training, by column, in the estimator's order."""

    features: Mapping[str, ColumnShape]
    labels: Mapping[str, ColumnShape]
    metadata: Metadata

    @classmethod
    def of(cls, metadata: Metadata, features: Sequence[str], labels: Sequence[str]) -> DataShapes:
        def shapes(names: Sequence[str]) -> dict[str, ColumnShape]:
            return {name: _column_shape(metadata[name]) for name in names}

        return cls(shapes(features), shapes(labels), metadata)


def _column_shape(facts: Mapping[str, Any]) -> ColumnShape:
    return ColumnShape(facts["spark_data_type"], facts["shape"], facts["intermediate_format"] == constants.NOCHANGE)


class HorovodEstimator(Estimator, EstimatorParams, HorovodWritable, HorovodReadable):
    """Trains a model on a DataFrame, on several ranks: the base of ``KerasEstimator`` and ``TorchEstimator``."""

    _run_prefix: ClassVar[str]
    """Begins the name of a run that was not given one."""

    _checkpoint_filename: ClassVar[str]

    _not_saved: ClassVar[frozenset[str]] = frozenset({"backend", "store"})

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            num_proc=None,
            model=None,
            backend=None,
            store=None,
            optimizer=None,
            loss=None,
            metrics=[],
            loss_weights=None,
            sample_weight_col=None,
            gradient_compression=None,
            compress_sparse_cols=False,
            feature_cols=None,
            label_cols=None,
            continuous_cols=None,
            categorical_cols=None,
            validation=None,
            callbacks=[],
            batch_size=32,
            val_batch_size=None,
            epochs=1,
            train_steps_per_epoch=None,
            validation_steps_per_epoch=None,
            verbose=1,
            shuffle=True,
            shuffle_buffer_size=None,
            partitions_per_process=10,
            run_id=None,
            transformation_fn=None,
            transformation_edit_fields=None,
            transformation_removed_fields=None,
            train_reader_num_workers=2,
            val_reader_num_workers=2,
            reader_pool_type="thread",
            inmemory_cache_all=False,
            label_shapes=None,
            random_seed=None,
            use_gpu=True,
            mp_start_method=None,
            backward_passes_per_step=1,
            data_module=None,
            tensorflow_dataset_prefetch_buffer_size=0,
        )

    def _initialize(self, given: Mapping[str, Any]) -> None:
        """Set what the constructor was given, and check what can be checked without data.

        What is not set yet may be set later, so only contradictions are errors.
        """
        self._with(**{name: value for name, value in given.items() if value is not None})
        self._check_contradictions()

    # Fitting.

    def fit(self, df: DataFrame, params: Any = None) -> Any:
        """Train on a DataFrame.

        It is written to the store first, as Parquet, where the ranks read it. A run whose ``run_id`` has a checkpoint
        goes on after its last whole epoch.

        Args:
            df: rows with the columns of features and labels.
            params: Params to change for this call, ``{estimator.epochs: 3}``; or a list of such, for a model each.

        Returns:
            the model, a ``HorovodModel``; a list of models for a list of params.

        Raises:
            ConfigError: (a ValueError) something is not set, or does not fit the other things; the text says which.
            DataError: (a ValueError) the data cannot be trained on: columns, types, nulls, shapes, too few rows.
            StoreError: the store cannot be written, or is not shared by driver and ranks.
            LaunchError: ranks could not be started.
            JobFailedError: a rank was killed; what a rank raises is raised here as it is.
        """
        return super().fit(df, params)

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """Train on Parquet files that are in the store already, at ``store.get_train_data_path(dataset_idx)``.

        They may be any flat Parquet, Spark's vectors included. Validation, if ``validation`` is set, is at
        ``store.get_val_data_path(dataset_idx)``.

        Args:
            params: Params to change for this call.
            dataset_idx: number of the data set in the store; None for the paths without a number.

        Returns and raises as ``fit``.
        """
        return (self.copy(params) if params else self)._fit_on_parquet(dataset_idx)

    def _fit(self, df: DataFrame) -> HorovodModel:
        self._check_settings()
        backend = self._backend()
        store, features, labels = self._needed()
        with util.prepare_data(
            backend.num_processes(),
            store,
            df,
            label_columns=labels,
            feature_columns=features,
            validation=self.getValidation(),
            sample_weight_col=self.getSampleWeightCol(),
            compress_sparse=self.getCompressSparseCols(),
            partitions_per_process=self.getPartitionsPerProcess() or 1,
            verbose=self.getVerbose(),
            seed=self._seed(),
        ) as dataset_idx:
            train_rows, validation_rows, metadata, _ = util.get_dataset_properties(dataset_idx)
            return self._train(backend, store, dataset_idx, train_rows, validation_rows, metadata)

    def _fit_on_parquet(self, dataset_idx: int | None) -> HorovodModel:
        self._check_settings()
        backend = self._backend()
        store, features, labels = self._needed()
        validation = util.check_validation(self.getValidation())
        train_rows, validation_rows, metadata, _ = util.get_simple_meta_from_parquet(
            store,
            label_columns=labels,
            feature_columns=features,
            sample_weight_col=self.getSampleWeightCol(),
            dataset_idx=dataset_idx,
        )
        if validation is None:
            validation_rows = 0
        util.check_dataset(backend.num_processes(), train_rows, validation_rows, validation)
        return self._train(backend, store, dataset_idx, train_rows, validation_rows, metadata)

    def _train(
        self,
        backend: Backend,
        store: Store,
        dataset_idx: int | None,
        train_rows: int,
        validation_rows: int,
        metadata: Metadata,
    ) -> HorovodModel:
        run_id = self.getRunId() or f"{self._run_prefix}_{int(time.time())}_{uuid.uuid4().hex[:6]}"

        def rows() -> list[Array]:
            return _first_rows(self._training(store.to_remote(run_id, dataset_idx), run_id, train_rows, 0))

        self._check_model(DataShapes.of(metadata, self.getFeatureCols() or [], self.getLabelCols() or []), rows)
        with store.probed() as probes:
            remote = store.to_remote(run_id, dataset_idx, probes=probes)
            training = dataclasses.replace(
                self._training(remote, run_id, train_rows, validation_rows), signature=self._signature()
            )
            training.resume()  # a checkpoint of another model is found before ranks start
            task = functools.partial(on_rank, training.store, self.getMpStartMethod(), self._trainer(training))
            with _naming(training):
                results = _run(backend, task, self._backend_env())
        result = next((each for each in results if each is not None), None)
        if result is None:
            raise JobFailedError(f"{type(backend).__name__}.run() returned the result of no rank")
        return self._make_model(result, run_id, _with_outputs(metadata, self.getLabelCols(), result))

    def _training(self, store: RemoteStore, run_id: str, train_rows: int, validation_rows: int) -> Training:
        filename = store.checkpoint_filename
        return Training(
            run_id=run_id,
            store=store,
            checkpoint_filename=self._checkpoint_filename if filename == _DEFAULT_CHECKPOINT else filename,
            train_rows=train_rows,
            validation_rows=validation_rows,
            feature_cols=tuple(self.getFeatureCols() or ()),
            label_cols=tuple(self.getLabelCols() or ()),
            sample_weight_col=self.getSampleWeightCol(),
            batch_size=self.getBatchSize(),
            validation_batch_size=self.getValBatchSize() or self.getBatchSize(),
            epochs=self.getEpochs(),
            train_steps=self.getTrainStepsPerEpoch(),
            validation_steps=self.getValidationStepsPerEpoch(),
            seed=self._seed(),
            reading=Reading(
                shuffle=self.getShuffle(),
                shuffle_buffer_size=self.getShufflingBufferSize(),
                inmemory_cache_all=self.getInMemoryCacheAll(),
                transformation_fn=self.getTransformationFn(),
                edit_fields=self.getTransformationEditFields(),
                removed_fields=self.getTransformationRemovedFields(),
                train_workers=self.getTrainReaderNumWorker(),
                validation_workers=self.getValReaderNumWorker(),
                data_module=self.getDataModule(),
            ),
            verbose=self.getVerbose(),
            use_gpu=self.getUseGpu(),
            backward_passes_per_step=self.getBackwardPassesPerStep(),
            gradient_compression=self.getGradientCompression(),
        )

    def _seed(self) -> int:
        # The same data in the same order unless another seed is asked for, also where a run goes on.
        return self.getRandomSeed() or 0

    def _backend(self) -> Backend:
        """What trains, once it has been found able to."""
        backend: Backend = self.getBackend() or SparkBackend(self.getNumProc())
        if isinstance(backend, Backend):  # and not only something that has its methods
            backend.check()
        return backend

    # What a framework's estimator fills in.

    def _check_settings(self) -> None:
        """Before anything is done: is all there that is needed, and does it go together?"""
        if self.getModel() is None:
            raise self._missing("model")
        self._needed()
        self._check_contradictions()

    def _needed(self) -> tuple[Store, list[str], list[str]]:
        """Store, features and labels, without which nothing is trained."""
        store, features, labels = self.getStore(), self.getFeatureCols(), self.getLabelCols()
        if store is None:
            raise self._missing("store")
        for name, columns in (("feature_cols", features), ("label_cols", labels)):
            if not columns:
                raise ConfigError(f"{name} is empty: name at least one column, {type(self).__name__}({name}=[...])")
        return store, features or [], labels or []

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(f"{name} is not set: {type(self).__name__}({name}=...)")

    def _check_contradictions(self) -> None:
        """What can never go together, whatever is set later."""
        if self.getBackend() is not None and self.getNumProc() is not None:
            raise ConfigError(
                "backend and num_proc exclude each other: a backend has its own number of processes, "
                "backend=SparkBackend(num_proc=...)"
            )
        weights, labels = self.getLossWeights(), self.getLabelCols()
        if weights is not None and labels is not None and len(weights) != len(labels):
            raise ConfigError(
                f"loss_weights has {len(weights)} numbers for {len(labels)} label_cols: give one for each"
            )

    def _check_model(self, data: DataShapes, rows: Rows) -> None:
        """Once the data are known, before ranks start: do model, optimizer and loss go with them?

        Args:
            rows: reads the first rows; returns an array for each feature column, as ranks get them.
        """
        raise NotImplementedError

    def _signature(self) -> Signature | None:
        """Names and shapes of the model's parameters; None while it has none."""
        raise NotImplementedError

    def _backend_env(self) -> dict[str, str] | None:
        """Variables for the ranks."""
        return None

    def _trainer(self, training: Training) -> Callable[[], TrainingResult | None]:
        """What every rank calls: a function of a module without Spark, with all that it needs; rank 0 returns a
        result."""
        raise NotImplementedError

    def _make_model(self, result: TrainingResult, run_id: str, metadata: dict[str, dict[str, Any]]) -> HorovodModel:
        """The trained model."""
        raise NotImplementedError


def _first_rows(training: Training) -> list[Array]:
    """Some rows of the features, as ranks read them. The reader of a whole training would first fill its memory."""
    reading = dataclasses.replace(training.reading, shuffle=False, inmemory_cache_all=False)
    with dataclasses.replace(training, reading=reading, batch_size=_FEW, train_steps=1).batches(0, 1) as batches:
        return next(batches.epoch(0)).features


def _run(
    backend: Backend, task: Callable[[], TrainingResult | None], environment: dict[str, str] | None
) -> list[TrainingResult | None]:
    """Call a task on all ranks; a backend that has no idea of an environment is not bothered with one."""
    if environment and _takes(backend.run, "env"):
        return backend.run(task, env=environment)
    return backend.run(task)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _with_outputs(
    metadata: Metadata, labels: Sequence[str] | None, result: TrainingResult
) -> dict[str, dict[str, Any]]:
    """The metadata that a model keeps: what its outputs look like, too, so that transform need not try the model."""
    kept = {name: dict(facts) for name, facts in metadata.items()}
    for label, shape in zip(labels or (), result.outputs, strict=False):
        if label in kept:
            kept[label]["output_shape"] = list(shape)
    return kept


@contextmanager
def _naming(training: Training) -> Iterator[None]:
    """Tell whoever reads of a failure, or of Ctrl-C, by which name the run can go on, if there is an epoch to go on
    after."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        try:
            reached = training.resume()
        except Exception:  # noqa: BLE001 - whatever is wrong with the store by now, it is not what failed first
            reached = None
        if reached is None:
            raise
        epochs = f"{reached.epoch} of {training.epochs} epochs are done"
        note = f"run_id={training.run_id!r}: {epochs}; fit() with this run_id goes on after the last whole one"
        if hasattr(error, "add_note"):
            error.add_note(note)
        elif error.args and str(error) == error.args[0]:  # Python 3.10
            error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
        raise


class HorovodModel(Model, ModelParams, HorovodWritable, HorovodReadable):
    """A trained model: it adds a column with its prediction for each label."""

    _not_saved: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            history=None,
            model=None,
            feature_columns=None,
            label_columns=None,
            run_id=None,
            outputCols=[],
            _metadata=None,
        )

    def transform(self, df: DataFrame, params: Mapping[Any, Any] | None = None) -> DataFrame:
        """Add the model's outputs to a DataFrame, lazily: the model runs when Spark computes the result.

        Rows pass through Python in Arrow batches; each Python worker loads the model once.

        A label's output is of the label's own type where it is one number (rounded for integers, and kept within their
        range; for booleans, whether it is above 0.5), an array where the label is one, else a vector.

        Args:
            df: rows with the columns of features.
            params: Params to change for this call.

        Returns:
            the DataFrame with a column for each label, ``<label>__output`` or as ``setOutputCols`` says. A column of
            that name is replaced.

        Raises:
            ConfigError: (a ValueError) ``df`` is no DataFrame of Spark's, a column of features is missing, or there is
                another number of ``outputCols`` than of labels.
            DataError: (a ValueError) a column of features holds strings, or something else that is no number.
        """
        return super().transform(df, params)

    def getOutputCols(self) -> list[str]:
        """The names of the columns that ``transform`` adds."""
        return self._value("outputCols") or util.get_output_cols(self.getLabelColumns() or [])

    def _transform(self, df: DataFrame) -> DataFrame:
        util.check_dataframe(df, "transform")
        features, labels = self.getFeatureColumns() or [], self.getLabelColumns() or []
        outputs = self.getOutputCols()
        if len(outputs) != len(labels):
            raise ConfigError(f"outputCols are {outputs}, but the model has {len(labels)} labels: {labels}")
        missing = [name for name in features if name not in df.columns]
        if missing:
            raise ConfigError(f"the DataFrame has no column {missing[0]!r}, which the model needs; it has {df.columns}")
        util.check_types(df, features)
        schema = util.get_spark_df_output_schema(df.schema, labels, outputs, self._described())
        kept = [place for place, name in enumerate(df.columns) if name not in outputs]
        known = self._get_metadata() or {}
        sized = [Feature(name, df.columns.index(name), known.get(name, {}).get("shape")) for name in features]
        # One broadcast however many tasks there are.
        predict = predicting(df.sparkSession, self._predictor(), sized, kept, schema)
        # By numbers meanwhile: mapInArrow takes a dot in a name for a field's beginning, and needs each name once.
        numbered = StructType(
            [StructField(str(place), each.dataType, each.nullable, each.metadata) for place, each in enumerate(schema)]
        )
        result = df.toDF(*map(str, range(len(df.columns)))).mapInArrow(predict, numbered)
        return result.toDF(*schema.names)

    def _described(self) -> dict[str, dict[str, Any]]:
        """The metadata with the outputs' shapes, which a model that was put together by hand does not have."""
        metadata: dict[str, dict[str, Any]] = self._get_metadata() or {}
        labels = self.getLabelColumns() or []
        if all("output_shape" in metadata.get(label, {}) for label in labels):
            return metadata
        described = {name: dict(facts) for name, facts in metadata.items()}
        for label, shape in zip(labels, self._outputs(), strict=True):
            described.setdefault(label, {"spark_data_type": DoubleType})["output_shape"] = list(shape)
        return described

    def _predictor(self) -> Predictor:
        """The model as Spark's Python workers are to load it."""
        raise NotImplementedError

    def _outputs(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the outputs, without the batch, found by running the model on zeros."""
        raise NotImplementedError
