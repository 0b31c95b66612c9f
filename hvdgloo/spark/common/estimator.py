"""The common base of all frameworks' estimators, and of the models that they return.

``fit`` checks the settings, writes the DataFrame to the store, checks shapes, has the backend's ranks train, and makes
a model of rank 0's result. A framework's estimator fills in the hooks (``_check_model``, ``_trainer``,
``_make_model``); the code that ranks run is in modules that need no Spark.
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
"""A store's name for checkpoints if the user gave none; the framework then chooses another."""


_FEW = 2
"""Number of rows on which a model is tried: more than one, so that an axis of length 1 is not taken for the batch."""

Rows = Callable[[], "list[Array]"]


@dataclasses.dataclass(frozen=True)
class ColumnShape:
    """A column as the model sees it.

    Attributes:
        spark_type: the class of its type: pyspark's, or a vector's.
        size: number of values in a row; None if it is known only when the data are read.
        scalar: True if a row is a number, and not a vector or array of one element.
    """

    spark_type: type[Any]
    size: int | None
    scalar: bool


@dataclasses.dataclass(frozen=True)
class DataShapes:
    """The shapes of the data as known before training, by column, in the estimator's order."""

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
    """Estimator that trains a model on several ranks: the base of ``KerasEstimator`` and ``TorchEstimator``."""

    _run_prefix: ClassVar[str]
    """Prefix of the generated names of runs."""

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
        """Set the constructor's arguments, and check them as far as is possible without data.

        Missing values may be set later, so only contradictions are errors.
        """
        self._with(**{name: value for name, value in given.items() if value is not None})
        self._check_contradictions()

    # Fitting.

    def fit(self, df: DataFrame, params: Any = None) -> Any:
        """Train on a DataFrame.

        The DataFrame is first written to the store as Parquet, from which the ranks read it. A run whose ``run_id`` has
        a checkpoint continues after its last whole epoch.

        Args:
            df: rows with the columns of features and labels.
            params: Params to change for this call, ``{estimator.epochs: 3}``; or a list of these, for a model each.

        Returns:
            the model, a ``HorovodModel``; a list of models for a list of params.

        Raises:
            ConfigError: (a ValueError) a setting is missing or contradicts another one; the text names it.
            DataError: (a ValueError) the data cannot be trained on: columns, types, nulls, shapes, too few rows.
            StoreError: the store cannot be written, or is not shared by driver and ranks.
            LaunchError: ranks could not be started.
            JobFailedError: a rank was killed. An exception that a rank raises is raised here unchanged.
        """
        return super().fit(df, params)

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """Train on Parquet files that are already in the store, at ``store.get_train_data_path(dataset_idx)``.

        They may be any flat Parquet files, including Spark's vectors. Validation data, if ``validation`` is set, are at
        ``store.get_val_data_path(dataset_idx)``.

        Args:
            params: Params to change for this call.
            dataset_idx: number of the data set in the store; None for the paths without a number.

        Results and errors are as for ``fit``.
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
            training.resume()  # refuses a checkpoint of another model before ranks start
            task = functools.partial(on_rank, training.store, self.getMpStartMethod(), self._trainer(training))
            with _naming(training):
                results = _run(backend, task, self._backend_env())
        result = next((each for each in results if each is not None), None)
        if result is None:
            raise JobFailedError(f"{type(backend).__name__}.run() returned no rank's result")
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
        # The same data in the same order unless another seed is requested, even where a run continues.
        return self.getRandomSeed() or 0

    def _backend(self) -> Backend:
        """Return the backend, after it has checked that it can run."""
        backend: Backend = self.getBackend() or SparkBackend(self.getNumProc())
        if isinstance(backend, Backend):  # a user's class may have only the two required methods
            backend.check()
        return backend

    # Hooks for a framework's estimator.

    def _check_settings(self) -> None:
        """Check that the settings are complete and consistent, before anything is done."""
        if self.getModel() is None:
            raise self._missing("model")
        self._needed()
        self._check_contradictions()

    def _needed(self) -> tuple[Store, list[str], list[str]]:
        """Return store, features and labels, which are required."""
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
        """Refuse settings that contradict each other, whatever is set later."""
        if self.getBackend() is not None and self.getNumProc() is not None:
            raise ConfigError(
                "backend and num_proc exclude each other: a backend has its own number of processes, "
                "backend=SparkBackend(num_proc=...)"
            )
        weights, labels = self.getLossWeights(), self.getLabelCols()
        if weights is not None and labels is not None and len(weights) != len(labels):
            raise ConfigError(
                f"loss_weights has {len(weights)} numbers for {len(labels)} label_cols: give one for each label"
            )

    def _check_model(self, data: DataShapes, rows: Rows) -> None:
        """Check that model, optimizer and loss fit the data, before ranks start.

        Args:
            rows: reads the first rows; returns an array for each feature column, as ranks get them.
        """
        raise NotImplementedError

    def _signature(self) -> Signature | None:
        """Return names and shapes of the model's parameters; None while it has none."""
        raise NotImplementedError

    def _backend_env(self) -> dict[str, str] | None:
        """Return environment variables for the ranks."""
        return None

    def _trainer(self, training: Training) -> Callable[[], TrainingResult | None]:
        """Return the function that every rank calls, from a module without Spark; on rank 0 it returns a result."""
        raise NotImplementedError

    def _make_model(self, result: TrainingResult, run_id: str, metadata: dict[str, dict[str, Any]]) -> HorovodModel:
        """Make the trained model."""
        raise NotImplementedError


def _first_rows(training: Training) -> list[Array]:
    """Read some rows of the features as ranks do. A reader for the whole training would first fill its memory."""
    reading = dataclasses.replace(training.reading, shuffle=False, inmemory_cache_all=False)
    with dataclasses.replace(training, reading=reading, batch_size=_FEW, train_steps=1).batches(0, 1) as batches:
        return next(batches.epoch(0)).features


def _run(
    backend: Backend, task: Callable[[], TrainingResult | None], environment: dict[str, str] | None
) -> list[TrainingResult | None]:
    """Call a task on all ranks; a backend whose ``run`` has no ``env`` argument gets none."""
    if environment and _takes(backend.run, "env"):
        return backend.run(task, env=environment)
    return backend.run(task)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _with_outputs(
    metadata: Metadata, labels: Sequence[str] | None, result: TrainingResult
) -> dict[str, dict[str, Any]]:
    """Return the metadata for a model, with the shapes of its outputs, so that transform need not try the model."""
    kept = {name: dict(facts) for name, facts in metadata.items()}
    for label, shape in zip(labels or (), result.outputs, strict=False):
        if label in kept:
            kept[label]["output_shape"] = list(shape)
    return kept


@contextmanager
def _naming(training: Training) -> Iterator[None]:
    """Add to an error, or to Ctrl-C, the run_id with which the run can continue, if it completed an epoch."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        try:
            reached = training.resume()
        except Exception:  # noqa: BLE001 - an error of the store is not the original failure
            reached = None
        if reached is None:
            raise
        epochs = f"{reached.epoch} of {training.epochs} epochs are done"
        note = f"run_id={training.run_id!r}: {epochs}; fit() with this run_id continues after the last whole one"
        if hasattr(error, "add_note"):
            error.add_note(note)
        elif error.args and str(error) == error.args[0]:  # Python 3.10
            error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
        raise


class HorovodModel(Model, ModelParams, HorovodWritable, HorovodReadable):
    """A trained model, which adds a column with its prediction for each label."""

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

        A label's output has the label's own type if it is one number (rounded and clipped to the range for integers;
        for booleans, whether it is above 0.5); it is an array if the label is one, otherwise a vector.

        Args:
            df: rows with the columns of features.
            params: Params to change for this call.

        Returns:
            the DataFrame with a column for each label, named ``<label>__output`` or by ``setOutputCols``. An existing
            column of that name is replaced.

        Raises:
            ConfigError: (a ValueError) ``df`` is not a Spark DataFrame, a feature column is missing, or the numbers of
                ``outputCols`` and labels differ.
            DataError: (a ValueError) a feature column holds strings or other values that are not numbers.
        """
        return super().transform(df, params)

    def getOutputCols(self) -> list[str]:
        """Return the names of the columns that ``transform`` adds."""
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
        # One broadcast, however many tasks there are.
        predict = predicting(df.sparkSession, self._predictor(), sized, kept, schema)
        # Columns are named by numbers meanwhile: mapInArrow takes a dot in a name for a field, and needs unique names.
        numbered = StructType(
            [StructField(str(place), each.dataType, each.nullable, each.metadata) for place, each in enumerate(schema)]
        )
        result = df.toDF(*map(str, range(len(df.columns)))).mapInArrow(predict, numbered)
        return result.toDF(*schema.names)

    def _described(self) -> dict[str, dict[str, Any]]:
        """Return the metadata with the outputs' shapes, which a model assembled by hand lacks."""
        metadata: dict[str, dict[str, Any]] = self._get_metadata() or {}
        labels = self.getLabelColumns() or []
        if all("output_shape" in metadata.get(label, {}) for label in labels):
            return metadata
        described = {name: dict(facts) for name, facts in metadata.items()}
        for label, shape in zip(labels, self._outputs(), strict=True):
            described.setdefault(label, {"spark_data_type": DoubleType})["output_shape"] = list(shape)
        return described

    def _predictor(self) -> Predictor:
        """Return the model in the form that Spark's Python workers load."""
        raise NotImplementedError

    def _outputs(self) -> Sequence[tuple[int, ...]]:
        """Return the shapes of the outputs, without the batch dimension, by running the model on zeros."""
        raise NotImplementedError
