"""``init`` with process sets, and with some of the ranks as a world of its own: between real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdgloo._backends.select import gloo_provider
from tests.support.job import Job

pytestmark = pytest.mark.skipif(not gloo_provider("auto"), reason="several processes need torch or pygloo")

HEAD = """
import os
import numpy as np
import hvdgloo.numpy as hvd
launched = int(os.environ["HVDGLOO_RANK"])
"""


def run(size: int, code: str, folder: Path) -> list[str]:
    """Return the output of each worker; all must succeed."""
    with Job(size, HEAD + code, folder) as job:
        ended = job.succeed()
    return [worker.stdout for worker in ended]


def test_static_sets_are_there_after_init(tmp_path: Path) -> None:
    outputs = run(
        3,
        """
even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
hvd.init(process_sets=[even, odd])
mine = odd if hvd.rank() == 1 else even
total = hvd.allreduce(np.full(100_000, float(hvd.rank())), op=hvd.Sum, process_set=mine)
print(even.process_set_id, odd.process_set_id, mine.size(), mine.rank(), total[-1])
hvd.barrier()  # a rank that shuts down ends what others have not got an order for
hvd.shutdown()
assert even.process_set_id is None
hvd.init(process_sets=[even])
if even.included():
    print(hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=even))
hvd.barrier()
""",
        tmp_path,
    )
    assert outputs == ["1 2 2 0 2.0\n[2.]\n", "1 2 1 0 1.0\n", "1 2 2 1 2.0\n[2.]\n"]


def test_different_lists_of_sets_are_a_value_error(tmp_path: Path) -> None:
    code = """
hvd.init(process_sets=[hvd.ProcessSet([0, 1])] if launched else [])
"""
    with Job(2, HEAD + code, tmp_path) as job:
        ended = job.wait()
    assert ended[1].returncode == 1
    assert "InvalidArgumentError: init(process_sets=...) was called with the sets [[0, 1]] on rank 1" in ended[1].stderr
    assert "and with [] on rank 0" in ended[1].stderr


def test_some_ranks_are_a_world_of_their_own(tmp_path: Path) -> None:
    outputs = run(
        4,
        """
for _ in range(2):  # worlds can be left and entered again
    hvd.init(comm=[1, 3] if launched % 2 else [0, 2])
    gathered = hvd.allgather(np.array([launched]))
    print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), gathered.tolist())
    hvd.shutdown()
hvd.init()
print(hvd.rank(), hvd.size(), hvd.allgather(np.array([launched])).tolist())
""",
        tmp_path,
    )
    for launched in range(4):
        world = [launched % 2, launched % 2 + 2]
        line = f"{launched // 2} 2 {launched // 2} 2 {world}\n"
        assert outputs[launched] == 2 * line + f"{launched} 4 [0, 1, 2, 3]\n"


def test_a_world_without_this_process_is_a_value_error(tmp_path: Path) -> None:
    outputs = run(
        2,
        """
for wrong in ([1 - launched], [0, 1, 2], [launched, launched], "01", [0.0], 5):
    try:
        hvd.init(comm=wrong)
    except ValueError as error:
        print(error)
hvd.init(comm=[1, 0])
print(hvd.size())
""",
        tmp_path,
    )
    lines = outputs[0].splitlines()
    assert lines[0].startswith("comm=[1] leaves out this process, which is rank 0")
    assert lines[1] == "comm=[0, 1, 2]: ranks are 0 to 1, each at most once"
    assert lines[2] == "comm=[0, 0]: ranks are 0 to 1, each at most once"
    assert all(line.startswith("comm must be None or a list of ranks") for line in lines[3:6])
    assert lines[6:] == ["2"]


def test_a_rank_that_dies_ends_waits_in_every_set(tmp_path: Path) -> None:
    code = """
import signal
hvd.init()
pair = hvd.add_process_set([0, 1])
hvd.allreduce(np.ones(1), name="warm")
if launched == 2:
    print("gone", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        hvd.allreduce(np.ones(100_000), process_set=pair)
except hvd.HorovodInternalError as error:
    print(type(error).__name__, error.rank)
"""
    with Job(3, HEAD + code, tmp_path) as job:
        outputs = [worker.stdout for worker in job.wait()]
    assert outputs == ["PeerLostError 2\n", "PeerLostError 2\n", "gone\n"]


@pytest.mark.parametrize(
    ("operations", "where"),
    [
        ("torch", "hvdgloo._backends.gloo.GlooStore.set"),
        ("pygloo", "hvdgloo._backends.pygloo.PyglooBackend._connect"),
        ("shm", "hvdgloo._backends.shm.segment_setup.SegmentSetup._join"),
        ("shm", "hvdgloo._backends.shm.segment_setup.SegmentSetup._map"),
    ],
)
def test_a_rank_that_dies_while_a_set_is_connected_keeps_no_other_waiting(
    tmp_path: Path, operations: str, where: str
) -> None:
    code = """
import pkgutil, signal, time
hvd.init()
hvd.allreduce(np.ones(1), name="warm")
if launched == 2:
    kind = pkgutil.resolve_name("WHERE".rpartition(".")[0])
    setattr(kind, "WHERE".rpartition(".")[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
began = time.monotonic()
try:
    hvd.add_process_set([0, 2])
except hvd.HorovodInternalError as error:
    print(type(error).__name__, error.rank, time.monotonic() - began < 5)
"""
    environ = {"HVDGLOO_CPU_OPERATIONS": operations}
    if operations != "shm":
        pytest.importorskip(operations)
        environ = {"HVDGLOO_CPU_OPERATIONS": "gloo", "HVDGLOO_GLOO_PROVIDER": operations}
    with Job(3, HEAD + code.replace("WHERE", where), tmp_path, **environ) as job:
        ended = job.wait()
    assert (ended[0].stdout, ended[0].returncode) == ("PeerLostError 2 True\n", 0), ended[0].stderr


def test_worlds_do_not_write_into_one_timeline(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = """
hvd.init(comm=[0, 1] if launched < 2 else [2, 3])
hvd.allreduce(np.ones(50_000), name=f"world of {launched // 2}")
"""
    with Job(4, HEAD + code, tmp_path, HVDGLOO_TIMELINE=str(trace)) as job:
        job.succeed()
    assert "world of 0" in trace.read_text()
    assert "world of 1" not in trace.read_text()
    json.loads(trace.read_text())


def test_others_stay_initialized_when_one_rank_shuts_down(tmp_path: Path) -> None:
    """Until they shut down themselves; what they call meanwhile fails, and says who left."""
    outputs = run(
        2,
        """
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    hvd.shutdown()
    hvd.shutdown()
    print(hvd.is_initialized())
else:
    for _ in range(2):
        try:
            hvd.allreduce(np.ones(1))
        except hvd.HorovodInternalError as error:
            print("rank 1" in str(error), isinstance(error, ValueError), hvd.is_initialized(), hvd.size())
    hvd.shutdown()
""",
        tmp_path,
    )
    assert outputs == ["True False True 2\n" * 2, "False\n"]
