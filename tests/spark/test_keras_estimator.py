"""KerasEstimator and KerasModel on a Spark session. What ranks do on each backend is in ``test_keras_training.py``."""

from __future__ import annotations

import base64
import inspect
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.linalg import Vectors
from pyspark.sql.types import DoubleType

from hvdgloo.errors import ConfigError, MissingDependencyError, StoreError
from hvdgloo.spark.common.backend import LocalBackend
from hvdgloo.spark.common.store import Store
from hvdgloo.spark.keras import KerasEstimator, KerasModel, _codecs
from hvdgloo.spark.keras._layout import Side, Slot
from hvdgloo.spark.keras._library import Library, library_of_model
from hvdgloo.spark.keras._models import archive_of, model_of
from hvdgloo.spark.keras._remote import _choose_gpu
from hvdgloo.spark.keras._run_files import RunFiles
from tests.support import estimators
from tests.support.estimators import InPlace

if "keras" not in sys.modules:
    Library("keras", "torch").use()  # the one that is imported fastest
import keras

ROWS = 96
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras about numpy


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    """``y`` is what a linear function makes of the vector ``x``; ``a`` and ``b`` are the numbers in it."""
    data = estimators.linear(ROWS, width=2)
    rows = [
        (index, Vectors.dense(x), *map(float, x), float(y), index % 4)
        for index, (x, y) in enumerate(zip(data["features"], data["label"], strict=True))
    ]
    frame = spark.createDataFrame(rows, ["id", "x", "a", "b", "y", "kind"]).repartition(2).cache()
    assert frame.count() == ROWS
    return frame


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"))


def net(inputs: int = 2, outputs: int = 1, **named: Any) -> Any:
    keras.utils.set_random_seed(5)
    layers = [keras.Input((inputs,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(outputs)]
    return keras.Sequential(layers, **named)


def estimator(store: Store | None, **changes: Any) -> KerasEstimator:
    arguments = {
        "model": net(),
        "backend": InPlace(),
        "store": store,
        "optimizer": keras.optimizers.Adam(0.05),
        "loss": "mse",
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 2,
        "verbose": 0,
        **changes,
    }
    return KerasEstimator(**{name: value for name, value in arguments.items() if value is not None})


def test_fit_trains_on_ranks_of_this_host_and_transform_predicts(df: Any, store: Store) -> None:
    """With processes that are started for it; all else here is on one rank in this process."""

    @keras.saving.register_keras_serializable("of_the_tests")
    class Same(keras.layers.Layer):
        """Of no module that ranks could import, and so registered in none of them by an import."""

        def call(self, inputs: Any) -> Any:
            return inputs

    fitting = estimator(
        store,
        model=keras.Sequential([net(), Same()]),
        backend=LocalBackend(2),
        epochs=15,
        validation=0.25,
        metrics=["mae"],
        gradient_compression=None,
        backend_env={"OF_THE_RANKS": "3"},
        callbacks=[NeedsTheEnvironment()],
    )
    model = fitting.fit(df)
    history = model.getHistory()
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    assert history["loss"][-1] < history["loss"][0] / 5
    assert float(model.getModel().optimizer.learning_rate) == np.float32(0.05)
    rows = model.transform(df).orderBy("id").collect()
    assert rows[0].__fields__ == ["id", "x", "a", "b", "y", "kind", "y__output"]
    inputs = np.stack([row.x.toArray() for row in rows])
    expected = model.getModel().predict(inputs, verbose=0).reshape(-1)
    np.testing.assert_allclose([row.y__output for row in rows], expected, rtol=1e-5)


class NeedsTheEnvironment(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        assert os.environ["OF_THE_RANKS"] == "3"


def test_the_model_that_was_given_stays_as_it_was(df: Any, store: Store) -> None:
    fitting = estimator(store)
    model = fitting.fit(df)
    for given, before, after in zip(
        fitting.getModel().get_weights(), net().get_weights(), model.getModel().get_weights(), strict=True
    ):
        np.testing.assert_array_equal(given, before)
        assert not np.array_equal(given, after)
    assert not fitting.getOptimizer().built


def test_a_run_goes_on_by_its_name_with_its_history(df: Any, store: Store) -> None:
    first = estimator(store, run_id="mine", epochs=1).fit(df)
    second = estimator(store, run_id="mine", epochs=2, model=net(name="again")).fit(df)
    assert second.getHistory()["loss"][:1] == first.getHistory()["loss"]
    whole = estimator(store, epochs=2).fit(df)
    for ours, theirs in zip(second.getModel().get_weights(), whole.getModel().get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert estimator(store, run_id="mine", epochs=2).fit(df).getHistory() == second.getHistory()
    with pytest.raises(ConfigError, match=r"the checkpoint of run 'mine' is of another model: .*'.*kernel'.*shape"):
        estimator(store, run_id="mine", model=wider()).fit(df)


def wider() -> Any:
    layers = [keras.Input((2,)), keras.layers.Dense(9), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def test_a_compiled_model_needs_neither_optimizer_nor_loss(df: Any, store: Store) -> None:
    model = net()
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    fitting = estimator(store, model=model)
    for param in (fitting.optimizer, fitting.loss):
        fitting.clear(param)
    trained = fitting.fit(df)
    given = estimator(store, metrics=["mae"]).fit(df)
    assert trained.getHistory() == given.getHistory()
    assert isinstance(trained.getModel().optimizer, keras.optimizers.Adam)


def test_models_that_keras_builds_from_the_data(df: Any, store: Store) -> None:
    class Own(keras.Model):
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            self.layer = keras.layers.Dense(1)

        def build(self, shape: Any) -> None:
            self.layer.build(shape)

        def call(self, inputs: Any) -> Any:
            return self.layer(inputs)

    for model, names in ((keras.Sequential([keras.layers.Dense(1)]), {}), (Own(), {"Own": Own})):
        classes = {"loss": keras.losses.MeanSquaredError, "metrics": [keras.metrics.MeanAbsoluteError]}
        trained = estimator(store, model=model, custom_objects=names, epochs=1, **classes).fit(df)
        assert set(trained.getHistory()) == {"loss", "mean_absolute_error"}
        assert [weight.shape for weight in trained.getModel().weights] == [(2, 1), (1,)]
        assert len(trained.transform(df.where("id < 3")).collect()) == 3
    with pytest.raises(ConfigError, match=r"is not built and cannot be called on .* 'a' of shape \(2, 1\)"):
        estimator(store, model=keras.Sequential([keras.layers.Dense(1)]), feature_cols=["a", "b"]).fit(df)


class Plain(keras.Model):
    """As most people write a model: nothing says what it is given before it is called."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.one, self.two = keras.layers.Dense(4), keras.layers.Dense(1)

    def joined(self, inputs: Any) -> Any:
        return inputs

    def call(self, inputs: Any) -> Any:
        return self.two(self.one(self.joined(inputs)))


class Pair(Plain):
    def joined(self, inputs: Any) -> Any:
        first, second = inputs
        return keras.ops.concatenate([first, second], axis=-1)


class Named(Plain):
    def joined(self, inputs: Any) -> Any:
        return keras.ops.concatenate([inputs["b"], inputs["a"]], axis=-1)


def halfway() -> Any:
    model = Plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer ones of Keras 3 say so themselves
        model.build((None, 2))  # after which Keras takes it for built, and its layers have no weights
    return model


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (Plain, ["x"]),
        (halfway, ["x"]),
        (Plain, ["a"]),
        pytest.param(Pair, ["a", "b"], marks=pytest.mark.extended),
        (Named, ["a", "b"]),
    ],
    ids=["one column", "build() was called", "a number", "several", "by name"],
)
def test_a_model_of_ones_own_class_is_built_from_the_first_rows(
    df: Any, store: Store, make: Any, columns: list[str]
) -> None:
    model = make()
    fitting = estimator(store, model=model, feature_cols=columns, custom_objects={type(model).__name__: type(model)})
    trained = fitting.setEpochs(4).fit(df)
    assert trained.getHistory()["loss"][-1] < trained.getHistory()["loss"][0]
    assert [weight.shape for weight in trained.getModel().weights] == [weight.shape for weight in model.weights]
    for row in trained.transform(df.where("id < 3")).collect():
        inputs = {"x": row.x.toArray()[None], "a": np.array([[row.a]]), "b": np.array([[row.b]])}
        given: Any = {name: inputs[name].astype(np.float32) for name in columns}
        if make is not Named:
            given = given[columns[0]] if len(columns) == 1 else tuple(given.values())
        expected = trained.getModel().predict_on_batch(given)
        assert row.y__output == pytest.approx(float(np.asarray(expected)[0, 0]), rel=1e-4)


def test_a_model_that_fails_on_the_first_rows_is_told_with_its_reason(df: Any, store: Store) -> None:
    class Wide(Plain):
        def joined(self, inputs: Any) -> Any:
            raise RuntimeError("three features, please")

    model = Wide()
    for _ in range(2):  # a model whose call has failed is not taken for built
        with pytest.raises(ConfigError, match=r"'x' of shape \(2, 2\): three features, please; begin it with keras"):
            estimator(store, model=model, custom_objects={"Wide": Wide}, backend=Unused()).fit(df)


def test_a_model_that_is_not_built_does_not_transform(df: Any) -> None:
    for model in (Plain(), halfway()):
        by_hand = KerasModel(model=model, feature_columns=["x"], label_columns=["y"], custom_objects={"Plain": Plain})
        by_hand = by_hand._with(_metadata={"y": {"spark_data_type": DoubleType, "output_shape": [1]}})
        with pytest.raises(ConfigError, match=r"plain\w* is not built: begin it with keras\.Input, or call it"):
            by_hand.transform(df)
    with pytest.raises(ConfigError, match="a model of your own class must be called on some ro"):
        model_of(Library.here("keras"), archive_of(halfway()), {"Plain": Plain})


class Heads(Plain):
    def call(self, inputs: Any) -> Any:
        return {"hidden": inputs, "y": super().call(inputs)}


def test_outputs_in_a_dictionary_go_by_the_labels_names(df: Any) -> None:
    model = Heads()
    model(np.ones((2, 2), np.float32))
    arguments: dict[str, Any] = {"model": model, "feature_columns": ["x"], "custom_objects": {"Heads": Heads}}
    shape = {"spark_data_type": DoubleType, "output_shape": [1]}
    (row,) = (
        KerasModel(**arguments, label_columns=["y"], _metadata={"y": shape}).transform(df.where("id = 3")).collect()
    )
    expected = model.predict_on_batch(row.x.toArray()[None].astype(np.float32))["y"]
    assert row.y__output == pytest.approx(float(np.asarray(expected)[0, 0]), rel=1e-4)
    side = Side((Slot("z", None, None),), keyed=False)
    assert side.arrays({"only": 1}) == [1]
    with pytest.raises(ConfigError, match="returns a dictionary of 'hidden', 'y', but label_cols are 'z': name its"):
        side.arrays({"hidden": 1, "y": 2})


def test_rows_that_build_a_model_are_transformed_as_they_are_for_ranks(df: Any, store: Store) -> None:
    def wider(frame: Any) -> Any:
        frame["x"] = [np.append(each, 1.0) for each in frame["x"]]
        return frame

    trained = estimator(
        store,
        model=Plain(),
        custom_objects={"Plain": Plain},
        transformation_fn=wider,
        transformation_edit_fields=[("x", np.float64, (3,), False)],
    ).fit(df)
    assert trained.getModel().weights[0].shape == (3, 4)


def test_a_file_names_no_other_library_than_keras() -> None:
    """A folder that is not trusted does not choose a module that is imported."""
    with pytest.raises(ConfigError, match="belongs to 'antigravity', but a KerasEstimator needs keras or tf_ker"):
        _codecs.OF_MODELS["model"].decode({"json": b'{"library": "antigravity"}', "keras": b""}, {}, trusted=False)
    assert "antigravity" not in sys.modules


def test_data_are_transformed_weighted_and_kept_in_memory(df: Any, store: Store) -> None:
    def doubled(frame: Any) -> Any:
        frame["y"] = 2 * frame["y"]
        return frame

    model = estimator(
        store,
        optimizer=keras.optimizers.SGD(0.0),  # so that every epoch measures the model that was given
        sample_weight_col="b",
        transformation_fn=doubled,
        transformation_edit_fields=[("y", np.float64, (), False)],
        inmemory_cache_all=True,
        shuffle=False,
    ).fit(df.selectExpr("x", "y", "abs(b) as b"))
    rows = df.collect()
    off = net().predict(np.stack([row.x.toArray() for row in rows]), verbose=0)[:, 0] - [2 * row.y for row in rows]
    weights = np.abs([row.b for row in rows])
    assert model.getHistory()["loss"] == pytest.approx(2 * [float(np.mean(weights * off**2))], rel=1e-4)


def test_dictionaries_of_inputs_go_by_name(df: Any, store: Store) -> None:
    inputs = {"b": keras.Input((1,), name="b"), "a": keras.Input((1,), name="a")}
    joined = keras.layers.Concatenate()([inputs["a"], keras.layers.Rescaling(0.0)(inputs["b"])])
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(joined))
    trained = KerasModel(model=model, feature_columns=["b", "a"], label_columns=["y"])
    rows = trained.transform(df.where("id < 5")).collect()
    np.testing.assert_allclose([row.y__output for row in rows], [row.a for row in rows], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model is not set"),
        ({"model": object()}, "model= is builtins.object, not a model of Keras 3 or tf_keras"),
        ({"optimizer": None}, "no optimizer: give optimizer="),
        ({"optimizer": "nonsense"}, "optimizer='nonsense': Keras 3 on torch does not know it"),
        ({"optimizer": object()}, "the model belongs to Keras 3 on torch, but optimizer= is object"),
        ({"loss": None}, "no loss: give loss="),
        ({"loss": "nonsense"}, "loss='nonsense': Keras 3 on torch does not know it"),
        ({"metrics": ["accuracy", "nonsense"]}, "metrics='nonsense': Keras 3 on torch does not know it"),
        ({"metrics": [keras.metrics.MeanIoU]}, "MeanIoU is a class: give an instance of it.*num_classes"),
        ({"callbacks": [1]}, "callbacks: 1 is not a callback"),
        ({"callbacks": [keras.callbacks.EarlyStopping]}, "callbacks: <class .* is not a callback"),
        ({"checkpoint_callback": "here"}, "checkpoint_callback: 'here' is not a callback"),
        ({"feature_cols": ["x", "a"]}, r"feature_cols has 2 columns, x, a, but the model has 1 inputs"),
        ({"label_cols": ["y", "a"]}, r"label_cols has 2 columns, y, a, but the model has 1 outputs"),
        ({"model": 3}, r"column 'x' has 2 numbers in a row, but input '.*' of the model takes \(3\), which is 3"),
        ({"label_shapes": [[-1, 2]]}, r"column 'y' has 1 number in a row, but label_shapes says \(2\), which is 2"),
        ({"label_shapes": [[-1], [-1]]}, "label_shapes has 2 shapes for 1 label_cols"),
    ],
)
def test_mistakes_are_found_before_training(df: Any, store: Store, changes: dict[str, Any], message: str) -> None:
    if isinstance(changes.get("model"), int):
        changes = {"model": net(changes["model"])}
    with pytest.raises(ConfigError, match=message):
        estimator(store, backend=Unused(), **changes).fit(df)


class Unused(InPlace):
    def run(self, *arguments: Any, **named: Any) -> list[Any]:
        raise AssertionError("nothing is to be trained")


def test_a_model_of_torch_is_sent_to_the_other_estimator(df: Any, store: Store) -> None:
    import torch

    with pytest.raises(ConfigError, match=r"Linear, not a model of Keras 3 or tf_keras; TorchEstimator trains it"):
        estimator(store, model=torch.nn.Linear(2, 1)).fit(df)


def test_a_distributed_optimizer_is_refused(df: Any, store: Store) -> None:
    import hvdgloo.keras as hvd

    with pytest.raises(ConfigError, match="is already distributed; give the plain one"):
        estimator(store, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD())).fit(df)


def test_a_class_that_was_not_named_is_told_in_a_sentence() -> None:
    class Unnamed(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs

    model = keras.Sequential([keras.Input((2,)), Unnamed()])
    with pytest.raises(ConfigError, match=r"Could not locate class 'Unnamed'.*name them in custom_objects=") as caught:
        model_of(library_of_model(model), archive_of(model), {})
    assert "config" not in str(caught.value)


def test_a_process_has_one_keras() -> None:
    here = Library.here("keras")
    other = Library("keras", "jax" if here.backend != "jax" else "torch")
    with pytest.raises(ConfigError, match=f"this process has imported Keras on {here.backend}; set KERAS_BACKEND="):
        other.use()


def test_a_keras_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    with pytest.raises(MissingDependencyError, match="belongs to tf_keras, which is not installed here"):
        Library.here("tf_keras")
    with pytest.raises(MissingDependencyError, match="the model belongs to tf_keras, but tf_keras is not installed"):
        Library("tf_keras", "tensorflow").use()


@pytest.mark.parametrize(
    ("variables", "use_gpu", "local_rank", "visible"),
    [
        ({}, True, 1, "1"),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, True, 1, "6"),
        ({"CUDA_VISIBLE_DEVICES": "4"}, True, 1, "4"),
        ({"CUDA_VISIBLE_DEVICES": "4"}, False, 0, "-1"),
        ({"HVDGLOO_SPARK_DEVICES": "3"}, True, 0, "3"),
        ({"HVDGLOO_SPARK_DEVICES": "3", "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "1"}, True, 2, "2"),
    ],
)
def test_a_rank_sees_the_gpu_of_its_task_or_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], use_gpu: bool, local_rank: int, visible: str
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HVDGLOO_SPARK_DEVICES", "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is put back as it was
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _choose_gpu(use_gpu, local_rank)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_every_argument_is_a_param_with_its_methods(store: Store) -> None:
    fitting = estimator(store)
    spelled = {"shuffle_buffer_size": "ShufflingBufferSize", "inmemory_cache_all": "InMemoryCacheAll"}
    spelled |= {f"{kind}_reader_num_workers": f"{kind.title()}ReaderNumWorker" for kind in ("train", "val")}
    names = [name for name in inspect.signature(KerasEstimator.__init__).parameters if name != "self"]
    assert len(names) == 44
    for name in names:
        title = spelled.get(name) or "".join(part.title() for part in name.split("_"))
        value = getattr(fitting, f"get{title}")()
        assert getattr(fitting, f"set{title}")(value) is fitting
        assert getattr(fitting, f"get{title}")() == value
        assert fitting.hasParam(name)
    assert fitting.getBackendEnv() == {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"}
    assert fitting.get_model_shapes() == ([(None, 2)], [(None, 1)])
    assert fitting.get_model_class() is KerasModel


# Saving and loading.


def files(path: Path) -> set[str]:
    return {file.name for file in (path / "params").iterdir() if not file.name.startswith(".")}


def test_estimators_and_models_are_saved_in_kerass_own_formats(df: Any, store: Store, tmp_path: Path) -> None:
    fitting = estimator(store, loss=[keras.losses.Huber(0.5)], metrics=["mae", keras.metrics.MeanSquaredError()])
    fitting.save(str(tmp_path / "estimator"))
    assert not [name for name in files(tmp_path / "estimator") if name.endswith(".pkl")]
    loaded = KerasEstimator.load(str(tmp_path / "estimator"), trusted=False)
    assert loaded.getBackend() is None
    assert loaded.getOptimizer().get_config() == fitting.getOptimizer().get_config()
    first = fitting.fit(df)
    second = loaded.setBackend(InPlace()).setStore(store).fit(df)
    assert second.getHistory() == first.getHistory()
    assert set(first.getHistory()) == {"loss", "mae", "mean_squared_error"}

    first.save(str(tmp_path / "model"))
    assert not [name for name in files(tmp_path / "model") if name.endswith(".pkl")]
    model = KerasModel.load(str(tmp_path / "model"), trusted=False)
    assert model.getHistory() == first.getHistory()
    assert float(model.getModel().optimizer.learning_rate) == np.float32(0.05)
    assert int(model.getModel().optimizer.iterations) == int(first.getModel().optimizer.iterations) > 0
    rows = df.where("id < 5")
    assert model.transform(rows).collect() == first.transform(rows).collect()


def test_what_is_the_users_own_is_pickled_and_refused_if_not_trusted(df: Any, store: Store, tmp_path: Path) -> None:
    class Doubled(keras.layers.Dense):
        def call(self, inputs: Any) -> Any:
            return 2 * super().call(inputs)

    model = keras.Sequential([keras.Input((2,)), Doubled(1)])
    fitting = estimator(
        store,
        model=model,
        custom_objects={"Doubled": Doubled},
        loss=lambda truth, predicted: (truth - predicted) ** 2,
        epochs=1,
    )
    path = str(tmp_path / "estimator")
    fitting.save(path)
    with pytest.raises(ConfigError, match="custom_objects, model, loss would be unpickled"):
        KerasEstimator.load(path, trusted=False)
    again = KerasEstimator.load(path).setStore(store).setBackend(InPlace())
    trained = again.fit(df)
    assert trained.getHistory() == fitting.fit(df).getHistory()
    given = KerasEstimator.load(path, trusted=False, custom_objects={"Doubled": Doubled}, loss="mse")
    assert given.getModel().layers[-1].__class__ is Doubled

    path = str(tmp_path / "model")
    trained.save(path)
    assert KerasModel.load(path).transform(df.limit(1)).columns[-1] == "y__output"


@pytest.mark.usefixtures("spark")
def test_a_model_with_a_lambda_whose_source_is_nowhere_is_saved_without_its_loss(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net(name="nameless")
    model.compile("adam", eval("lambda truth, predicted: (truth - predicted) ** 2"))
    model.optimizer.build(model.trainable_variables)
    path = str(tmp_path / "model")
    KerasModel(model=model, feature_columns=["x"], label_columns=["y"]).save(path)
    assert "nameless is saved without its loss and metrics, since they include a lambda" in caplog.text
    loaded = KerasModel.load(path).getModel()
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert loaded.loss is None
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_pipelines_are_saved_with_their_estimators_and_models(df: Any, store: Store, tmp_path: Path) -> None:
    Pipeline(stages=[estimator(store, epochs=1)]).save(str(tmp_path / "pipeline"))
    (stage,) = Pipeline.load(str(tmp_path / "pipeline")).getStages()
    fitted = Pipeline(stages=[stage.setStore(store).setBackend(InPlace())]).fit(df)
    fitted.save(str(tmp_path / "fitted"))
    (model,) = PipelineModel.load(str(tmp_path / "fitted")).stages
    assert isinstance(model, KerasModel)
    assert model.getHistory() == fitted.stages[0].getHistory()


def test_what_a_callback_saves_has_one_name(store: Store) -> None:
    with RunFiles(estimators.training(store, ROWS)) as files:
        for given, name in (("some/kept.keras", "kept.keras"), ("some/{epoch}-{val_loss:.2f}.keras", "best.keras")):
            callback = keras.callbacks.ModelCheckpoint(given)
            assert files.keep(callback, {}) == name
            assert callback.filepath == os.path.join(files.folder, name)


def test_the_checkpoint_is_a_file_that_keras_reads(df: Any, store: Store) -> None:
    model = estimator(store, run_id="mine").fit(df)
    folder = store.get_localized_path(store.get_checkpoint_path("mine"))
    read = keras.models.load_model(Path(folder, "checkpoint.keras"))
    for ours, theirs in zip(read.get_weights(), model.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert json.dumps(model.getHistory())


def test_a_checkpoint_is_read_as_text_with_its_weights_put_into_a_model(store: Store, tmp_path: Path) -> None:
    def weights_of(text: str, custom_objects: Any = None) -> list[Any]:
        file = tmp_path / "read.keras"
        file.write_bytes(base64.b64decode(text))
        return list(keras.models.load_model(file, custom_objects=custom_objects).get_weights())

    class Doubled(keras.layers.Dense):
        def call(self, inputs: Any) -> Any:
            return 2 * super().call(inputs)

    saved, given = net(), net()
    own = keras.Sequential([keras.Input((2,)), Doubled(1)])
    for variable in saved.weights:
        variable.assign(variable + 1)
    before = given.get_weights()
    for name, save in (("whole.keras", saved.save), ("only.weights.h5", saved.save_weights)):
        save(tmp_path / name)
        store.write_bytes(f"{store.get_run_path('r')}/{name}", (tmp_path / name).read_bytes())
    own.save_weights(tmp_path / "own.weights.h5")
    store.write_bytes(f"{store.get_run_path('r')}/own", (tmp_path / "own.weights.h5").read_bytes())

    whole = store.read_serialized_keras_model(f"{store.get_run_path('r')}/whole.keras")
    filled = store.read_serialized_keras_model(f"{store.get_run_path('r')}/only.weights.h5", given, {})
    for text in (whole, filled):
        for ours, theirs in zip(weights_of(text), saved.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(given.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    names = {"Doubled": Doubled}
    text = store.read_serialized_keras_model(f"{store.get_run_path('r')}/own", own, names)
    np.testing.assert_array_equal(weights_of(text, names)[0], own.get_weights()[0])
    with pytest.raises(ConfigError, match="weights of another model than"):
        store.read_serialized_keras_model(f"{store.get_run_path('r')}/only.weights.h5", wider(), {})
    with pytest.raises(StoreError, match="cannot be read"):
        store.read_serialized_keras_model(f"{store.get_run_path('r')}/nothing", given, {})
