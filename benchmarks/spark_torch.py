"""The cost of TorchEstimator and TorchModel: rows of ``benchmarks/spark.py``."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hvdgloo.run
from tests.support import estimators

_WIDTH = 64
_CLASSES = 10
_TRAINED = 100_000
_BATCH = 256
_EPOCHS = 4


def _model() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(_WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, _CLASSES))


def _loss(output: Any, label: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(output, label.long())


def measure_transform(spark: Any, rounds: int) -> dict[str, float]:
    """Rows of 64 doubles through a small network, in Arrow batches, and row by row as Horovod does it."""
    import torch
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.linalg import DenseVector, VectorUDT
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import DoubleType, StructField, StructType

    from hvdgloo.spark.torch import TorchModel

    model = _model()
    made = TorchModel(
        model=model,
        feature_columns=["features"],
        label_columns=["y"],
        _metadata={"y": {"spark_data_type": DoubleType, "output_shape": [_CLASSES]}},
    )
    numbers = F.array(*[F.rand(seed) for seed in range(_WIDTH)])

    def rows(number: int) -> Any:
        frame = spark.range(number, numPartitions=2).select("id", array_to_vector(numbers).alias("features")).cache()
        frame.count()
        return frame

    def one_by_one(partition: Any) -> Any:
        torch.set_num_threads(1)
        for row in partition:
            with torch.no_grad():
                output = model(torch.from_numpy(row["features"].toArray()[None]).float())
            yield (*row, DenseVector(output.reshape(-1).tolist()))

    few, many = rows(10_000), rows(100_000)
    schema = StructType([*few.schema.fields, StructField("y__output", VectorUDT())])
    slow = spark.createDataFrame(few.rdd.mapPartitions(one_by_one), schema)
    found = {
        "row by row, rows/s": 10_000 / _seconds(lambda: _compute(slow), min(rounds, 2)),
        "transform, rows/s": 100_000 / _seconds(lambda: _compute(made.transform(many)), rounds),
    }
    found["times as fast"] = found["transform, rows/s"] / found["row by row, rows/s"]
    return found


def _compute(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _seconds(call: Callable[[], Any], rounds: int) -> float:
    """The median of some calls, of which the first is not counted."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure_epoch(_: Any, rounds: int) -> dict[str, float]:
    """An epoch of what TorchEstimator runs on two ranks, and of the same loop on tensors in memory, by turns."""
    from hvdgloo.spark.common.store import Store

    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(str(Path(folder, "store")))
        rng = np.random.default_rng(0)
        label = rng.integers(_CLASSES, size=_TRAINED).astype(np.float64)
        columns = {"features": rng.normal(size=(_TRAINED, _WIDTH)), "label": label}
        estimators.write(store, columns, rows_in_group=10_000)
        training = estimators.training(store, _TRAINED, batch_size=_BATCH, epochs=_EPOCHS)
        times, plain = hvdgloo.run.run(_epochs, (training, rounds), np=2)[0]
    return {
        "TorchEstimator, s": statistics.median(times),
        "in memory, s": statistics.median(plain),
        "ratio": statistics.median(times) / statistics.median(plain),
    }


def _epochs(training: Any, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each epoch, the two ways."""
    import dataclasses

    import torch

    import hvdgloo.torch as hvd
    from hvdgloo.spark.torch._remote import TorchJob, train

    hvd.init()
    torch.set_num_threads(1)
    with training.batches(hvd.rank(), hvd.size()) as reader:
        parts = list(reader.epoch(0))
    features = torch.from_numpy(np.concatenate([batch.features[0] for batch in parts])).float()
    labels = torch.from_numpy(np.concatenate([batch.labels[0] for batch in parts])).float()
    ours: list[float] = []
    plain: list[float] = []
    for number in range(rounds):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job = TorchJob(model, optimizer, [_loss], None, None, [], None, None, None)
        hvd.barrier()
        began = time.perf_counter()
        name = f"run{number}"
        store = dataclasses.replace(training.store, checkpoint_path=f"{training.store.runs_path}/{name}")
        train(dataclasses.replace(training, run_id=name, store=store), job)
        ours.append((time.perf_counter() - began) / _EPOCHS)
        model = _model()
        hvd.barrier()
        began = time.perf_counter()
        distributed = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()))
        for _ in range(_EPOCHS):
            order = torch.randperm(len(features))
            total = torch.zeros((), dtype=torch.float64)
            for rows in torch.split(order, _BATCH):
                distributed.zero_grad()
                loss = _loss(model(features[rows]), labels[rows])
                loss.backward()
                distributed.step()
                total += loss.detach() * len(rows)
            hvd.allreduce(total, name="mean")
        plain.append((time.perf_counter() - began) / _EPOCHS)
    return ours, plain


ROWS = {"transform": measure_transform, "epoch": measure_epoch}
