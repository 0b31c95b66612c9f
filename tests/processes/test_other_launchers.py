"""Processes that torchrun, mpirun or srun have started, instead of hvdgloo-run."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from hvdgloo._job import other_launchers
from hvdgloo._job.context import Context
from hvdgloo.config import Config
from tests.support.frameworks import need_installed
from tests.support.launching import Launcher, clean_environment, run_command, wait_for

TRAINS = r"""
import os
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
total = hvd.allreduce(np.ones(1), op=hvd.Sum)
joined = ("joined", hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), total)
os.write(1, (" ".join(map(str, joined)) + "\n").encode())  # at once: torchrun's processes share one pipe
"""


@pytest.fixture
def private() -> Iterator[Path]:
    """The user's private directory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def process(rank: int, private: Path, **more: str) -> subprocess.Popen[str]:
    """One of two processes, with the environment that torchrun gives them."""
    torchrun_s = {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500",
        "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "XDG_RUNTIME_DIR": str(private), "HVDGLOO_START_TIMEOUT": "30",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", TRAINS],
        env={**clean_environment(), **torchrun_s, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_s_processes_of_one_host_are_one_job(tmp_path: Path, private: Path) -> None:
    """And so they are when torchrun has started them again after a failure."""
    need_installed("torch")
    again = (
        TRAINS + "hvd.barrier()\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and hvd.rank() == 0: os._exit(3)\n"
    )
    (tmp_path / "train.py").write_text(again + "hvd.barrier()\n")
    done = run_command(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            "train.py",
        ],
        cwd=tmp_path,
        env={**clean_environment(), "XDG_RUNTIME_DIR": str(private)},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == 2 * ["joined 0 2 0 1 [2.]"] + 2 * ["joined 1 2 1 1 [2.]"]
    assert "is a job of its own" not in done.stderr
    assert os.listdir(private / "hvdgloo") == []


def test_the_secret_with_which_they_meet_is_this_user_s_alone_and_does_not_stay(private: Path) -> None:
    first = process(0, private)
    (path,) = wait_for(lambda: list((private / "hvdgloo").glob("torchrun.????????????????")), what="the invitation")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    second = process(1, private)
    assert [each.communicate(timeout=30)[0] for each in (first, second)] == [
        "joined 0 2 0 1 [2.]\n",
        "joined 1 2 1 1 [2.]\n",
    ]
    assert list(path.parent.iterdir()) == []


def test_what_a_killed_process_has_left_behind_misleads_no_other(private: Path) -> None:
    killed = process(0, private)
    (path,) = wait_for(lambda: list((private / "hvdgloo").glob("torchrun.????????????????")), what="the invitation")
    killed.kill()
    killed.communicate()
    assert path.exists()
    late, first = process(1, private), process(0, private)
    assert late.communicate(timeout=30)[0] == "joined 1 2 1 1 [2.]\n"
    assert first.communicate(timeout=30)[0] == "joined 0 2 0 1 [2.]\n"


def test_a_rank_0_that_does_not_come_is_named(private: Path) -> None:
    _, said = process(1, private, HVDGLOO_START_TIMEOUT="0.2").communicate(timeout=30)
    assert "rank 0 did not call hvd.init() within 0.2 s (HVDGLOO_START_TIMEOUT)" in said


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "hvdgloo-run -np 4 -H HOST1:2,HOST2:2 "),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "hvdgloo-run -np 2 "),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, "hvdgloo-run -np 3 "),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "hvdgloo-run -np 2 "),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "hvdgloo-run -np 8 "),
        ({"WORLD_SIZE": "4", "RANK": "1"}, ""),
        ({"WORLD_SIZE": "1", "RANK": "0", "SLURM_NTASKS": "1", "PMI_SIZE": "what"}, ""),
        ({}, ""),
    ],
)
def test_a_process_that_is_alone_among_many_says_so_once_and_names_the_command(
    environ: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "environ", environ)
    with caplog.at_level(logging.WARNING, "hvdgloo"):
        other_launchers.warn(cast(Context, SimpleNamespace(config=Config(), rank=0, size=1)))
    assert [command in text for text in caplog.messages] == [True] * bool(command)
    assert all(
        f"although {next(iter(environ))}={next(iter(environ.values()))} says" in text for text in caplog.messages
    )


def test_mpirun_s_processes_are_told(tmp_path: Path) -> None:
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    (tmp_path / "train.py").write_text(TRAINS)
    done = run_command(
        [sys.executable, "train.py", "--password", "secret"],
        cwd=tmp_path,
        env={**clean_environment(), **environ},
        timeout=30,
    )
    assert done.stdout == "joined 0 1 0 1 [1.]\n"
    assert "Start them with hvdgloo's launcher: hvdgloo-run -np 2 train.py ...\n" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_mpi_that_knows_of_one_process_in_a_job_of_several_is_told(launcher: Launcher, when: str) -> None:
    (launcher.folder / "mpi4py").mkdir()
    (launcher.folder / "mpi4py/__init__.py").touch()
    (launcher.folder / "mpi4py/MPI.py").write_text(
        "class COMM_WORLD:\n    Get_size = staticmethod(lambda: 1)\n"
        "Is_initialized, Is_finalized = (lambda: True), (lambda: False)\n"
    )
    program = {"before": "from mpi4py import MPI\n" + TRAINS, "after": TRAINS + "from mpi4py import MPI\n"}[when]
    done = launcher.run("-np", "2", launcher.script(program))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("mpi4py sees this process alone (MPI.COMM_WORLD has 1 rank), while hvd.size() is 2") == 1


FOREIGN_MPI = """
import mmap, os, time
file = open("mpi4py/MPI.cpython-311-x86_64-linux-gnu.so", "rb")
loaded = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
"""
TOLD = "hvdgloo-run: mpi4py sees each of the 2 workers alone (MPI.COMM_WORLD has 1 rank)"


def _with_mpi(folder: Path) -> None:
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py/MPI.cpython-311-x86_64-linux-gnu.so").write_bytes(b"library")


def test_several_workers_that_use_mpi_instead_of_hvdgloo_are_told(launcher: Launcher) -> None:
    _with_mpi(launcher.folder)
    until_told = "while not os.path.exists('told'): time.sleep(0.01)\n"
    process = launcher.start("-np", "2", launcher.script(FOREIGN_MPI + until_told))
    assert process.stderr is not None
    assert process.stderr.readline().decode().startswith(TOLD)
    (launcher.folder / "told").write_text("")
    assert (process.wait(15), process.stderr.read()) == (0, b"")


def test_a_single_worker_that_uses_mpi_is_not(launcher: Launcher) -> None:
    _with_mpi(launcher.folder)
    a_while = "time.sleep(1.5)  # longer than the agent's first looks take\n"
    done = launcher.run("-np", "1", launcher.script(FOREIGN_MPI + a_while))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("size", [2, None], ids=["several", "broken"])
def test_mpi_that_knows_of_all_is_left_alone(
    size: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mpi: Any = ModuleType("mpi4py.MPI")
    if size is not None:
        mpi.Is_initialized, mpi.Is_finalized = (lambda: True), (lambda: False)
        mpi.COMM_WORLD = SimpleNamespace(Get_size=lambda: size)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    other_launchers.warn_of_mpi(2)
    assert caplog.messages == []


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught"])
def test_what_torch_s_decorator_records_is_in_the_summary(launcher: Launcher, caught: bool) -> None:
    """Even where the program keeps it to itself."""
    need_installed("torch")
    program = """
    import os
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        raise ValueError("the learning rate is negative")

    try:
        main()
    except ValueError:
        if {caught}:
            os._exit(3)
        raise
    """
    done = launcher.run("-np", "1", launcher.script(program.format(caught=caught)))
    (failure,) = [line for line in done.stderr.splitlines() if "the job failed" in line]
    status = "exited with status 3" if caught else "exited with status 1"
    assert f"{status}; it recorded ValueError: the learning rate is negative" in failure


RECORDS = """
import os, signal, sys, time
path = os.environ["TORCHELASTIC_ERROR_FILE"]
with open(path, "w") as file:
    file.write(sys.argv[1])
with open("path", "w") as file:
    file.write(path)
if len(sys.argv) > 2:
    time.sleep(60)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"message": {"message": "OSError: gone", "extraInfo": {}}}', "; it recorded OSError: gone"),
        ('{"message": "OSError: gone\\u001b[2J"}', "; it recorded OSError: gone?[2J"),
        ('{"message": {}}', ""),
        ("[" * 100_000, ""),
        ("", ""),
    ],
    ids=["torch's", "a text", "nothing", "nested", "empty"],
)
def test_whatever_is_recorded_is_one_line(launcher: Launcher, content: str, told: str) -> None:
    done = launcher.run("-np", "1", launcher.script(RECORDS), content)
    assert done.stderr.splitlines()[-1].endswith(f"exited with status 3{told}")
    path = Path(launcher.file("path").read_text())
    assert not path.parent.exists()


@pytest.mark.parametrize("watched", [True, False], ids=["agent", "agent and watchdog"])
def test_what_was_recorded_does_not_outlive_an_agent_that_is_killed(launcher: Launcher, watched: bool) -> None:
    started = launcher.start("-np", "1", launcher.script(RECORDS), "{}", "stays")
    folder = Path(launcher.file("path").read_text()).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    watchdog, agent = launcher.agents(started)
    if not watched:
        watchdog.suspend()
    agent.kill()
    if not watched:
        watchdog.kill()
    started.communicate(timeout=30)
    assert not folder.exists()
