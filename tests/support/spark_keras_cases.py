"""Ways in which ranks of a KerasEstimator train, without Spark; the test starts a job for each library and backend.

    hvdgloo-run -np 2 tests/support/spark_keras_cases.py LIBRARY FOLDER

Every rank runs every case and writes, for each, "ok" or what it raised, to FOLDER/results.<rank>.json. Ranks compare
what they have with training in one process on the concatenated batches.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hvdgloo.numpy as hvd
from hvdgloo.spark.common._training import Reading, Training, TrainingResult
from hvdgloo.spark.keras import _remote as remote
from hvdgloo.spark.keras._layout import layout_of
from hvdgloo.spark.keras._library import Library
from hvdgloo.spark.keras._models import Compilation, archive_of, compilation_of, load_state, model_of, signature_of

NAME = sys.argv[1]
LIBRARY = Library("tf_keras", "tensorflow") if NAME == "tf_keras" else Library("keras", NAME)
FOLDER = Path(sys.argv[2])
if LIBRARY.backend != "tensorflow":
    sys.modules["tensorflow"] = None  # type: ignore[assignment] # Keras would import it in passing, and needs it not
LIBRARY.use()
keras = LIBRARY.module
CASES: dict[str, Callable[[], None]] = {}
ROWS, BATCH = 96, 8
RNG = np.random.default_rng(7)
X = RNG.normal(size=(ROWS, 4))
Y = np.tanh(X @ RNG.normal(size=(4, 3)))
CLASSES = Y.argmax(axis=1)
WEIGHTS = RNG.uniform(0.5, 2, size=ROWS)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Store:
    saving_runs = True
    logs_subdir = "logs"

    def __init__(self, run_id):
        self.run_path = self.checkpoint_path = str(FOLDER / "runs" / run_id)
        self.train_data_path = str(FOLDER / "train")
        self.val_data_path = str(FOLDER / "val")

    def exists(self, path):
        return os.path.exists(path)

    def read(self, path):
        return Path(path).read_bytes()

    def write_bytes(self, path, data):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    @contextmanager
    def get_local_output_dir(self):
        Path(self.run_path).mkdir(parents=True, exist_ok=True)
        yield self.run_path

    def sync(self, folder):
        pass

    def batches(self, path, columns, **options):
        from hvdgloo.spark.data import ParquetBatches

        return ParquetBatches(path, columns, **options)


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
    for name in ("train", "val"):
        (FOLDER / name).mkdir()
        pq.write_table(table, FOLDER / name / "part.parquet", row_group_size=20)


def dense(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, activation="tanh", name="hidden"), keras.layers.Dense(3, name="out")]
    return keras.Sequential([keras.layers.Input((4,)), *layers])


def training(run_id: str, **changed: Any) -> Training:
    given: dict[str, Any] = {
        "run_id": run_id,
        "store": Store(run_id),
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
    """What the driver has after a job: history, model and what the first rank returned; on the other ranks None."""
    layout = layout_of(model, LIBRARY.floatx, setting.feature_cols, setting.label_cols, label_shapes)
    job = remote.Job(archive_of(model), compilation, layout, names or {}, list(callbacks), checkpoint_callback)
    setting = dataclasses.replace(setting, signature=signature_of(model))
    result = remote.train(LIBRARY, cloudpickle.dumps(job), cloudpickle.loads(cloudpickle.dumps(setting)))
    assert (result is None) == (hvd.rank() > 0)
    hvd.barrier()
    if result is None:
        return None
    trained = model_of(LIBRARY, result.state, names or {})
    compilation.compile(LIBRARY, trained, names or {})
    load_state(trained, result.state)
    return result, trained


def alone(model: Any, compilation: Compilation, setting: Training, passes: int = 1) -> list[np.ndarray]:
    """The weights after training in one process, on the batches of all ranks together."""
    size = hvd.size()
    compilation.compile(LIBRARY, model, {})
    model.optimizer.learning_rate = float(model.optimizer.learning_rate) * size
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
    whole = fit(dense(), compilation, training("whole", epochs=4, validation_rows=ROWS))
    fit(dense(), compilation, training("parts", epochs=2, validation_rows=ROWS))
    rest = fit(dense(2), compilation, training("parts", epochs=4, validation_rows=ROWS))
    if whole is not None and rest is not None:
        assert_close(whole[1].get_weights(), rest[1].get_weights(), 1e-6)
        assert set(whole[0].history) == {"loss", "mae", "val_loss", "val_mae"}
        for name, values in whole[0].history.items():
            np.testing.assert_allclose(rest[0].history[name], values, rtol=1e-5)
            assert len(values) == 4


def main() -> None:
    hvd.init()
    file = FOLDER / f"results.{hvd.rank()}.json"
    if hvd.rank() == 0:
        write_data()
    hvd.barrier()
    outcome: dict[str, str] = {}
    for name in sys.argv[3:] or CASES:
        try:
            CASES[name]()
        except Exception:
            outcome[name] = traceback.format_exc()
        else:
            outcome[name] = "ok"
        file.write_text(json.dumps(outcome))
        # The others go on only if all have come so far: a rank that failed halfway would take part in other cases.
        if len(set(hvd.allgather_object(outcome[name] == "ok", name=f"after.{name}"))) > 1:
            break


if __name__ == "__main__":
    main()
