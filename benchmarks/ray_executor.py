"""The cost of a RayExecutor from its start to its end, against hvdgloo.run.run, and of a call of its workers.

    python benchmarks/ray_executor.py [--np 2] [--rounds 5] [--json FILE]

A round is one of each in turn: ``hvdgloo.run.run``, and an executor that is started, runs the same function and is shut
down, on a cluster of this machine whose pool has processes for its actors (**warm**) or has to start them (**cold**;
Ray itself takes most of the difference). The function joins all ranks and returns. Medians are printed, in seconds,
and the differences from ``run``. Then calls of a started executor that do nothing, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

import hvdgloo.run
from hvdgloo.ray import RayExecutor

CALLS = 200


def joined() -> int:
    import hvdgloo.numpy as hvd

    hvd.init()
    return hvd.size()


def by_run(np: int) -> None:
    assert hvdgloo.run.run(joined, np=np) == [np] * np


def by_executor(np: int) -> None:
    with RayExecutor(None, num_workers=np) as executor:
        executor.start()
        assert executor.run(joined) == [np] * np


def fill_pool(np: int) -> None:
    """Have Ray start processes for tasks, which it then keeps for what comes next."""

    def wait_for_others(count: int) -> None:
        time.sleep(0.2)  # so that no process gets two of these

    ray.get([ray.remote(wait_for_others).options(num_cpus=1).remote(np) for _ in range(np)])
    while ray.available_resources().get("CPU", 0) < np:
        time.sleep(0.01)  # Ray keeps a task's CPU for it a little longer


def seconds(action: Callable[[int], None], np: int) -> float:
    started = time.perf_counter()
    action(np)
    return time.perf_counter() - started


def call_times(np: int) -> list[float]:
    with RayExecutor(None, num_workers=np) as executor:
        executor.start()
        executor.run(joined)
        times = []
        for _ in range(CALLS):
            started = time.perf_counter()
            executor.execute(lambda _: None)
            times.append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure RayExecutor's start against hvdgloo.run.run's.")
    parser.add_argument("--np", type=int, default=2, help="workers")
    parser.add_argument("--rounds", type=int, default=5, help="of each")
    parser.add_argument("--json", type=Path, help="write all times here")
    args = parser.parse_args()
    ray.init(num_cpus=args.np, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    times: dict[str, list[float]] = {"run": [], "warm": [], "cold": []}
    for _ in range(args.rounds):
        times["run"].append(seconds(by_run, args.np))
        fill_pool(args.np)
        times["warm"].append(seconds(by_executor, args.np))
        times["cold"].append(seconds(by_executor, args.np))
    base = statistics.median(times["run"])
    for name, taken in times.items():
        middle = statistics.median(taken)
        more = "" if name == "run" else f", {middle - base:+.2f} s over run"
        print(f"{name}: {middle:.2f} s ({min(taken):.2f} to {max(taken):.2f}){more}")
    times["calls"] = call_times(args.np)
    print(f"a call that does nothing: {1000 * statistics.median(times['calls']):.1f} ms")
    if args.json is not None:
        results: dict[str, Any] = {"np": args.np, "seconds": times}
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main()
