"""Shared memory between real processes: what a death leaves, what containers forbid, what is missing."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support import warm
from tests.support.frameworks import need_installed
from tests.support.job import MARKING, Job
from tests.support.launching import clean_environment, run_command, wait_for

EVERYTHING = """
def check_everything():
    rank, size = hvd.rank(), hvd.size()
    for count in (5, 100_000, 3_000_000):
        ours = np.arange(count, dtype=np.float64) + rank
        whole = hvd.allreduce(ours, op=hvd.Sum)
        assert np.array_equal(whole, np.arange(count) * size + sum(range(size)))
        assert np.array_equal(hvd.broadcast(ours, 1), np.arange(count) + 1)
        gathered = hvd.allgather(ours[:rank + 2])
        assert np.array_equal(gathered, np.concatenate([np.arange(r + 2) + r for r in range(size)]))
        part = hvd.reducescatter(ours, op=hvd.Sum)
        assert np.array_equal(part, np.array_split(whole, size)[rank])
        received, counts = hvd.alltoall(np.full(size, float(rank)), [1] * size)
        assert received.tolist() == list(range(size))
"""

HOW = """
from hvdgloo._job.process import current
backend = current().engine._groups[0].host.backend
print(backend.name)
"""


def names_held(pid: int) -> set[str]:
    """Names of shared memory that a process has mapped, and of the abstract sockets that it has: what might be left."""
    process = Path(f"/proc/{pid}")
    mapped = {line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line}
    links = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.add(os.readlink(descriptor))
    rows = [line.split() for line in (process / "net/unix").read_text().splitlines()]
    return mapped | {row[7] for row in rows if len(row) > 7 and row[7][0] == "@" and f"socket:[{row[6]}]" in links}


def test_a_killed_rank_that_others_wait_for_is_noticed_within_a_second(tmp_path: Path) -> None:
    """It stops in the middle of an operation, so that the others sleep until it goes on; then it is killed."""
    code = (
        MARKING
        + """
hvd.init()
rank = hvd.rank()
hvd.allreduce(np.ones(1_000_000), op=hvd.Sum, name="x")
if rank == 1:
    from hvdgloo._backends.shm import reduction
    def stop(*_):
        mark("stopped")
        # With kill(), this thread may get to the end of the operation before the main thread has stopped them all.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    reduction.Reducer.fold = stop
mark(f"ready.{rank}")
try:
    hvd.allreduce(np.ones(1_000_000), op=hvd.Sum, name="x")
except hvd.HorovodInternalError as error:
    mark(f"failed.{rank}", json.dumps([time.time(), type(error).__name__, error.rank]))
"""
    )
    with Job(3, code, tmp_path, HVDGLOO_CPU_OPERATIONS="shm") as job:
        job.wait_for_file("stopped")
        victim = psutil.Process(job.workers[1].pid)
        wait_for(lambda: victim.status() == psutil.STATUS_STOPPED)
        for rank in (0, 2):
            job.wait_for_file(f"ready.{rank}")
        since = time.time()
        victim.kill()
        for rank in (0, 2):
            at, kind, blamed = json.loads(job.wait_for_file(f"failed.{rank}", 11))
            assert at - since < 1.0
            assert (kind, blamed) == ("PeerLostError", 1)


def test_ranks_that_are_killed_leave_nothing_behind(tmp_path: Path) -> None:
    code = (
        MARKING
        + """
hvd.init()
mark(f"ready.{hvd.rank()}")
while True:
    hvd.allreduce(np.ones(1_000_000), op=hvd.Sum, name="x")
"""
    )
    with Job(3, code, tmp_path, HVDGLOO_CPU_OPERATIONS="shm") as job:
        for rank in range(3):
            job.wait_for_file(f"ready.{rank}")
        # Memory has no name, and the sockets have gone when the ranks have met: what is nowhere cannot stay behind.
        assert [names_held(worker.pid) for worker in job.workers] == [set()] * 3
        for worker in job.workers:
            worker.send_signal(signal.SIGKILL)
        for worker in job.workers:
            worker.wait(10)
            assert not psutil.pid_exists(worker.pid)


def test_what_has_a_name_would_be_found() -> None:
    name = f"hvdgloo-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as named, open(f"/dev/shm/{name}", "w+b") as file:
        os.unlink(file.name)
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            named.bind(f"\0{name}")
            assert names_held(os.getpid()) >= {f"@{name}", f"/dev/shm/{name} (deleted)"}


def test_a_job_of_one_host_needs_no_torch(tmp_path: Path) -> None:
    code = (
        MARKING
        + "sys.modules['torch'] = None  # as if it were not installed\n"
        + EVERYTHING
        + "hvd.init()\n"
        + HOW
        + """
check_everything()
for dtype in ("bool", "int8", "int16", "float16"):
    assert hvd.allreduce(np.ones(5, dtype), op=hvd.Max).dtype == dtype
odd = hvd.add_process_set([0, 2])
if odd.included():
    assert hvd.allreduce(np.ones(70_000), op=hvd.Sum, process_set=odd)[-1] == 2
hvd.barrier()
hvd.shutdown()
hvd.init()
assert hvd.allreduce(np.ones(5), op=hvd.Sum).tolist() == [3.0] * 5
"""
    )
    with Job(3, code, tmp_path, fresh=True) as job:
        for ended in job.wait(30):
            assert (ended.returncode, ended.stdout) == (0, "shm\n"), ended.stderr


def test_without_torch_gloo_says_what_to_install(tmp_path: Path) -> None:
    code = MARKING + "sys.modules['torch'] = None\nhvd.init()\n"
    with Job(2, code, tmp_path, fresh=True, HVDGLOO_CPU_OPERATIONS="gloo") as job:
        for ended in job.wait(20):
            assert ended.returncode == 1
            assert "'hvdgloo[torch]'" in ended.stderr


FAULTS = {
    "no memfd_create": "if hvd_rank == 0: os.memfd_create = None; del os.memfd_create",
    "no room for the mapping": "if hvd_rank == 1: limit(resource.RLIMIT_AS, used() + (8 << 20))",
    "no descriptors": "if hvd_rank == 1: fault('map_memory', OSError(24, 'Too many open files'))",
    "no room in the files' limit": "limit(resource.RLIMIT_FSIZE, 1 << 20)",
    "no way to rank 0": "if hvd_rank == 1: segment_setup.abstract.connect = refuse",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_share_memory_uses_gloo_and_says_so_once(tmp_path: Path, fault: str) -> None:
    need_installed("torch")
    code = (
        MARKING
        + EVERYTHING
        + """
import resource
import torch
import hvdgloo._backends.gloo
from hvdgloo._backends.shm import backend as shm, segment_setup, system

def limit(which, value):
    real = segment_setup.SegmentSetup.meet
    def meet(self):
        before = resource.getrlimit(which)
        resource.setrlimit(which, (value, before[1]))
        try:
            return real(self)
        finally:
            resource.setrlimit(which, before)
    segment_setup.SegmentSetup.meet = meet

def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def fault(name, error):
    def fail(*_):
        raise error
    setattr(system, name, fail)

def refuse(*_):
    raise BlockingIOError(11, "Resource temporarily unavailable")

hvd_rank = int(os.environ["HVDGLOO_RANK"])
FAULT
hvd.init()
""".replace("FAULT", FAULTS[fault])
        + HOW
        + "check_everything()\n"
    )
    with Job(2, code, tmp_path, HVDGLOO_SHM_SEGMENT=str(64 << 20)) as job:
        ended = job.wait(40)
    assert [(e.returncode, e.stdout) for e in ended] == [(0, "gloo\n")] * 2, ended
    said = [line for e in ended for line in e.stderr.splitlines() if "no shared memory between ranks 0 to 1" in line]
    assert len(said) == 1, ended


def test_a_demand_that_cannot_be_met_is_an_error(tmp_path: Path) -> None:
    code = MARKING + "del os.memfd_create\nhvd.init()\n"
    with Job(2, code, tmp_path, HVDGLOO_CPU_OPERATIONS="shm") as job:
        for ended in job.wait(20):
            assert ended.returncode == 1
            assert "HVDGLOO_CPU_OPERATIONS=shm asks for shared memory, but rank 0" in ended.stderr
            assert "memfd_create" in ended.stderr


def test_pain_27_a_small_dev_shm_is_no_limit(tmp_path: Path) -> None:
    """Docker gives 64 MiB. A job that used any of it would not even start here."""
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mounting needs root")
    program = tmp_path / "program.py"
    program.write_text(
        MARKING
        + EVERYTHING
        + "hvd.init()\n"
        + HOW
        + "assert os.statvfs('/dev/shm').f_blocks * 4096 <= 4096\n"
        + "check_everything()\n"
        + "big = np.ones(1 << 24)\nassert hvd.allreduce(big, op=hvd.Sum)[-1] == 3\n"
    )
    run = [*warm.launcher(), "-np", "3", "--cpu-operations", "shm", warm.python(), str(program)]
    mount = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"'
    done = run_command(
        ["unshare", "-m", "sh", "-c", mount, "sh", *run],
        env={**clean_environment(), "JOB_FOLDER": str(tmp_path)},
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shm\n") == 3
