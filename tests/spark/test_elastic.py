"""Ranks come and go with executors."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import hvdgloo.spark
from hvdgloo.errors import ConfigError
from tests.spark.training import train_elastic
from tests.support.launching import wait_for
from tests.support.threads import Task

PATIENCE_S = 240.0


def _together(marks: Path, size: int) -> Callable[[], set[int]]:
    """The processes that have been together as so many."""

    def pids() -> set[int]:
        found = {int(path.name.partition("-")[2]) for path in marks.glob(f"size{size}-*")}
        return found if len(found) >= size else set()

    return pids


def test_an_executor_is_lost_and_another_one_takes_its_place(cluster: Any, tmp_path: Path) -> None:
    outcome: list[Any] = []

    def job() -> None:
        try:
            options: dict[str, Any] = {"num_proc": 2, "min_num_proc": 1, "verbose": 0, "stderr": io.StringIO()}
            outcome.append(hvdgloo.spark.run_elastic(train_elastic, (tmp_path,), **options))
        except BaseException as error:
            outcome.append(error)

    thread = Task(job)
    try:
        first = wait_for(lambda: outcome or _together(tmp_path, 2)(), PATIENCE_S)
        assert not outcome, outcome
        assert isinstance(first, set)
        lost, survivor = sorted(first)
        parents = psutil.Process(lost).parents()
        next(process for process in parents if "--executor-id" in process.cmdline()).kill()
        # Spark starts another executor, and tries the task again. The survivor trains alone until then, unless the
        # machine is so busy that the other one is there first.
        wait_for(lambda: outcome or len(_together(tmp_path, 2)() - first) == 1, PATIENCE_S)
        assert not outcome, outcome
        assert psutil.pid_exists(survivor)
        assert _together(tmp_path, 1)() <= {survivor}
    finally:
        (tmp_path / "end").touch()
        thread.result(PATIENCE_S)
    assert outcome == [[(0, 2), (1, 2)]]


def test_numbers_that_contradict_each_other(spark: Any) -> None:
    """Before a task is started."""
    for numbers, message in (
        ({"max_num_proc": 1}, r"run_elastic\(\): max_num_proc=1 is less than num_proc=2"),
        ({"min_num_proc": 3}, r"run_elastic\(\): min_num_proc=3 is more than num_proc=2"),
        ({"min_num_proc": 0}, r"run_elastic\(min_num_proc=0\): give a whole number of processes, at least 1"),
        ({"max_num_proc": "4"}, r"run_elastic\(max_num_proc='4'\): give a whole number of processes, at least 1"),
    ):
        options: dict[str, Any] = {"num_proc": 2, "stderr": (said := io.StringIO()), **numbers}
        with pytest.raises(ConfigError, match=f"^{message}"):
            hvdgloo.spark.run_elastic(train_elastic, **options)
        assert not said.getvalue()
    with pytest.warns(DeprecationWarning, match="write min_num_proc"), pytest.raises(ConfigError):
        hvdgloo.spark.run_elastic(train_elastic, num_proc=2, min_np=3)
