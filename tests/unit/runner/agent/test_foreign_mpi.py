"""The certainty of an agent that its workers use mpi4py instead of hvdgloo."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hvdgloo.runner.agent import foreign_mpi
from hvdgloo.runner.agent.foreign_mpi import LOOKS, SURE_AFTER, ForeignMpiWatch
from hvdgloo.runner.processes.worker_process import WorkerProcess
from hvdgloo.runner.protocol.frames import ForeignMpi, Frame
from tests.support.launching import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

LOADS = """
import mmap, os, sys
maps = [mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ) for path in sys.argv[1:]]
print("loaded", flush=True)
sys.stdin.read()
"""
MPI, HVDGLOO = "mpi4py/MPI.cpython-311-x86_64-linux-gnu.so", "msgspec/_core.cpython-311-x86_64-linux-gnu.so"


class Watched:
    """A watch over a process, and the time that it sees."""

    def __init__(self, pid: int, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
        self.now = 1000.0
        self.sent: list[Frame] = []
        self.worker = SimpleNamespace(pid=pid, running=True)
        monkeypatch.setattr(foreign_mpi, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.watch = ForeignMpiWatch(self.sent.append)
        self.watch.started(cast(WorkerProcess, self.worker), given)

    def until(self, seconds: float) -> list[Frame]:
        """Let time pass until so long after the start, as the agent's loop does."""
        while self.watch.deadline is not None and self.watch.deadline <= 1000.0 + seconds:
            self.now = self.watch.deadline
            self.watch.tick()
        return self.sent

    def ends(self) -> list[Frame]:
        self.worker.running = False
        self.watch.tick()
        return self.sent


@contextmanager
def loading(folder: Path, *names: str, shell: bool = False, **variables: str) -> Iterator[int]:
    """A process that has loaded these files, or a shell that has started one."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(mmap.PAGESIZE))
    command = [sys.executable, "-c", LOADS, *(str(folder / name) for name in names)]
    with subprocess.Popen(
        ["sh", "-c", '"$@"; true', "sh", *command] if shell else command,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **variables},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"loaded\n"
        yield process.pid


@pytest.mark.parametrize("shell", [False, True], ids=["itself", "by a shell"])
def test_a_program_that_has_loaded_mpi4py_for_a_while_is_reported_once(
    shell: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loading(tmp_path, MPI, shell=shell) as pid:
        watched = Watched(pid, monkeypatch, dict(os.environ))
        assert watched.until(SURE_AFTER) == []
        assert watched.until(1000.0) == [ForeignMpi()]
        assert watched.ends() == [ForeignMpi()]


def test_a_short_program_is_reported_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loading(tmp_path, MPI) as pid:
        watched = Watched(pid, monkeypatch, dict(os.environ))
        watched.until(LOOKS[0])
        assert watched.ends() == [ForeignMpi()]


@pytest.mark.parametrize("names", [[MPI, HVDGLOO], [HVDGLOO], ["mpi4py/other.so"]])
def test_programs_that_use_hvdgloo_or_no_mpi_are_left_alone(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loading(tmp_path, *names) as pid:
        watched = Watched(pid, monkeypatch, dict(os.environ))
        assert watched.until(1000.0) == []
        assert watched.watch.deadline is None
        assert watched.ends() == []


def test_a_program_that_imports_hvdgloo_after_mpi4py_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports take seconds."""
    with loading(tmp_path, MPI) as pid:
        watched = Watched(pid, monkeypatch, dict(os.environ))
        watched.until(4.0)
    with loading(tmp_path, MPI, HVDGLOO) as watched.worker.pid:
        assert watched.until(1000.0) == []
        assert watched.ends() == []


def test_processes_of_an_mpirun_that_the_worker_has_started_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no worker of a job whose launcher or agent an mpirun or srun has started: all workers see its variables."""
    with loading(tmp_path, MPI, shell=True, PMI_SIZE="4") as pid:
        assert Watched(pid, monkeypatch, dict(os.environ)).until(1000.0) == []
        assert Watched(pid, monkeypatch, {**os.environ, "PMI_SIZE": "4"}).until(1000.0) == [ForeignMpi()]


def test_a_process_that_imports_mpi4py_late_is_reported_after_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loading(tmp_path) as pid:
        watched = Watched(pid, monkeypatch, dict(os.environ))
        watched.until(LOOKS[-2])
    with loading(tmp_path, MPI) as watched.worker.pid:
        assert watched.until(LOOKS[-1]) == []
        assert watched.until(LOOKS[-1] + SURE_AFTER) == [ForeignMpi()]


def test_a_process_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    wait_for(lambda: not os.path.exists(f"/proc/{process.pid}"), what="its end")
    assert Watched(process.pid, monkeypatch, {}).until(1000.0) == []
