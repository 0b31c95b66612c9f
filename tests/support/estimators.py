"""Small data sets and backends for tests of estimators."""

from __future__ import annotations

import bz2
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdgloo.spark.common._training import Reading, Training
from hvdgloo.spark.common.backend import Backend
from hvdgloo.spark.common.store import Store

Array = NDArray[Any]


class InPlace(Backend):
    """Calls the function in this process, alone: no process is started.

    It knows nothing of an environment, as backends need not.

    Args:
        processes: of how many it makes believe; all have the same result.
    """

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes

    def run(  # type: ignore[override]
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        return [fn(*args, **(kwargs or {}))] * self._processes

    def num_processes(self) -> int:
        return self._processes


def write(store: Store, columns: Mapping[str, Array], *, validation: bool = False, rows_in_group: int = 64) -> None:
    """Columns of shape (rows,) or (rows, numbers) as the store's training data, without Spark."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = store.get_val_data_path(0) if validation else store.get_train_data_path(0)
    folder = Path(store.get_full_path(path).removeprefix("file://"))
    folder.mkdir(parents=True)
    table = pa.table({name: pa.array(list(values)) for name, values in columns.items()})
    pq.write_table(table, folder / "part-0.parquet", row_group_size=rows_in_group)


def training(store: Store, rows: int, **changes: Any) -> Training:
    """A training on the store's data set 0, of columns ``features`` and ``label``."""
    run_id = changes.pop("run_id", "run")
    return dataclasses.replace(
        Training(
            run_id=run_id,
            store=store.to_remote(run_id, 0),
            checkpoint_filename="checkpoint",
            train_rows=rows,
            validation_rows=0,
            feature_cols=("features",),
            label_cols=("label",),
            sample_weight_col=None,
            batch_size=16,
            validation_batch_size=16,
            epochs=2,
            train_steps=None,
            validation_steps=None,
            seed=0,
            reading=Reading(),
            verbose=0,
            use_gpu=True,
            backward_passes_per_step=1,
            gradient_compression=None,
        ),
        **changes,
    )


def linear(rows: int, width: int = 6, seed: int = 0) -> dict[str, Array]:
    """``label`` is what a linear function makes of ``features``, and some noise."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, width))
    label = features @ rng.normal(size=width) + 0.1 * rng.normal(size=rows)
    return {"features": features, "label": label}


def write_mnist(path: Path, rows: int) -> None:
    """scikit-learn's digits, enlarged to MNIST's 28 x 28 pixels, as the file that Horovod's examples download."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    large = np.kron(images[:rows].reshape(-1, 8, 8) / 16, np.ones((3, 3)))
    large = np.pad(large, ((0, 0), (2, 2), (2, 2))).reshape(-1, 784)
    lines = []
    for image, digit in zip(large, digits, strict=False):
        pixels = " ".join(f"{index + 1}:{image[index]:.3f}" for index in np.flatnonzero(image))
        lines.append(f"{digit} {pixels}\n")
    path.write_bytes(bz2.compress("".join(lines).encode()))
