"""Failures of a rank, a task, an executor, a job or the driver: the caller gets the cause, nothing is left, and the
session runs the next job. Two executors are processes of their own, with a rank each.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import hvdgloo.spark
from hvdgloo.errors import ConfigError, JobFailedError, LaunchError, RemoteTraceback, UnusableHostsError
from tests.spark.training import LONG_S, train
from tests.support.launching import is_running, wait_for
from tests.support.pages import ROOT
from tests.support.threads import Task

SOON_S = 60.0
"""In which the cause must be there, and nothing else. On a quiet machine it takes a second or two; without the cause it
would take until the training's own end."""
assert SOON_S < LONG_S / 4


@pytest.fixture
def marks(tmp_path: Path) -> Iterator[Path]:
    """A folder in which ranks leave their marks; afterwards none of them lives."""
    yield tmp_path
    (tmp_path / "end").touch()
    wait_for(lambda: not _alive(tmp_path), SOON_S)


def _pids(marks: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in marks.glob("[01]-*")]


def _alive(marks: Path) -> list[int]:
    """Ranks that have begun and not ended."""
    return [pid for pid in _pids(marks) if is_running(pid)]


class Job(Task[Any]):
    """``hvdgloo.spark.run`` in a thread, so that something can happen to it."""

    def __init__(self, marks: Path, **arguments: Any) -> None:
        self._marks = marks
        options = {"num_proc": 2, "verbose": 0, "stderr": io.StringIO(), **arguments}
        super().__init__(lambda: hvdgloo.spark.run(train, (marks,), **options))

    def begun(self) -> list[psutil.Process]:
        """The ranks, once both have begun."""
        wait_for(lambda: len(_pids(self._marks)) == 2 or self.error is not None, 300)
        assert self.error is None, self.error
        return [psutil.Process(pid) for pid in _pids(self._marks)]


def _above(process: psutil.Process, word: str) -> psutil.Process:
    """The first process above that has a word on its command line."""
    return next(parent for parent in process.parents() if word in parent.cmdline())


def _runs_the_next_job(cluster: Any) -> None:
    places = hvdgloo.spark.run(lambda: os.getpid(), num_proc=2, verbose=0, start_timeout=300)
    assert len(set(places)) == 2


@pytest.mark.parametrize("fate", ["raises", "is killed", "exits"])
def test_a_rank_s_own_end(cluster: Any, marks: Path, fate: str) -> None:
    with pytest.raises((ValueError, JobFailedError)) as caught:
        hvdgloo.spark.run(train, (marks, fate), num_proc=2, verbose=0, stderr=io.StringIO())
    error = caught.value
    if fate == "raises":
        assert type(error) is ValueError
        assert isinstance(error.__cause__, RemoteTraceback)
        assert error.__cause__.rank == 1
        assert "(executor " in error.__cause__.host
        assert "in meet" in error.__cause__.traceback
    else:
        assert isinstance(error, JobFailedError)
        assert error.rank == 1
        what = "was killed by signal 9" if fate == "is killed" else "exited with status 7"
        assert f"rank 1 on host {error.host} {what}" in str(error)
        assert "(executor " in str(error.host)
    assert not _alive(marks)
    _runs_the_next_job(cluster)


def test_a_task_s_python_worker_is_killed(cluster: Any, marks: Path) -> None:
    job = Job(marks)
    rank = job.begun()[1]
    # Spark's worker is the agent's parent.
    _above(rank, "pyspark.daemon").kill()
    error = job.failure(SOON_S)
    assert isinstance(error, JobFailedError)
    assert re.search("Python worker|task has ended", str(error))  # the first, unless Spark is slow to say so
    assert not _alive(marks)
    _runs_the_next_job(cluster)


def test_a_second_attempt_starts_nothing(cluster: Any, marks: Path) -> None:
    """Without a barrier, Spark tries a task again."""
    job = Job(marks, barrier=False)
    _above(job.begun()[1], "pyspark.daemon").kill()
    error = job.failure(SOON_S)
    assert isinstance(error, JobFailedError)
    assert re.search("Python worker|task has ended", str(error))
    assert "this is attempt" not in str(error)  # though that is all that Spark reports
    assert not _alive(marks)
    assert len(_pids(marks)) == 2  # none was started again
    _runs_the_next_job(cluster)


def test_an_executor_is_killed(cluster: Any, marks: Path) -> None:
    job = Job(marks)
    executor = _above(job.begun()[0], "--executor-id")
    name = executor.cmdline()[executor.cmdline().index("--executor-id") + 1]
    executor.kill()
    error = job.failure(SOON_S)
    assert isinstance(error, JobFailedError)
    # The first, unless Spark is slow to say so.
    assert re.search(rf"Spark lost executor {name} \(|\(executor {name}\) .*task has ended", str(error))
    assert not _alive(marks)
    _runs_the_next_job(cluster)  # on an executor that takes its place


def test_a_host_falls_silent(cluster: Any, marks: Path) -> None:
    """Its streams stay open, and nothing comes: as when a cable is pulled."""
    job = Job(marks)
    rank = job.begun()[0]
    agent = rank.parent()
    assert agent is not None
    watching = [parent for parent in agent.parents()[:1] if "pyspark.daemon" not in parent.cmdline()]
    silent = [*watching, agent, rank]
    for process in silent:
        process.suspend()
    try:
        error = job.failure(SOON_S)
        assert isinstance(error, JobFailedError)
        assert "executor " in str(error)
    finally:
        for process in silent:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    wait_for(lambda: not _alive(marks), SOON_S)
    _runs_the_next_job(cluster)


@pytest.mark.parametrize("how", ["cancelAllJobs", "cancelJobGroup"])
def test_the_user_cancels_the_job(cluster: Any, marks: Path, how: str) -> None:
    job = Job(marks)
    job.begun()
    context = cluster.sparkContext
    if how == "cancelAllJobs":
        context.cancelAllJobs()
    else:
        tracker = context._jsc.sc().statusTracker()
        # Spark's figures are a little late: the job before may still be among them, and this one may not yet be.
        active = context.statusTracker().getActiveJobsIds
        (number,) = wait_for(lambda: jobs if len(jobs := list(active())) == 1 else None, SOON_S)
        group = context._jsc.sc().statusStore().job(number).jobGroup().get()
        assert tracker.getJobIdsForGroup(group)
        context.cancelJobGroup(group)
    error = job.failure(SOON_S)
    assert isinstance(error, JobFailedError)
    assert "job was cancelled" in str(error)
    assert not _alive(marks)
    _runs_the_next_job(cluster)


WITHOUT_HVDGLOO = """
import sys
class Nothing:
    def find_spec(name, path=None, target=None):
        if name == "hvdgloo":
            raise ModuleNotFoundError("No module named 'hvdgloo'", name="hvdgloo")
sys.meta_path.insert(0, Nothing)
"""
ANOTHER_PYTHON = """
import collections, sys
Version = collections.namedtuple("Version", "major minor micro releaselevel serial")
sys.version_info = Version(3, 99, 0, "final", 0)
"""


@pytest.mark.parametrize(
    ("custom", "count", "what"),
    [
        pytest.param(WITHOUT_HVDGLOO, 2, "has no hvdgloo (the driver has hvdgloo ", id="without-hvdgloo"),
        pytest.param(ANOTHER_PYTHON, 1, "it has Python 3.99, the driver has 3.", id="another-python"),
    ],
)
def test_executors_that_cannot_be_used_are_named(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, custom: str, count: int, what: str
) -> None:
    """Spark itself compares versions of Python, and names the first executor that differs."""
    (tmp_path / "sitecustomize.py").write_text(custom)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(cluster.sparkContext, "pythonExec", str(python))
    with pytest.raises(UnusableHostsError, match=f"^{count} of 2 Spark tasks") as caught:
        hvdgloo.spark.run(os.getpid, num_proc=2, verbose=0)
    assert len(caught.value.hosts) == count
    assert all(what in each for each in caught.value.hosts.values())
    monkeypatch.undo()
    _runs_the_next_job(cluster)


def test_more_ranks_than_slots_name_both_at_once(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_proc=4.* 2 tasks at once"):
        hvdgloo.spark.run(os.getpid, num_proc=4)


DRIVER = """
import os, sys, threading
from pathlib import Path
from tests.support import spark as support
from tests.spark.training import train
import hvdgloo.spark

def until_told(marks):
    try:
        return train(marks)
    except KeyboardInterrupt:
        (marks / "told").touch()
        raise

marks = Path(sys.argv[1])
session = support.Sessions().get(support.CLUSTER)
try:
    hvdgloo.spark.run(until_told, (marks / "first",), num_proc=2)
except KeyboardInterrupt:
    (marks / "interrupted").touch()
print(len(hvdgloo.spark.run(os.getpid, num_proc=2)), flush=True)
(marks / "next").touch()
hvdgloo.spark.run(train, (marks / "second",), num_proc=2)
"""


def test_the_driver_is_interrupted_and_then_killed(cluster: Any, tmp_path: Path, sessions: Any) -> None:
    """A program of its own: Ctrl-C, the next job, and SIGKILL."""
    sessions.stop()  # two clusters would be one too many for a small machine
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = tmp_path / "said"
    with said.open("wb") as out:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)],
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
        )
    started: list[psutil.Process] = []
    try:
        _wait_for_ranks(driver, tmp_path / "first", said)
        driver.send_signal(signal.SIGINT)
        _wait(driver, (tmp_path / "interrupted").exists, said)
        assert not _alive(tmp_path / "first")
        assert (tmp_path / "first" / "told").exists()  # ranks had the time to end by themselves
        _wait(driver, (tmp_path / "next").exists, said)
        _wait_for_ranks(driver, tmp_path / "second", said)
        started = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.wait(20)
        wait_for(lambda: not _alive(tmp_path / "second"), SOON_S)
        _, alive = psutil.wait_procs(started, 120)  # executors and the JVM: Spark's own business, but soon
        assert not alive
    finally:
        driver.kill()
        driver.wait(20)
        for process in started:
            if process.is_running():
                process.kill()
        shutil.rmtree(tmp_path, ignore_errors=True)


def _wait_for_ranks(driver: subprocess.Popen[bytes], marks: Path, said: Path) -> None:
    _wait(driver, lambda: len(_pids(marks)) == 2, said)


def _wait(driver: subprocess.Popen[bytes], condition: Callable[[], Any], said: Path) -> None:
    wait_for(lambda: condition() or driver.poll() is not None, 300)
    assert driver.poll() is None, said.read_text()
    assert condition()


def test_the_session_is_stopped(sessions: Any, marks: Path) -> None:
    """At last: no other test can use the session any more."""
    session = sessions.get("local-cluster[2,1,1024]")
    job = Job(marks)
    job.begun()
    session.stop()
    error = job.failure(SOON_S)
    assert isinstance(error, JobFailedError)
    assert "session was stopped" in str(error)
    assert not _alive(marks)
    with pytest.raises(LaunchError, match="active SparkContext"):
        hvdgloo.spark.run(os.getpid, num_proc=2)
