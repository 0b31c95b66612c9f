"""Behaviour of real processes only: deaths, forks, exits, descriptors, idleness, and payloads beyond 2 GiB."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from hvdgloo._backends.select import gloo_provider
from tests.support.frameworks import need_installed
from tests.support.job import MARKING, Job

pytestmark = pytest.mark.skipif(not gloo_provider("auto"), reason="several processes need torch or pygloo")

LOOP = (
    MARKING
    + """
hvd.init()
rank = hvd.rank()
hvd.allreduce(np.ones(1), op=hvd.Sum, name="warm")
"""
)

UNTIL_IT_FAILS = """
import threading
failed = threading.Event()
mark(f"ready.{rank}", os.getpid())
try:
    while True:
        hvd.allreduce(np.ones(200_000), op=hvd.Sum, name="x")
except hvd.HorovodInternalError as error:
    mark(f"failed.{rank}", json.dumps([time.time(), type(error).__name__, getattr(error, "rank", None), str(error)]))
"""


def wait_ready(job: Job) -> None:
    for rank in range(len(job.workers)):
        job.wait_for_file(f"ready.{rank}")


def cpu_seconds(pid: int) -> float:
    """A process's own time to the nanosecond (clock_getcpuclockid(3)); /proc counts in hundredths, and twice."""
    return time.clock_gettime((~pid << 3) | 2)


def survivors_say(job: Job, victim: int, since: float, within: float) -> None:
    for rank in range(len(job.workers)):
        if rank != victim:
            at, kind, blamed, text = json.loads(job.wait_for_file(f"failed.{rank}", within + 10))
            assert at - since < within, (rank, at - since, text)
            assert (kind, blamed) == ("PeerLostError", victim), text
            assert f"rank {victim} (host localhost, pid {job.workers[victim].pid})" in text


@pytest.mark.parametrize("victim", [0, 2])
def test_pain_22_a_killed_rank_is_named_on_every_rank_within_a_second(tmp_path: Path, victim: int) -> None:
    with Job(4, LOOP + UNTIL_IT_FAILS, tmp_path) as job:
        wait_ready(job)
        since = time.time()
        job.workers[victim].send_signal(signal.SIGKILL)
        survivors_say(job, victim, since, 1.0)


@pytest.mark.parametrize("child", ["loader", "fork", "inheriting"])
def test_a_killed_rank_is_noticed_although_its_children_live(tmp_path: Path, child: str) -> None:
    if child == "loader":
        need_installed("torch")
    start = {
        # DataLoader's workers are forked from the rank and outlive its death for a while.
        "loader": """
import torch.utils.data
loader = torch.utils.data.DataLoader(list(range(1000)), num_workers=2, multiprocessing_context="fork")
iterator = iter(loader)
next(iterator)
""",
        "fork": """
if os.fork() == 0:
    mark(f"child.{rank}")
    signal.pause()
    os._exit(0)
while not os.path.exists(os.path.join(os.environ["JOB_FOLDER"], f"child.{rank}")):
    time.sleep(0.01)
""",
        "inheriting": """
import subprocess
subprocess.Popen(["sleep", "60"], close_fds=False)
""",
    }[child]
    with Job(3, LOOP + start + UNTIL_IT_FAILS, tmp_path) as job:
        wait_ready(job)
        assert psutil.Process(job.workers[1].pid).children()
        since = time.time()
        job.workers[1].send_signal(signal.SIGKILL)
        survivors_say(job, 1, since, 1.0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_lost_after_the_operation_timeout(tmp_path: Path, victim: int) -> None:
    with Job(3, LOOP + UNTIL_IT_FAILS, tmp_path, HVDGLOO_OPERATION_TIMEOUT="1") as job:
        wait_ready(job)
        since = time.time()
        job.workers[victim].send_signal(signal.SIGSTOP)
        survivors_say(job, victim, since, 4.0)


ENDINGS = {
    "falls off the end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise KeyError('mine')", 1),
    "pending handle": (
        "from hvdgloo.numpy import allreduce_async; allreduce_async(np.ones(3), name=f'p.{rank}'); hvd.barrier()",
        0,
    ),
    "explicit shutdown": ("hvd.shutdown(); hvd.shutdown()", 0),
    "after a fork": ("p = os.fork()\nif p: os.waitpid(p, 0)", 0),
    "in an abandoned thread": (
        "import threading\n"
        "threading.Thread(target=lambda: hvd.allreduce(np.ones(1), name=f'never.{rank}'), daemon=True).start()",
        0,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_leaving_the_interpreter_neither_hangs_nor_aborts(tmp_path: Path, ending: str) -> None:
    code, status = ENDINGS[ending]
    with Job(2, LOOP + code, tmp_path, fresh=True) as job:
        for ended in job.wait(20):
            assert ended.returncode == status, ended


@pytest.mark.parametrize("operations", ["shm", "gloo"])
def test_init_and_shutdown_twenty_times_leak_nothing(tmp_path: Path, operations: str) -> None:
    code = """
    import math, os, threading, time
    import numpy as np
    import hvdgloo.numpy as hvd
    from hvdgloo._job.process import current

    def tasks(wanted):
        # A thread that has been joined may still be on its last steps: the fewest that are seen for a while.
        least = math.inf
        deadline = time.monotonic() + (0.1 if not wanted else 2)
        while least > wanted and time.monotonic() < deadline:
            least = min(least, len(os.listdir("/proc/self/task")))
            time.sleep(0.001)
        return least

    counts, worlds = [], set()
    for turn in range(21):
        hvd.init()
        worlds.add(hvd.broadcast_object(current().world))
        assert current().world in worlds
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
        hvd.shutdown()
        assert not hvd.is_initialized()
        if turn in (1, 20):  # the first turn may start what stays for ever (torch's own threads)
            wanted = counts[0][1] if counts else 0
            counts.append((threading.active_count(), tasks(wanted), len(os.listdir("/proc/self/fd"))))
    assert all(last <= second for second, last in zip(*counts)), counts
    assert len(worlds) == 21  # what was sealed in one cannot pass in another
    """
    with Job(2, code, tmp_path, HVDGLOO_CPU_OPERATIONS=operations) as job:
        job.succeed(50)


def test_pain_28_an_idle_job_uses_under_one_percent_of_a_core(tmp_path: Path) -> None:
    code = LOOP + "mark(f'ready.{rank}')\nsignal.pause()\n"
    with Job(2, code, tmp_path, fresh=True) as job:
        wait_ready(job)
        processes = [psutil.Process(worker.pid) for worker in job.workers]
        busy = [cpu_seconds(worker.pid) for worker in job.workers]
        switches = [sum(process.num_ctx_switches()) for process in processes]
        assert all(worker.poll() is None for worker in job.workers)
        time.sleep(2.0)  # the stretch of idleness that is measured, not a synchronisation
        for rank, process in enumerate(processes):
            assert cpu_seconds(process.pid) - busy[rank] < 0.02
            # Neither a timer nor a message wakes it.
            assert sum(process.num_ctx_switches()) - switches[rank] < 10


@pytest.mark.extended
def test_payloads_beyond_2_gib(tmp_path: Path) -> None:
    code = (
        LOOP
        + """
import ctypes, mmap
# Where all but the ends is the same 64 MiB again and again: the system takes long to give out 4 GiB.
n, piece = (1 << 31) + 5, 1 << 26
memory = os.memfd_create("repeated")
os.ftruncate(memory, piece)
map_at = ctypes.CDLL(None).mmap
map_at.restype = ctypes.c_void_p
map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
both, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x10
base = map_at(None, n, both, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
for at in range(piece, (1 << 31) - piece, piece):
    assert map_at(base + at, piece, both, mmap.MAP_SHARED | fixed, memory, 0) == base + at
buffer = np.frombuffer((ctypes.c_uint8 * n).from_address(base), np.uint8)
buffer[-3:] = rank + 1
hvd.allreduce_(buffer, op=hvd.Sum, name="big")
assert buffer[-4:].tolist() == [0, 3, 3, 3], buffer[-4:]
marks = [0, (1 << 31) - 1, 1 << 31, n - 1]
buffer[marks] = 5 + rank
hvd.broadcast_(buffer, 1, name="big")
assert buffer[marks].tolist() == [6] * 4
"""
    )
    with Job(2, code, tmp_path) as job:
        job.succeed(55)


def test_pain_21_a_stall_names_ranks_hosts_pids_and_stacks(tmp_path: Path) -> None:
    code = (
        LOOP
        + """
def looking_for_my_keys():
    while not os.path.exists(os.path.join(os.environ["JOB_FOLDER"], "found")):
        time.sleep(0.02)

if rank == 1:
    mark("lost")
    looking_for_my_keys()
else:
    mark(f"waiting.{rank}")
assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="late").tolist() == [3.0]
"""
    )
    with Job(3, code, tmp_path, HVDGLOO_STALL_CHECK_TIME_SECONDS="0.3") as job:
        job.wait_for_file("waiting.0")
        job.wait_for_file("waiting.2")
        deadline = time.monotonic() + 20
        while "Stalled" not in job.output(0).stderr and time.monotonic() < deadline:
            time.sleep(0.02)
        (tmp_path / "found").touch()
        ended = job.succeed(20)
        text = ended[0].stderr
        assert "allreduce.late" in text
        assert "submitted by ranks 0, 2, missing on rank 1" in text
        assert f"rank 1 (host localhost, pid {job.workers[1].pid}) is here:" in text
        assert "looking_for_my_keys" in text


def test_a_stall_beyond_the_shutdown_time_ends_the_job(tmp_path: Path) -> None:
    code = (
        LOOP
        + """
if rank == 1:
    signal.pause()
try:
    hvd.allreduce(np.ones(1), op=hvd.Sum, name="never")
except hvd.HorovodInternalError as error:
    mark("error", f"{type(error).__name__} {error}")
"""
    )
    with Job(
        2, code, tmp_path, HVDGLOO_STALL_CHECK_TIME_SECONDS="0.2", HVDGLOO_STALL_SHUTDOWN_TIME_SECONDS="0.6"
    ) as job:
        text = job.wait_for_file("error")
        assert text.startswith("StallError")
        assert "allreduce.never" in text


def test_a_forked_child_is_told_that_it_is_no_rank(tmp_path: Path) -> None:
    code = (
        LOOP
        + """
pid = os.fork()
if pid == 0:
    try:
        hvd.allreduce(np.ones(1), name="child")
    except hvd.HorovodInternalError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="parent").tolist() == [2.0]
"""
    )
    with Job(2, code, tmp_path) as job:
        job.succeed(20)


def test_pain_9_an_unreachable_address_fails_init_with_names(tmp_path: Path) -> None:
    code = """
    import hvdgloo.numpy as hvd
    hvd.init()
    """
    # An address of the documentation's range: not this host's. Rank 1 is left waiting for rank 0, and says so.
    with Job(2, code, tmp_path, HVDGLOO_ADDRESS="192.0.2.1", HVDGLOO_START_TIMEOUT="2") as job:
        ended = job.wait(20)
        assert ended[1].returncode == 1
        assert "1 of 2 workers" in ended[1].stderr
        assert ended[0].returncode == 1
        assert "ConnectError" in ended[0].stderr
        assert "192.0.2.1" in ended[0].stderr
        assert "HVDGLOO_ADDRESS" in ended[0].stderr


WHERE = {
    "between two collectives": "raise ValueError('bad batch 17')",
    "in a data loader": "next(loader())",
    "in a hook": "parameter.sum().backward()",
}


@pytest.mark.parametrize("where", WHERE)
def test_an_error_on_one_rank_is_named_on_all_others_within_a_second(tmp_path: Path, where: str) -> None:
    need_installed("torch")
    code = (
        LOOP
        + """
import torch
import hvdgloo.torch

def loader():
    raise ValueError("bad batch 17")
    yield

def hook(gradient):
    raise ValueError("bad batch 17")

parameter = torch.ones(2, requires_grad=True)
parameter.register_hook(hook)
mark(f"ready.{rank}")
if rank == 1:
    while len([name for name in os.listdir(os.environ["JOB_FOLDER"]) if name.startswith("ready.")]) < 3:
        time.sleep(0.01)
    mark("raised", time.time())
    RAISE
try:
    hvd.allreduce(np.ones(10_000), name="never")
except hvd.HorovodInternalError as error:
    mark(f"failed.{rank}", json.dumps([time.time(), error.rank, str(error)]))
""".replace("RAISE", WHERE[where])
    )
    with Job(3, code, tmp_path) as job:
        raised = float(job.wait_for_file("raised"))
        for rank in (0, 2):
            at, blamed, text = json.loads(job.wait_for_file(f"failed.{rank}"))
            assert at - raised < 1.0
            assert blamed == 1
            who = f"rank 1 (host localhost, pid {job.workers[1].pid})"
            assert f"{who} ended with ValueError: bad batch 17, which" in text
