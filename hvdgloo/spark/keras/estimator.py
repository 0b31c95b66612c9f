"""``KerasEstimator`` and ``KerasModel``, for Keras 3 on its TensorFlow, torch and JAX backends, and for tf_keras."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pyspark import keyword_only

from hvdgloo._platform import pickling
from hvdgloo.errors import ConfigError
from hvdgloo.spark.common._training import Training, TrainingResult
from hvdgloo.spark.common.estimator import DataShapes, HorovodEstimator, HorovodModel, Rows
from hvdgloo.spark.common.params import parameter
from hvdgloo.spark.common.serialization import Codec
from hvdgloo.spark.keras import _codecs
from hvdgloo.spark.keras._layout import Layout, check_shapes, layout_of
from hvdgloo.spark.keras._library import Library, library_of, library_of_model
from hvdgloo.spark.keras._models import (
    Compilation,
    archive_of,
    build,
    check_names,
    compilation_of,
    is_built,
    load_state,
    model_of,
    registered_objects,
    signature_of,
)
from hvdgloo.spark.keras._predictor import KerasPredictor, applying
from hvdgloo.spark.keras._remote import Job, train

__all__ = ["KerasEstimator", "KerasModel"]


class KerasEstimator(HorovodEstimator):
    """Estimator that trains a Keras model on a DataFrame, on several ranks.

    ::

        estimator = KerasEstimator(
            backend=SparkBackend(num_proc=4), store=Store.create("hdfs://..."), model=model,
            optimizer=keras.optimizers.Adam(0.001), loss="sparse_categorical_crossentropy", metrics=["accuracy"],
            feature_cols=["features"], label_cols=["label"], validation=0.1, batch_size=128, epochs=12,
        )
        trained = estimator.fit(train_df)
        predictions = trained.transform(test_df)

    The learning rate is multiplied by the number of ranks during training; checkpoints and the model that ``fit``
    returns have the given rate. Gradients of ``backward_passes_per_step`` batches are averaged.

    The model may belong to Keras 3, on any of its backends, or to tf_keras; ranks use the same. Its inputs are the
    feature columns in their order, reshaped to the inputs' shapes, and its outputs are compared with the label columns,
    reshaped to the outputs' shapes if they have as many numbers, or to ``label_shapes``. If inputs or outputs are a
    dictionary whose keys are the columns' names, they are matched by name.

    A run's checkpoint is a ``.keras`` file that ``keras.models.load_model`` reads. With a ``checkpoint_callback``, a
    ModelCheckpoint or ``hvd.callbacks.BestModelCheckpoint``, ``fit`` returns the model that this callback saved.
    Callbacks are called on all ranks, with metrics averaged over the ranks; TensorBoard only on the first. If
    TensorBoard is installed, the history is written to the run's logs in any case.

    Args:
        custom_objects: custom classes and functions in the model's configuration, by name.
        optimizer, loss, metrics: may be omitted for a compiled model.
        backend_env: environment variables for the ranks.
        num_proc, model, backend, store, loss_weights, sample_weight_col, gradient_compression, feature_cols,
            label_cols, validation, callbacks, batch_size, epochs, verbose, shuffle_buffer_size,
            partitions_per_process, run_id, train_steps_per_epoch, validation_steps_per_epoch, transformation_fn,
            train_reader_num_workers, val_reader_num_workers, data_module, continuous_cols, categorical_cols,
            val_batch_size, random_seed, shuffle, reader_pool_type, label_shapes, checkpoint_callback,
            inmemory_cache_all, use_gpu, mp_start_method, tensorflow_dataset_prefetch_buffer_size,
            backward_passes_per_step, compress_sparse_cols, transformation_edit_fields, transformation_removed_fields:
            see ``explainParams()``.
    """

    _run_prefix: ClassVar[str] = "keras"
    _checkpoint_filename: ClassVar[str] = "checkpoint.keras"
    _codecs: ClassVar[Mapping[str, Codec]] = _codecs.OF_ESTIMATORS

    custom_objects = parameter("custom_objects", "custom classes and functions in the model's configuration, by name")
    checkpoint_callback = parameter(
        "checkpoint_callback", "callback that saves the model that fit() returns, in addition to the checkpoints"
    )
    backend_env = parameter("backend_env", "environment variables for the ranks")

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: Any = None,
        backend: Any = None,
        store: Any = None,
        custom_objects: Mapping[str, Any] | None = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Sequence[float] | None = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        metrics: Sequence[Any] | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        validation: float | str | None = None,
        callbacks: Sequence[Any] | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        shuffle_buffer_size: int | None = None,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Callable[..., Any] | None = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        data_module: Any = None,
        continuous_cols: Sequence[str] | None = None,
        categorical_cols: Sequence[str] | None = None,
        val_batch_size: int | None = None,
        random_seed: int | None = None,
        shuffle: bool | None = None,
        reader_pool_type: str | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        checkpoint_callback: Any = None,
        inmemory_cache_all: bool | None = None,
        backend_env: Mapping[str, str] | None = None,
        use_gpu: bool | None = None,
        mp_start_method: str | None = None,
        tensorflow_dataset_prefetch_buffer_size: int | None = None,
        backward_passes_per_step: int | None = None,
        compress_sparse_cols: bool | None = None,
        transformation_edit_fields: Sequence[Any] | None = None,
        transformation_removed_fields: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(
            custom_objects={},
            checkpoint_callback=None,
            backend_env={"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"},
        )
        self._initialize(self._input_kwargs)

    def setCustomObjects(self, value: Mapping[str, Any]) -> KerasEstimator:
        return self._with(custom_objects=value)

    def getCustomObjects(self) -> dict[str, Any]:
        return dict(self._value("custom_objects") or {})

    def setCheckpointCallback(self, value: Any) -> KerasEstimator:
        return self._with(checkpoint_callback=value)

    def getCheckpointCallback(self) -> Any:
        return self._value("checkpoint_callback")

    def setBackendEnv(self, value: Mapping[str, str] | None) -> KerasEstimator:
        return self._with(backend_env=value)

    def getBackendEnv(self) -> dict[str, str]:
        return dict(self._value("backend_env") or {})

    def get_model_class(self) -> type[KerasModel]:
        """Return the class of the model that ``fit`` returns."""
        return KerasModel

    def get_model_shapes(self) -> tuple[list[tuple[int | None, ...]], list[tuple[int | None, ...]]]:
        """Return the shapes of the model's inputs and outputs, with None for the batch dimension."""
        model = self.getModel()
        return [tuple(each.shape) for each in model.inputs], [tuple(each.shape) for each in model.outputs]

    # Hooks of the base class.

    def _check_settings(self) -> None:
        super()._check_settings()
        library = self._library()
        self._compilation()  # raises an error if something is missing
        for what, given in (("loss", self.getLoss()), ("metrics", self.getMetrics())):
            check_names(library, what, given, self.getCustomObjects())
        callbacks = [("callbacks", each) for each in self.getCallbacks()]
        if self.getCheckpointCallback() is not None:
            callbacks.append(("checkpoint_callback", self.getCheckpointCallback()))
        for what, callback in callbacks:
            if isinstance(callback, type) or not callable(getattr(callback, "on_epoch_end", None)):
                raise ConfigError(f"{what}: {callback!r} is not a callback: give an instance of a callback's class")
            owner = library_of(callback)
            # hvdgloo's callbacks, and the user's that derive from Keras 3's, work with both libraries.
            if library.name == "keras" and owner is not None and owner.name != "keras":
                raise ConfigError(
                    f"the model belongs to {library.title}, but the callback {type(callback).__name__} to {owner.title}"
                )

    def _check_model(self, data: DataShapes, rows: Rows) -> None:
        sizes = {name: column.size for name, column in {**data.features, **data.labels}.items()}
        features, labels = self.getFeatureCols() or [], self.getLabelCols() or []
        build(self.getModel(), features, self._library().floatx, rows)
        check_shapes(self._layout(), sizes, features, labels)

    def _signature(self) -> list[tuple[str, tuple[int, ...]]]:
        return signature_of(self.getModel())

    def _backend_env(self) -> dict[str, str]:
        return {**self.getBackendEnv(), **self._library().environment}

    def _trainer(self, training: Training) -> Callable[[], TrainingResult | None]:
        job = Job(
            model=archive_of(self.getModel()),
            compilation=self._compilation(),
            layout=self._layout(),
            custom_objects=self._names(),
            callbacks=self.getCallbacks(),
            checkpoint_callback=self.getCheckpointCallback(),
        )
        return functools.partial(train, self._library(), pickling.dumps(job), training)

    def _make_model(self, result: TrainingResult, run_id: str, metadata: dict[str, dict[str, Any]]) -> KerasModel:
        library, names = self._library(), self._names()
        model = model_of(library, result.state, names)
        self._compilation().compile(library, model, names)
        load_state(model, result.state)
        return KerasModel(
            history=result.history,
            model=model,
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            custom_objects=self.getCustomObjects(),
            run_id=run_id,
            _metadata=metadata,
            _floatx=library.floatx,
        )

    def _library(self) -> Library:
        return library_of_model(self.getModel())

    def _names(self) -> dict[str, Any]:
        return {**registered_objects(self._library()), **self.getCustomObjects()}

    def _compilation(self) -> Compilation:
        return compilation_of(
            self._library(),
            self.getModel(),
            self.getOptimizer(),
            self.getLoss(),
            self.getLossWeights(),
            self.getMetrics(),
        )

    def _layout(self) -> Layout:
        return layout_of(
            self.getModel(),
            self._library().floatx,
            self.getFeatureCols() or [],
            self.getLabelCols() or [],
            self.getLabelShapes(),
        )


class KerasModel(HorovodModel):
    """A trained Keras model: ``transform`` adds a column with its output for each label.

    ``getModel()`` returns the model itself, compiled with the optimizer with which it was trained; ``getHistory()`` a
    list of values for each metric, one for each epoch of the run.

    Args:
        history, model, feature_columns, label_columns, run_id: see ``explainParams()``.
        custom_objects: custom classes and functions in the model's configuration, by name.
        _metadata: the columns' metadata; None for a model assembled by hand.
        _floatx: floating-point type; by default Keras's.
    """

    _codecs: ClassVar[Mapping[str, Codec]] = _codecs.OF_MODELS

    custom_objects = parameter("custom_objects", "custom classes and functions in the model's configuration, by name")
    _floatx = parameter("_floatx", "floating-point type")

    @keyword_only
    def __init__(
        self,
        *,
        history: Any = None,
        model: Any = None,
        feature_columns: Sequence[str] | None = None,
        label_columns: Sequence[str] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        _metadata: Any = None,
        _floatx: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(custom_objects={}, _floatx=None)
        self._with(**{name: value for name, value in self._input_kwargs.items() if value is not None})

    def setCustomObjects(self, value: Mapping[str, Any]) -> KerasModel:
        return self._with(custom_objects=value)

    def getCustomObjects(self) -> dict[str, Any]:
        return dict(self._value("custom_objects") or {})

    def _get_floatx(self) -> str | None:
        return self._value("_floatx")

    def _predictor(self) -> KerasPredictor:
        model = self.getModel()
        library = library_of_model(model)
        if not is_built(model):
            raise ConfigError(f"{model.name} is not built: begin it with keras.Input, or call it on some rows")
        names = {**registered_objects(library), **self.getCustomObjects()}
        return KerasPredictor(library, archive_of(model), pickling.dumps((names, self._layout())))

    def _outputs(self) -> list[tuple[int, ...]]:
        layout = self._layout()
        known = [[size or 1 for size in slot.shape] for slot in layout.inputs.slots if slot.shape is not None]
        if len(known) < len(layout.inputs.slots):
            raise ConfigError(f"{self.getModel().name} does not define its inputs' shapes: give _metadata=")
        zeros = [np.zeros((1, *shape), layout.floatx) for shape in known]
        return [array.shape[1:] for array in applying(self.getModel(), layout)(zeros)]

    def _layout(self) -> Layout:
        model = self.getModel()
        floatx = self._get_floatx() or library_of_model(model).floatx
        return layout_of(model, floatx, self.getFeatureColumns() or [], self.getLabelColumns() or [], None)
