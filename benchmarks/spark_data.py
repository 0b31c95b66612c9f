"""Rows of ``benchmarks/spark.py`` about data: how fast a DataFrame is in the store, and how fast and in how much memory
batches come out of it.

- **write**: ``prepare_data`` of a DataFrame with vectors of 64 numbers, a label and a weight, against
  ``df.rdd.map(row)``, which makes lists of the vectors in Python.
- **read**: shuffled batches of 256 as tensors, against pyarrow that reads the same columns; one thread each.
- **memory**: what a reader's process grows by while it reads ten windows of data.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_ROWS = 100_000
_WIDTH = 64
_WINDOW = 64 << 20


def _seconds(call: Callable[[], Any], rounds: int) -> float:
    """The median of some calls, of which the first is not counted."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure_write(spark: Any, rounds: int) -> dict[str, float]:
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import Row
    from pyspark.sql import functions as F  # noqa: N812 - as is the custom

    from hvdgloo.spark.common.store import Store
    from hvdgloo.spark.common.util import clear_training_cache, prepare_data

    numbers = F.array(*[F.rand(i) for i in range(_WIDTH)])
    df = spark.range(_ROWS, numPartitions=4).select(
        array_to_vector(numbers).alias("features"), F.rand(99).alias("y"), F.rand(7).alias("w")
    )
    df = df.cache()
    df.count()

    def listed(row: Any) -> Any:
        fields = row.asDict()
        fields["features"] = fields["features"].toArray().tolist()
        return Row(**fields)

    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder)

        def ours() -> None:
            clear_training_cache()
            with prepare_data(2, store, df, ["y"], ["features"], sample_weight_col="w"):
                pass

        def rows() -> None:
            df.rdd.map(listed).toDF().write.mode("overwrite").parquet(f"{folder}/rows")

        found = {"prepare_data, s": _seconds(ours, rounds), "df.rdd.map(row), s": _seconds(rows, min(rounds, 1))}
    df.unpersist()
    found["times as fast"] = found["df.rdd.map(row), s"] / found["prepare_data, s"]
    return found


@contextmanager
def _vectors(rows: int, row_group: int) -> Iterator[str]:
    """A data set as Spark writes it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        for number in range(4):
            count = rows // 4
            offsets = np.arange(count + 1, dtype=np.int32) * _WIDTH
            values = pa.ListArray.from_arrays(offsets, random.random(count * _WIDTH))
            absent = pa.nulls(count, pa.int32()), pa.nulls(count, pa.list_(pa.int32()))
            vectors = pa.StructArray.from_arrays(
                [pa.array(np.ones(count, np.int8)), *absent, values], names=["type", "size", "indices", "values"]
            )
            columns = {"features": vectors, "y": random.random(count), "w": random.random(count)}
            pq.write_table(pa.table(columns), f"{folder}/part-{number}.parquet", row_group_size=row_group)
        yield folder


def measure_read(_: Any, rounds: int) -> dict[str, float]:
    import pyarrow.parquet as pq
    import torch

    from hvdgloo.spark.data import ParquetBatches

    with _vectors(3 * _ROWS, 30_000) as folder:
        files = sorted(Path(folder).iterdir())

        def plain() -> None:
            for path in files:
                file = pq.ParquetFile(path)
                for group in range(file.num_row_groups):
                    file.read_row_group(group, use_threads=False)

        def batches() -> None:
            # A new one each time: one reader would read these data once, and keep them.
            for batch in ParquetBatches(folder, batch_size=256, num_workers=1):
                for values in batch.values():
                    torch.from_numpy(values)

        found = {"pyarrow, s": _seconds(plain, rounds), "batches, s": _seconds(batches, rounds)}
    found["batches' share of pyarrow's speed"] = found["pyarrow, s"] / found["batches, s"]
    return found


def measure_memory(_: Any, rounds: int) -> dict[str, float]:
    del rounds
    with _vectors(10 * _WINDOW // (8 * (_WIDTH + 2)), 30_000) as folder:
        command = [sys.executable, "-m", "benchmarks.spark_data", folder]
        root = Path(__file__).parents[1]
        grown = int(subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True, timeout=100).stdout)
    return {
        "window, MB": _WINDOW / 2**20,
        "grown by, MB": grown / 2**20,
        "beyond 2.5 windows, MB": (grown - 2.5 * _WINDOW) / 2**20,
    }


def _grown(folder: str) -> int:
    """Bytes by which this process grows over its start while it reads a data set."""
    from hvdgloo.spark.data import ParquetBatches

    reader = ParquetBatches(folder, batch_size=256, shuffle_buffer_size=_WINDOW // (8 * (_WIDTH + 2)))
    start = _memory("VmRSS")
    for _ in reader:
        pass
    return _memory("VmHWM") - start


def _memory(name: str) -> int:
    """Bytes. getrusage() would count what the parent had when it started this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


ROWS = {"write": measure_write, "read": measure_read, "memory": measure_memory}

if __name__ == "__main__":
    print(_grown(sys.argv[1]))
