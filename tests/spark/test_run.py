"""``hvdgloo.spark.run`` where nothing goes wrong: places, output, results, environment, and what it refuses."""

from __future__ import annotations

import ast
import io
import os
import pickle
import re
import signal
import socket
import stat
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

import hvdgloo.spark
from hvdgloo.errors import ConfigError, InvalidArgumentError, LaunchError, RemoteTraceback
from hvdgloo.runner.inbound.task import Invitation
from hvdgloo.spark import _agent_task, _bringing, _run
from hvdgloo.spark._session import Session
from hvdgloo.spark.common.backend import SparkBackend, default_num_proc
from tests.support.launching import hold_interpreter, wait_for
from tests.support.threads import Task

LARGER_THAN_SPARK_COLLECTS = 20_000_000


def _sum_of(number: float, *, times: int = 1) -> tuple[int, int, int, int, float]:
    import numpy as np

    import hvdgloo.numpy as hvd

    hvd.init()
    total = hvd.allreduce(np.full(3, number * times), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), float(total[0])


def _jobs(spark: Any) -> int:
    """Return the number of jobs submitted so far, from the scheduler, since Spark's public figures are late."""
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


def test_ranks_of_one_machine_are_one_host(spark: Any) -> None:
    assert hvdgloo.spark.run(_sum_of, (2.0,), {"times": 3}, 2) == [(0, 2, 0, 2, 12.0), (1, 2, 1, 2, 12.0)]


def test_as_many_processes_as_spark_runs_tasks(spark: Any) -> None:
    assert default_num_proc() == 2
    assert len(hvdgloo.spark.run(_sum_of, (1.0,))) == 2


def test_partitions_that_spark_has_no_slots_for_are_no_processes(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``spark.default.parallelism`` is a number of partitions; so many processes were not asked for."""
    monkeypatch.setattr(Session, "default_parallelism", property(lambda self: 7))
    assert default_num_proc() == 2
    assert SparkBackend().num_processes() == 2
    assert len(hvdgloo.spark.run(_sum_of, (1.0,), verbose=0)) == 2
    assert len(hvdgloo.spark.run_elastic(os.getpid, max_num_proc=1, verbose=0)) == 1
    with pytest.raises(ConfigError, match=r"run\(num_proc=7\): Spark runs 2 tasks at once; give num_proc=2 or fewer"):
        hvdgloo.spark.run(_sum_of, (1.0,), num_proc=7)
    monkeypatch.setattr(Session, "slots", lambda self: 0)
    with pytest.raises(ConfigError, match=r"^run\(\) of 7 processes: Spark runs 0 tasks at once"):
        hvdgloo.spark.run(_sum_of, (1.0,))


def test_output_is_prefixed_with_ranks_and_only_that_with_verbose_0(spark: Any) -> None:
    def talk() -> None:
        sys.stdout.write("to the driver\n")
        sys.stderr.write("and this\n")

    out, err = io.StringIO(), io.StringIO()
    hvdgloo.spark.run(talk, num_proc=2, stdout=out, stderr=err, verbose=0)
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:to the driver", "[1]<stdout>:to the driver"]
    assert sorted(err.getvalue().splitlines()) == ["[0]<stderr>:and this", "[1]<stderr>:and this"]


def test_verbose_is_a_line_or_the_whole_start(spark: Any) -> None:
    err = io.StringIO()
    hvdgloo.spark.run(os.getpid, num_proc=2, stderr=err)
    assert re.fullmatch(r"hvdgloo\.spark: 2 tasks have started on 1 host: \S+\n", err.getvalue())
    err = io.StringIO()
    hvdgloo.spark.run(os.getpid, num_proc=2, stderr=err, verbose=2)
    assert re.search(r"^hvdgloo\.spark:   task 1: .*, from 127\.0\.0\.1, process \d+$", err.getvalue(), re.M)
    assert re.search(r"^hvdgloo-run: rank 1 is process \d+ on ", err.getvalue(), re.M)


def test_lines_with_the_time(spark: Any) -> None:
    out = io.StringIO()
    hvdgloo.spark.run(lambda: sys.stdout.write("now\n"), num_proc=1, stdout=out, prefix_output_with_timestamp=True)
    assert re.search(r"\d\d:\d\d:\d\d.*now\n$", out.getvalue())


def test_a_result_larger_than_spark_would_collect(spark: Any) -> None:
    limit = spark.sparkContext.getConf().get("spark.driver.maxResultSize")
    assert limit == "16m"
    results = hvdgloo.spark.run(lambda: bytes(LARGER_THAN_SPARK_COLLECTS), num_proc=2)
    assert [len(result) for result in results] == [LARGER_THAN_SPARK_COLLECTS] * 2


def test_a_driver_whose_interpreter_is_held_goes_on(spark: Any, tmp_path: Path) -> None:
    """As by ``sorted`` of a long list in another cell. The limit that is given is far shorter than the call."""

    def work() -> int:
        (tmp_path / f"ready{os.environ['RANK']}").touch()
        while not (tmp_path / "enough").exists():
            time.sleep(0.01)
        return os.getpid()

    def hold() -> None:
        wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), 60)
        hold_interpreter(3.0)
        (tmp_path / "enough").touch()

    thread = Task(hold)
    assert len(set(hvdgloo.spark.run(work, num_proc=2, verbose=0, heartbeat_timeout=0.5))) == 2
    thread.result()


def test_a_wait_is_not_over_because_it_could_not_be_checked() -> None:
    """Agents and tasks end at about the same time; the driver's threads may see it late, and in any order."""
    event = threading.Event()
    seen = Task(lambda: _run._happens(event, 2.0))
    hold_interpreter(3.0)
    event.set()
    assert seen.result()
    assert not _run._happens(threading.Event(), 0.1)


@pytest.mark.parametrize("value", [0, -1, "long"])
def test_a_silence_that_no_process_can_keep_is_refused(spark: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"run(heartbeat_timeout={value!r}): it is not a number of")):
        hvdgloo.spark.run(_sum_of, (1.0,), num_proc=2, heartbeat_timeout=value)


def test_an_exception_is_the_function_s_own(spark: Any) -> None:
    def fail() -> None:
        import hvdgloo.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("a batch")
        hvd.barrier()

    with pytest.raises(KeyError, match="a batch") as caught:
        hvdgloo.spark.run(fail, num_proc=2, verbose=0)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.rank == 1
    assert "in fail" in cause.traceback


def test_what_cannot_be_pickled_is_refused_before_a_rank_starts(spark: Any) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidArgumentError, match="cannot be sent"):
        hvdgloo.spark.run(lambda: lock.acquire(), num_proc=1, verbose=0)


def test_user_code_never_runs_in_spark_s_python_workers(spark: Any) -> None:
    """Spark uses a worker again: what the last job has left there would be found by the next."""

    def tasks_worker(_: Any) -> Any:
        yield os.getpid(), getattr(sys, "left_by_a_rank", False)

    def rank() -> tuple[int, int, list[int]]:
        import psutil

        import hvdgloo.numpy as hvd

        hvd.init()
        sys.left_by_a_rank = True  # type: ignore[attr-defined]
        return hvd.rank(), os.getpid(), [process.pid for process in psutil.Process().parents()]

    used_again = False
    for _ in range(5):  # workers of tasks that end late on a busy machine are not used again
        results = hvdgloo.spark.run(rank, num_proc=2, verbose=0)
        assert [rank for rank, *_ in results] == [0, 1]
        workers = dict(spark.sparkContext.parallelize(range(2), 2).mapPartitions(tasks_worker).collect())
        assert not {pid for _, pid, _ in results} & set(workers)
        assert not any(workers.values())
        used_again = bool({pid for _, _, parents in results for pid in parents} & set(workers))
        if used_again:
            break
    assert used_again


def test_ctrl_c_is_for_ranks_while_they_run_and_for_pyspark_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_pyspark(signum: int, frame: object) -> None: ...

    def of_the_caller(signum: int, frame: object) -> None: ...

    monkeypatch.setattr(of_pyspark, "__module__", "pyspark.core.context")
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler, during in ((of_pyspark, signal.default_int_handler), (of_the_caller, of_the_caller)):
            signal.signal(signal.SIGINT, handler)
            with _run._interrupts_for_ranks():
                assert signal.getsignal(signal.SIGINT) is during
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("module", [_agent_task, _bringing])
def test_tasks_do_not_wait_for_each_other_by_spark_s_means(module: Any) -> None:
    """Each call of barrier() or allGather() takes a second: Spark polls."""
    tree = ast.parse(Path(module.__file__).read_text())
    assert not {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"barrier", "allGather"}


def test_more_processes_than_slots_are_refused_before_a_job_is_submitted(spark: Any) -> None:
    before = _jobs(spark)
    with pytest.raises(ConfigError, match=r"run\(num_proc=3\): Spark runs 2 tasks at once; give num_proc=2 or fewer"):
        hvdgloo.spark.run(_sum_of, num_proc=3)
    assert _jobs(spark) == before


def test_without_a_barrier_tasks_start_as_they_come(spark: Any) -> None:
    assert [place[:2] for place in hvdgloo.spark.run(_sum_of, (1.0,), num_proc=2, barrier=False)] == [(0, 2), (1, 2)]


class _Attempt:
    """A task's context."""

    def __init__(self, number: int) -> None:
        self._number = number

    def attemptNumber(self) -> int:  # noqa: N802 - Spark's name
        return self._number

    def resources(self) -> dict[str, Any]:
        return {}


def test_a_task_whose_agent_was_killed_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Spark tries it again where ranks may come and go, and says so where they may not."""
    statuses = iter([0, 137])
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: _Attempt(0))
    monkeypatch.setattr(_bringing, "bring_agent", lambda *_, **__: next(statuses))
    invitation = pickle.dumps(Invitation((), b"secret"))
    _bringing.bring(invitation, 1, "", None, again=True)
    with pytest.raises(LaunchError, match=r"^the agent of task 1 ended with status 137$"):
        _bringing.bring(invitation, 1, "", None, again=True)


def test_a_second_attempt_of_a_task_does_not_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: _Attempt(1))
    with socket.create_server(("127.0.0.1", 0)) as driver:
        driver.settimeout(0)
        invitation = Invitation((driver.getsockname()[:2],), b"secret")
        with pytest.raises(LaunchError, match="attempt 1 of task 0"):
            _bringing.bring(pickle.dumps(invitation), 0, "", None, again=False)
        with pytest.raises(BlockingIOError):
            driver.accept()


@pytest.mark.parametrize("barrier", [True, False])
def test_tasks_that_do_not_come_in_time(spark: Any, tmp_path: Path, barrier: bool) -> None:
    """One of two slots is in use; afterwards the other is free again."""
    gate, taken = tmp_path / "gate", tmp_path / "taken"

    def hold(_: Any) -> Any:
        import time

        taken.touch()
        end = time.monotonic() + 120
        while not gate.exists() and time.monotonic() < end:
            time.sleep(0.05)
        yield 1

    context = spark.sparkContext
    other = threading.Thread(target=lambda: context.parallelize([1], 1).mapPartitions(hold).collect())
    other.start()
    try:
        wait_for(taken.exists, 120)
        said = io.StringIO()
        came = "0 of 2 came" if barrier else "1 of 2 came"
        for seconds in (2, 8, 32):  # a task of an ordinary stage must have the time to come
            with pytest.raises(LaunchError, match=r"^Timed out waiting for Spark tasks to start: ") as caught:
                hvdgloo.spark.run(_sum_of, (1.0,), num_proc=2, start_timeout=seconds, barrier=barrier, stderr=said)
            if came in str(caught.value):
                break
        assert came in str(caught.value)
        assert barrier or re.search(r"task 0: .* from 127\.0\.0\.1", str(caught.value))
        assert "Spark has 2 task slots (the driver itself), " in str(caught.value)
        # Tasks of the test before may still be counted.
        assert re.search("waiting for Spark's other tasks: 2 slots are needed, and [01] of 2 are free", said.getvalue())
        assert len(hvdgloo.spark.run(_sum_of, (1.0,), num_proc=1, verbose=0)) == 1
    finally:
        gate.touch()
        other.join(60)


def test_workers_have_their_task_s_environment_and_nothing_of_the_driver_s(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> tuple[str | None, ...]:
        import hvdgloo.spark.task

        names = ("OF_THE_DRIVER", "OF_THE_CALL", "HVDGLOO_LOG_LEVEL", "HOROVOD_SPARK_WORK_DIR")
        return (*map(os.environ.get, names), os.getcwd(), str(hvdgloo.spark.task.get_available_devices()))

    monkeypatch.setenv("OF_THE_DRIVER", "1")
    monkeypatch.setenv("HVDGLOO_LOG_LEVEL", "info")
    (found,) = hvdgloo.spark.run(look, num_proc=1, env={"OF_THE_CALL": "2"}, verbose=0, stderr=io.StringIO())
    folder = found[4]
    assert found == (None, "2", "info", folder, folder, "[]")
    (found,) = hvdgloo.spark.run(look, num_proc=1, env=os.environ, verbose=0, stderr=io.StringIO())
    assert found[0] == "1"


def test_python_path_of_env_precedes_the_executors(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("value = 5")

    def look() -> tuple[int, int, int]:
        import only_here  # type: ignore[import-not-found]

        return only_here.value, sys.path.index(os.path.dirname(only_here.__file__)), len(sys.path)

    ((value, place, entries),) = hvdgloo.spark.run(look, num_proc=1, env={"PYTHONPATH": str(tmp_path)}, verbose=0)
    assert value == 5
    assert place <= 1 < entries  # the first one, but for the program's own folder


def test_another_python_for_the_workers(spark: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nTHROUGH_THE_SCRIPT=1 exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    found = hvdgloo.spark.run(
        lambda: os.environ.get("THROUGH_THE_SCRIPT"), num_proc=1, executable=str(python), verbose=0
    )
    assert found == ["1"]


def test_a_spark_backend_gives_the_driver_s_environment_without_its_gpus(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> list[str | None]:
        return [os.environ.get(name) for name in ("OF_THE_DRIVER", "OF_THE_CALL", "CUDA_VISIBLE_DEVICES")]

    monkeypatch.setenv("OF_THE_DRIVER", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    backend = SparkBackend(verbose=0)
    assert backend.num_processes() == 2
    assert backend.run(look, env={"OF_THE_CALL": "2"}) == [["1", "2", None]] * 2
    backend = SparkBackend(1, env={"OF_THE_CALL": "3", "CUDA_VISIBLE_DEVICES": "5"}, verbose=0)
    assert backend.run(look) == [[None, "3", None]]


def _horovod() -> str:
    import horovod.numpy as hvd

    hvd.init()
    return str(hvd.__name__)


@pytest.mark.parametrize("by", ["variable", "module"])
def test_workers_import_horovod_where_the_driver_does(spark: Any, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="horovod"):
        hvdgloo.spark.run(_horovod, num_proc=1, verbose=0, stderr=io.StringIO())
    if by == "variable":
        monkeypatch.setenv("HVDGLOO_AS_HOROVOD", "1")
    else:
        stand_in = types.ModuleType("horovod")
        monkeypatch.setattr(stand_in, "stands_in_for", "Horovod", raising=False)
        monkeypatch.setitem(sys.modules, "horovod", stand_in)
    assert hvdgloo.spark.run(_horovod, num_proc=1, verbose=0) == ["hvdgloo.numpy"]


def test_the_session_may_be_given(spark: Any) -> None:
    assert len(hvdgloo.spark.run(os.getpid, num_proc=1, spark=spark, verbose=0)) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"use_mpi": True}, r"run\(use_mpi=True\)"),
        ({"num_proc": 0}, r"run\(num_proc=0\): give a whole number"),
        ({"num_proc": "2"}, r"run\(num_proc='2'\): give a whole number"),
        ({"num_proc": True}, r"run\(num_proc=True\): give a whole number"),
        ({"args": 1.0}, r"run\(args=1\.0\): give a tuple of arguments, even of one"),
        ({"stdout": "ranks.log"}, r"run\(stdout='ranks\.log'\): give a text stream"),
        ({"start_timeout": -1}, r"run\(start_timeout=-1\)"),
        ({"env": {"A": 1}}, r"run\(env=...\): names and values of variables must be strings"),
        ({"spark": 5}, r"spark=5: give a SparkSession"),
        ({"args": [1], "fn": "train"}, r"the first argument is a function, not 'train'"),
    ],
)
def test_arguments_that_cannot_be_used(spark: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hvdgloo.spark.run(**{"fn": _sum_of, **arguments})


def test_arguments_for_mpi_have_no_effect(spark: Any) -> None:
    with pytest.warns(UserWarning, match="extra_mpi_args"):
        assert hvdgloo.spark.run(lambda: 1, num_proc=1, extra_mpi_args="-x", use_gloo=True, verbose=0) == [1]


def test_a_session_of_spark_connect_is_refused(spark: Any) -> None:
    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(ConfigError, match="a session of Spark Connect, which has no SparkContext"):
        hvdgloo.spark.run(_sum_of, (1.0,), spark=session)


def test_without_a_session(spark: Any, sessions: Any) -> None:
    sessions.stop()
    with pytest.raises(LaunchError, match=r"^Could not find an active SparkContext, are you running in a PySpark"):
        hvdgloo.spark.run(_sum_of, (1.0,))


def test_dynamic_allocation_does_without_a_barrier(sessions: Any) -> None:
    """Spark refuses barrier stages there (SPARK-24942)."""
    sessions.get("local[2]", {"spark.dynamicAllocation.enabled": "true", "spark.shuffle.service.enabled": "true"})
    assert [place[:2] for place in hvdgloo.spark.run(_sum_of, (1.0,), num_proc=2, verbose=0)] == [(0, 2), (1, 2)]


def test_speculation_would_start_ranks_twice(sessions: Any) -> None:
    sessions.get("local[2]", {"spark.speculation": "true"})
    assert len(hvdgloo.spark.run(_sum_of, (1.0,), num_proc=2, verbose=0)) == 2  # never in barrier stages
    with pytest.raises(ConfigError, match=r"spark\.speculation=true starts tasks a second time"):
        hvdgloo.spark.run(_sum_of, (1.0,), num_proc=2, barrier=False)
