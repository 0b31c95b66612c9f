"""Elastic jobs on agents that come by themselves: each is a slot, and one that goes takes only its own worker."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdgloo.runner.elastic.options import ElasticOptions
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.listener import TaskListener
from tests.support.inbound import PATIENCE, eventually, process
from tests.support.threads import Task

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="tasks end with a signal"),
    pytest.mark.usefixtures("clean_variables"),
]


def training(folder: Path) -> Callable[[], Any]:
    """A function that trains until a file says that it is over, and writes down each epoch."""

    def work() -> Any:
        import numpy as np

        import hvdgloo.numpy as hvd
        from hvdgloo.common.elastic import ObjectState, run_fn

        hvd.init()

        def train(state: ObjectState) -> tuple[int, int, int, int, str]:
            place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), os.environ["MINE"]
            (folder / f"size{hvd.size()}rank{hvd.rank()}").write_text(repr(place))
            over = False
            while not over:
                over = bool(hvd.allreduce(np.array([(folder / "over").exists()], np.int32), op=hvd.Min, name="end")[0])
                state.commit()
            return place

        return run_fn(train)(ObjectState(hvd.broadcast_object, hvd.rank))

    return work


def formed(folder: Path, size: int) -> None:
    """Wait for an epoch of this size."""
    eventually(lambda: all((folder / f"size{size}rank{rank}").exists() for rank in range(size)))


def test_tasks_come_and_go_while_the_job_runs(tmp_path: Path) -> None:
    results: list[Any] = []
    tasks = {}
    with TaskListener(None, what="Spark tasks", addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:

        def come(index: int) -> None:
            name = f"executor {index}"
            tasks[index] = process(listener.invitation, index, name=name, env={"MINE": name})

        def end(index: int) -> None:
            task = tasks.pop(index)
            task.wait(PATIENCE)
            assert task.stdin is not None
            task.stdin.close()

        def run() -> None:
            train, out, elastic = training(tmp_path), io.StringIO(), ElasticOptions(min_np=1)
            results.append(run_function(listener, train, stdout=out, stderr=errors, np=2, elastic=elastic))

        errors = io.StringIO()
        come(0)
        come(1)
        listener.gather(least=2)
        job = Task(run)
        formed(tmp_path, 2)
        come(2)  # one more
        formed(tmp_path, 3)
        (tmp_path / "size2rank0").unlink()
        (tmp_path / "size2rank1").unlink()
        tasks[1].kill()
        formed(tmp_path, 2)  # the others go on
        end(1)
        (tmp_path / "size3rank2").unlink()
        come(1)  # the task is tried again, under its number
        eventually(lambda: (tmp_path / "size3rank2").exists())
        (tmp_path / "over").touch()
        job.result(PATIENCE)
        assert results, errors.getvalue()
    # All are on one machine: ranks of one host, each with its own task's environment.
    names = [name for *_, name in results[0]]
    assert [place[:4] for place in results[0]] == [(rank, 3, rank, 3) for rank in range(3)], errors.getvalue()
    assert sorted(names) == ["executor 0", "executor 1", "executor 2"]
    assert "2 of 3 workers went on" in errors.getvalue()
    assert "is to be given back" not in errors.getvalue()
    for index in list(tasks):
        end(index)
