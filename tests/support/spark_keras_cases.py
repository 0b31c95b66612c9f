"""Ways in which ranks of a KerasEstimator train, without Spark; the test starts a job for each library and backend.

    hvdgloo-run -np 2 tests/support/spark_keras_cases.py LIBRARY FOLDER

Every rank runs every case and writes, for each, "ok" or what it raised, to FOLDER/results.<rank>.json. Ranks compare
what they have with training in one process on the concatenated batches.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hvdgloo.numpy as hvd
from hvdgloo._job import process
from hvdgloo._platform import pickling
from hvdgloo.spark.common._training import Reading, Training
from hvdgloo.spark.common.serialization import Refused
from hvdgloo.spark.common.store import LocalStore
from hvdgloo.spark.keras import _remote as remote
from hvdgloo.spark.keras._codecs import OF_MODELS
from hvdgloo.spark.keras._layout import layout_of
from hvdgloo.spark.keras._library import Library
from hvdgloo.spark.keras._models import (
    Compilation,
    archive_of,
    compilation_of,
    ensure_savable,
    load_state,
    model_of,
    signature_of,
)

NAME = sys.argv[1]
LIBRARY = Library("tf_keras", "tensorflow") if NAME == "tf_keras" else Library("keras", NAME)
FOLDER = Path(sys.argv[2])
LIBRARY.use()
keras = LIBRARY.module
STORE = LocalStore(str(FOLDER / "store"))
CASES: dict[str, Callable[[], None]] = {}
ROWS, BATCH = 96, 8
RNG = np.random.default_rng(7)
X = RNG.normal(size=(ROWS, 4))
Y = np.tanh(X @ RNG.normal(size=(4, 3)))
CLASSES = Y.argmax(axis=1)
WEIGHTS = RNG.uniform(0.5, 2, size=ROWS)


TRACED = {
    "adam_is_equal_to_one_process",
    "a_run_goes_on_as_if_it_had_not_been_interrupted",
    "dropout_goes_on_as_if_it_had_not_been_interrupted",
}
"""Cases that run in TensorFlow's functions, as users' programs do: tracing them takes most of the time."""


def eagerly(wanted: bool) -> None:
    if LIBRARY.backend == "tensorflow":
        import tensorflow as tf

        tf.config.run_functions_eagerly(wanted)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def write_data() -> None:
    table = pa.table(
        {
            "x": pa.array(list(X)),
            "y": pa.array(list(Y)),
            "left": pa.array(list(X[:, :2])),
            "right": pa.array(list(X[:, 2:])),
            "class": CLASSES,
            "weight": WEIGHTS,
        }
    )
    for path in (STORE.get_train_data_path(), STORE.get_val_data_path()):
        folder = Path(STORE.get_localized_path(path))
        folder.mkdir(parents=True)
        pq.write_table(table, folder / "part.parquet", row_group_size=20)


def dense(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, activation="tanh", name="hidden"), keras.layers.Dense(3, name="out")]
    return keras.Sequential([keras.layers.Input((4,)), *layers])


def training(run_id: str, **changed: Any) -> Training:
    given: dict[str, Any] = {
        "run_id": run_id,
        "store": STORE.to_remote(run_id),
        "checkpoint_filename": "checkpoint.keras",
        "train_rows": ROWS,
        "validation_rows": 0,
        "feature_cols": ("x",),
        "label_cols": ("y",),
        "sample_weight_col": None,
        "batch_size": BATCH,
        "validation_batch_size": BATCH,
        "epochs": 2,
        "train_steps": None,
        "validation_steps": None,
        "seed": 3,
        "reading": Reading(),
        "verbose": 0,
        "use_gpu": True,
        "backward_passes_per_step": 1,
        "gradient_compression": None,
    }
    return Training(**given | changed)


def fit(
    model: Any,
    compilation: Compilation,
    setting: Training,
    names: Any = None,
    callbacks: Any = (),
    checkpoint_callback: Any = None,
    label_shapes: Any = None,
) -> Any:
    """Return the driver's results: history, model and the first rank's return value; on the other ranks None."""
    layout = layout_of(model, LIBRARY.floatx, setting.feature_cols, setting.label_cols, label_shapes)
    job = remote.Job(archive_of(model), compilation, layout, names or {}, list(callbacks), checkpoint_callback)
    setting = dataclasses.replace(setting, signature=signature_of(model))
    result = remote.train(LIBRARY, pickling.dumps(job), cloudpickle.loads(cloudpickle.dumps(setting)))
    assert (result is None) == (hvd.rank() > 0)
    hvd.barrier()
    if result is None:
        return None
    trained = model_of(LIBRARY, result.state, names or {})
    compilation.compile(LIBRARY, trained, names or {})
    load_state(trained, result.state)
    return result, trained


def alone(
    model: Any,
    compilation: Compilation,
    setting: Training,
    passes: int = 1,
    factor: int | None = None,
    names: Any = None,
) -> list[np.ndarray]:
    """The weights after training in one process, on the batches of all ranks together."""
    size = hvd.size()
    compilation.compile(LIBRARY, model, names or {})
    if factor is None:
        model.optimizer.learning_rate = float(np.asarray(model.optimizer.learning_rate)) * size
    layout = layout_of(model, LIBRARY.floatx, setting.feature_cols, setting.label_cols, None)
    readers = [setting.batches(rank, size) for rank in range(size)]
    for epoch in range(setting.epochs):
        steps = list(zip(*(reader.epoch(epoch) for reader in readers), strict=True))
        for begin in range(0, len(steps), passes):
            parts = [part for step in steps[begin : begin + passes] for part in step]
            columns = [np.concatenate(each) for each in zip(*(part.features for part in parts), strict=True)]
            labels = [np.concatenate(each) for each in zip(*(part.labels for part in parts), strict=True)]
            weights = np.concatenate([part.weights for part in parts]) if setting.sample_weight_col else None
            model.train_on_batch(layout.features(columns), layout.labels(labels), sample_weight=weights)
    for reader in readers:
        reader.__exit__(None, None, None)
    return model.get_weights()


def assert_close(first: Any, second: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def equal_to_one_process(optimizer: Any, run_id: str, passes: int = 1, **changed: Any) -> None:
    compilation = compilation_of(LIBRARY, dense(), optimizer, "mse")
    setting = training(run_id, backward_passes_per_step=passes, **changed)
    fitted = fit(dense(), compilation, setting)
    if fitted is not None:
        _, trained = fitted
        assert_close(trained.get_weights(), alone(dense(), compilation, setting, passes))
        given = type(trained.optimizer)
        assert given.__name__ == type(optimizer).__name__
        assert float(trained.optimizer.learning_rate) == float(optimizer.learning_rate)


@case
def tensorflow_is_only_imported_where_it_is_the_backend() -> None:
    data = archive_of(dense())
    model_of(LIBRARY, data, {})
    assert ("tensorflow" in sys.modules) == (LIBRARY.backend == "tensorflow")


@case
def sgd_is_equal_to_one_process() -> None:
    equal_to_one_process(keras.optimizers.SGD(0.02, momentum=0.9), "sgd")


@case
def adam_is_equal_to_one_process() -> None:
    equal_to_one_process(keras.optimizers.Adam(0.01), "adam")


@case
def backward_passes_are_averaged() -> None:
    equal_to_one_process(keras.optimizers.SGD(0.02), "passes", passes=2)


@case
def sample_weights_count() -> None:
    equal_to_one_process(keras.optimizers.SGD(0.02), "weights", sample_weight_col="weight")


@case
def a_run_goes_on_as_if_it_had_not_been_interrupted() -> None:
    compilation = compilation_of(LIBRARY, dense(), keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    whole = fit(dense(), compilation, training("whole", epochs=2, validation_rows=ROWS))
    fit(dense(), compilation, training("parts", epochs=1, validation_rows=ROWS))
    rest = fit(dense(2), compilation, training("parts", epochs=2, validation_rows=ROWS))
    if whole is not None and rest is not None:
        assert_close(whole[1].get_weights(), rest[1].get_weights(), 1e-6)
        assert set(whole[0].history) == {"loss", "mae", "val_loss", "val_mae"}
        for name, values in whole[0].history.items():
            np.testing.assert_allclose(rest[0].history[name], values, rtol=1e-5)
            assert len(values) == 2
        if importlib.util.find_spec("tensorboard") is not None:
            folder = Path(STORE.get_localized_path(STORE.get_run_path("parts")))
            logs = [path.relative_to(folder).parts[:2] for path in folder.rglob("events.out.tfevents.*")]
            assert sorted(logs) == sorted(2 * [("logs", "train"), ("logs", "validation")])  # of both jobs


class RanksAreAlike(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Compares what all ranks have, after every epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mine = [np.asarray(self.model.optimizer.learning_rate), *self.model.get_weights()]
        for others in hvd.allgather_object(mine):
            assert_close(others, mine, 0)


@case
def all_ranks_go_on_with_the_rate_of_the_checkpoint() -> None:
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 4)
    compilation = compilation_of(LIBRARY, dense(), keras.optimizers.SGD(0.02), "mse")
    fit(dense(), compilation, training("slower", epochs=1), callbacks=[slower, RanksAreAlike()])
    fitted = fit(dense(), compilation, training("slower", epochs=2), callbacks=[RanksAreAlike()])
    if fitted is not None:
        np.testing.assert_allclose(float(np.asarray(fitted[1].optimizer.learning_rate)), 0.02 / 4, rtol=1e-6)


@case
def dropout_goes_on_as_if_it_had_not_been_interrupted() -> None:
    def dropping() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
        return keras.Sequential([keras.layers.Input((4,)), *layers])

    compilation = compilation_of(LIBRARY, dropping(), keras.optimizers.SGD(0.02), "mse")
    whole = fit(dropping(), compilation, training("dropping", epochs=2))
    fit(dropping(), compilation, training("dropped", epochs=1))
    rest = fit(dropping(), compilation, training("dropped", epochs=2))
    if whole is not None and rest is not None:
        assert_close(whole[1].get_weights(), rest[1].get_weights(), 1e-6)
        assert "rng_type" not in str(rest[1].get_config())  # which is how tf_keras would name other generators


def read_checkpoint(run_id: str, names: Any = None) -> Any:
    """The run's checkpoint, as a program without hvdgloo reads it."""
    path = Path(STORE.get_localized_path(STORE.get_checkpoint_path(run_id)), "checkpoint.keras")
    return keras.models.load_model(path, custom_objects=names)


@case
def schedules_are_scaled_and_not_stored_so() -> None:
    def scheduled(rate: float) -> Any:
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.5))

    compilation = compilation_of(LIBRARY, dense(), scheduled(0.1), "mse")
    setting = training("schedule")
    fitted = fit(dense(), compilation, setting)
    if fitted is not None:
        reference = compilation_of(LIBRARY, dense(), scheduled(0.1 * hvd.size()), "mse")
        assert_close(fitted[1].get_weights(), alone(dense(), reference, setting, factor=1))
        for model in (fitted[1], read_checkpoint("schedule")):
            assert model.optimizer.get_config()["learning_rate"]["config"]["initial_learning_rate"] == 0.1


@case
def a_compiled_model_keeps_its_optimizer_and_what_that_knows() -> None:
    def trained() -> Any:
        model = dense()
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
        model.train_on_batch(X[:8], Y[:8])
        return model

    model = trained()
    fitted = fit(model, compilation_of(LIBRARY, model), training("compiled"))
    if fitted is not None:
        again = trained()
        assert_close(fitted[1].get_weights(), alone(again, compilation_of(LIBRARY, again), training("compiled")))
        assert set(fitted[0].history) == {"loss", "mae"}
        assert int(np.asarray(fitted[1].optimizer.iterations)) == 1 + 2 * ROWS // BATCH // hvd.size()


def two_sided() -> Any:
    """Two inputs, and two outputs: numbers, and a class's scores."""
    keras.utils.set_random_seed(5)
    inputs = [keras.layers.Input((2,), name=name) for name in ("a", "b")]
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Concatenate()(inputs))
    return keras.Model(inputs, [keras.layers.Dense(3, name=name)(hidden) for name in ("numbers", "scores")])


@case
def several_inputs_labels_losses_and_weights() -> None:
    losses = ["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
    compilation = compilation_of(
        LIBRARY, two_sided(), keras.optimizers.SGD(0.05), losses, [0.25, 2.0], [["mae"], ["accuracy"]]
    )
    setting = training("several", feature_cols=("left", "right"), label_cols=("y", "class"), validation_rows=ROWS)
    fitted = fit(two_sided(), compilation, setting)
    if fitted is not None:
        result, trained = fitted
        assert_close(trained.get_weights(), alone(two_sided(), compilation, setting))
        assert {"loss", "numbers_loss", "numbers_mae", "scores_accuracy", "val_scores_loss"} <= set(result.history)
        assert result.outputs == ((3,), (3,))
        numbers, scores = trained.predict([X[:, :2], X[:, 2:]], verbose=0)
        whole = 0.25 * ((numbers - Y) ** 2).mean() - 2 * log_softmax(scores)[np.arange(ROWS), CLASSES].mean()
        # What was measured is the mean over ranks and batches, which are all as large, of the last epoch's end.
        np.testing.assert_allclose(result.history["val_loss"][-1], whole, rtol=1e-4)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@case
def classes_and_functions_of_the_user() -> None:
    class Doubled(keras.layers.Dense):  # type: ignore[misc, name-defined]
        def call(self, inputs: Any) -> Any:
            return 2 * super().call(inputs)

    def model() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Input((4,)), Doubled(8, activation="tanh"), keras.layers.Dense(3)])

    def off(truth: Any, predicted: Any) -> Any:
        return abs(truth - predicted)

    names = {"Doubled": Doubled}
    compilation = compilation_of(
        LIBRARY, model(), "sgd", lambda truth, predicted: (truth - predicted) ** 2, None, [off]
    )
    plain = compilation_of(LIBRARY, model(), keras.optimizers.SGD(), "mse")
    setting = training("functions", epochs=1)
    fit(model(), compilation, setting, names)
    setting = training("functions", epochs=2)
    fitted = fit(model(), compilation, setting, names)
    if fitted is not None:
        assert set(fitted[0].history) == {"loss", "off"}
        assert_close(fitted[1].get_weights(), alone(model(), plain, setting, names=names))


@case
def callbacks_decide_alike_and_what_they_set_is_stored_unscaled() -> None:
    stop = keras.callbacks.EarlyStopping("val_loss", patience=0, mode="max")  # it gets smaller: stops after two epochs
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 4 if epoch == 1 else rate)
    compilation = compilation_of(LIBRARY, dense(), keras.optimizers.Adam(0.01), "mse")
    fitted = fit(dense(), compilation, training("callbacks", epochs=5, validation_rows=ROWS), callbacks=[slower, stop])
    if fitted is not None:
        result, trained = fitted
        assert len(result.history["loss"]) == 2
        stored = read_checkpoint("callbacks")
        for model in (trained, stored):
            np.testing.assert_allclose(float(np.asarray(model.optimizer.learning_rate)), 0.01 / 4, rtol=1e-6)
        assert_close(stored.get_weights(), trained.get_weights(), 0)


@case
def the_model_of_a_checkpoint_callback_is_returned() -> None:
    from hvdgloo.keras.callbacks import BestModelCheckpoint

    ruin = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < 1 else 1000 * rate)
    compilation = compilation_of(LIBRARY, dense(), keras.optimizers.SGD(0.02), "mse")
    for number, kept in enumerate(callbacks_that_keep(BestModelCheckpoint)):
        run = f"best-{number}"
        first = fit(dense(), compilation, training(run, epochs=1, validation_rows=ROWS), checkpoint_callback=kept)
        fitted = fit(
            dense(),
            compilation,
            training(run, epochs=3, validation_rows=ROWS),
            callbacks=[ruin],
            checkpoint_callback=kept,
        )
        if fitted is not None and first is not None:
            result, trained = fitted
            assert result.history["val_loss"][0] < min(result.history["val_loss"][1:])
            assert_close(trained.get_weights(), first[1].get_weights(), 0)
            if not kept.save_weights_only:
                assert float(np.asarray(trained.optimizer.learning_rate)) == np.float32(0.02)
            assert not np.allclose(read_checkpoint(run).get_weights()[0], trained.get_weights()[0])


@case
def each_checkpoint_is_counted_once_for_the_charts() -> None:
    from hvdgloo.keras.callbacks import LogCallback

    before, _ = process.group_counters().saves.get("checkpoint", (0, 0.0))
    compilation = compilation_of(LIBRARY, dense(), keras.optimizers.SGD(0.02), "mse")
    kept = keras.callbacks.ModelCheckpoint("elsewhere/kept.keras")
    fit(dense(), compilation, training("counted"), callbacks=[LogCallback()], checkpoint_callback=kept)
    count, _ = process.group_counters().saves.get("checkpoint", (0, 0.0))
    assert count - before == (4 if hvd.rank() == 0 else 0), "the run's after each of two epochs, and the callback's"


@case
def a_lambda_whose_source_is_nowhere() -> None:
    """From a notebook on another host, or a saved estimator: Keras cannot save what is compiled with it."""
    loss = eval("lambda truth, predicted: (truth - predicted) ** 2")
    compilation = compilation_of(LIBRARY, dense(), keras.optimizers.SGD(0.02), loss)
    kept = keras.callbacks.ModelCheckpoint("elsewhere/kept.keras", monitor="val_loss", save_best_only=True)
    fitted = fit(dense(), compilation, training("lambda", validation_rows=ROWS), checkpoint_callback=kept)
    if fitted is not None:
        trained = fitted[1]
        assert np.isfinite(fitted[0].history["val_loss"]).all()
        assert not ensure_savable(trained)
        trained.compile("sgd", "mse")
        assert ensure_savable(trained)


def callbacks_that_keep(best: Any) -> list[Any]:
    if LIBRARY.name == "tf_keras":
        return [keras.callbacks.ModelCheckpoint("elsewhere/kept.keras", monitor="val_loss", save_best_only=True)]
    return [best(), best(save_weights_only=True)]


@case
def rows_that_do_not_divide_evenly_and_steps_that_are_given() -> None:
    compilation = compilation_of(LIBRARY, dense(), keras.optimizers.SGD(0.02), "mse")
    fitted = fit(dense(), compilation, training("uneven", batch_size=7, epochs=1, validation_rows=ROWS))
    if fitted is not None:
        assert int(np.asarray(fitted[1].optimizer.iterations)) == -(-(ROWS // hvd.size()) // 7)
    equal_to_one_process(keras.optimizers.SGD(0.02), "steps", train_steps=2, epochs=3)


@case
def only_archives_are_read_from_a_source_that_is_not_trusted() -> None:
    """Of a file in HDF5's format, tf_keras unmarshals functions even where it is asked not to."""
    file = FOLDER / f"model.{hvd.rank()}.h5"
    marking = keras.layers.Lambda(lambda x: (__import__("os").environ.update(MARK="1"), x)[1], output_shape=(4,))
    keras.Sequential([keras.layers.Input((4,)), marking]).save(file)
    os.environ.pop("MARK", None)
    saved = {"keras": file.read_bytes(), "json": json.dumps({"library": LIBRARY.name}).encode()}
    try:
        OF_MODELS["model"].decode(saved, {}, trusted=False)
    except Refused:
        assert "MARK" not in os.environ
    else:
        raise AssertionError("it was loaded")
    OF_MODELS["model"].decode(saved, {}, trusted=True).predict_on_batch(X[:2])  # Keras 3 calls it only now
    assert os.environ.pop("MARK") == "1"


def main() -> None:
    hvd.init()
    file = FOLDER / f"results.{hvd.rank()}.json"
    if hvd.rank() == 0:
        write_data()
    hvd.barrier()
    outcome: dict[str, str] = {}
    for name in sys.argv[3:] or CASES:
        eagerly(name not in TRACED)
        try:
            CASES[name]()
            outcome[name] = "ok"
        except Exception:
            outcome[name] = traceback.format_exc()
            raise  # the launcher ends the others, which may wait for this one
        finally:
            file.write_text(json.dumps(outcome))
        hvd.barrier()


if __name__ == "__main__":
    main()
