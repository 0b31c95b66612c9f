"""The cost of training on Spark, as ratios and differences of one run.

    python benchmarks/spark.py [--rows run,transform,epoch,write,read,memory] [--rounds 7] [--master local[2]]
        [--json FILE]

- **run**: ``hvdgloo.spark.run`` of two ranks in a warm session against ``hvdgloo.run.run``, by turns: a function that
  calls ``hvd.init()`` of hvdgloo.numpy and returns its rank. The first call of each is not counted.
- **transform**: rows of 64 doubles through a small torch model in a TorchModel, against row by row in an RDD.
- **epoch**: an epoch of TorchEstimator on two ranks, 100,000 rows of 64 doubles through the same small model in batches
  of 256, against the same loop on tensors in memory under ``hvdgloo.run.run``, by turns.
- **write**, **read**, **memory**: data on their way to the ranks; see ``spark_data.py`` beside this file.

Figures are medians. It needs pyspark and Java; ``local-cluster[2,1,1024]`` as ``--master`` has executors of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# As a program, this file's folder is the first place where modules are looked for, and pyspark would not be there.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import spark_data
import spark_torch

import hvdgloo.run
import hvdgloo.spark
from tests.support.spark import DEFAULT_JVM, LOCAL, Sessions

Row = Callable[[Any, int], dict[str, float]]


def rank() -> int:
    """Start hvdgloo, and return the rank."""
    import hvdgloo.numpy as hvd

    hvd.init()
    return hvd.rank()


def measure_run(_: Any, rounds: int) -> dict[str, float]:
    ways: dict[str, Callable[[], list[int]]] = {
        "hvdgloo.run.run": lambda: hvdgloo.run.run(rank, num_proc=2),
        "hvdgloo.spark.run": lambda: hvdgloo.spark.run(rank, num_proc=2, verbose=0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _round in range(rounds + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            if run() != [0, 1]:
                raise SystemExit(f"{name}: wrong ranks")
            seconds[name].append(time.perf_counter() - began)
    found = {f"{name}, s": statistics.median(times[1:]) for name, times in seconds.items()}
    found["more with Spark, s"] = found["hvdgloo.spark.run, s"] - found["hvdgloo.run.run, s"]
    return found


ROWS: dict[str, Row] = {"run": measure_run, **spark_data.ROWS, **spark_torch.ROWS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="what is measured")
    parser.add_argument("--rounds", type=int, default=7, help="how often each")
    parser.add_argument("--master", default=LOCAL, help="local[2] or local-cluster[2,1,1024]")
    parser.add_argument("--json", default=None, help="a file for the figures")
    args = parser.parse_args()
    sessions = Sessions()
    try:
        spark = sessions.get(args.master, DEFAULT_JVM)
        found = {name: ROWS[name](spark, args.rounds) for name in args.rows.split(",")}
    finally:
        sessions.close()
    for name, figures in found.items():
        for what, value in figures.items():
            print(f"{name:8} {what:32} {value:8.3f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
