"""Several ranks on each of several hosts, over shared memory inside and Gloo between, with real hosts and real ssh."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdgloo._backends.select import gloo_provider
from tests.support import warm
from tests.support.hosts import Bed

pytestmark = pytest.mark.skipif(not gloo_provider("auto"), reason="hosts need Gloo, and that needs torch or pygloo")

WORKER = """
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo._job.process import current

some = hvd.ProcessSet([0, 1, 2])
hvd.init(process_sets=[some])
rank, size = hvd.rank(), hvd.size()

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

def rows(rank, count=700):
    return np.arange(count * 3.0).reshape(count, 3) + rank

every = [rows(r) for r in range(size)]
for _ in range(3):
    assert np.array_equal(hvd.allreduce(rows(rank), op=hvd.Sum), sum(every))
    whole = np.concatenate([rows(r, 200 + r) for r in range(size)])
    assert np.array_equal(hvd.allgather(rows(rank, 200 + rank)), whole)
    assert np.array_equal(hvd.broadcast(rows(rank), root_rank=size - 1), every[-1])
    assert np.array_equal(hvd.reducescatter(rows(rank), op=hvd.Sum), np.array_split(sum(every), size)[rank])
    assert np.array_equal(hvd.allreduce(rows(rank), op=hvd.Min), every[0])
    received = hvd.alltoall(rows(rank, size))
    assert np.array_equal(received, np.stack([rows(r, size)[rank] for r in range(size)]))
if some.included():
    total = hvd.allreduce(rows(rank), op=hvd.Sum, process_set=some)
    assert np.array_equal(total, sum(every[:3]))
large = np.full(1 << 21, float(rank + 1))
hvd.barrier()
before = sent()
hvd.allreduce_(large, op=hvd.Sum)
crossed = sent() - before
assert (large == size * (size + 1) / 2).all()
group = current().engine._groups[0].host.backend
print("FOUND", group.name, round(crossed / large.nbytes, 1), flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize(("hosts", "least"), [("h1:2,h2:2", 1.0), ("h1:2,h2:1,h3:1", 4 / 3)])
def test_each_byte_crosses_a_wire_once(bed: Bed, tmp_path: Path, hosts: str, least: float) -> None:
    """2(h-1)/h times the tensor's size leave each host, and the acknowledgements of what comes in."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    flags = ["-H", hosts, "--hierarchical-threshold", "4096", "--hierarchical-distribution-threshold", "4096"]
    done = bed["h1"].run([*warm.launcher(), *flags, warm.python(), str(script)], timeout=50)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"FOUND (\w+) ([\d.]+)", done.stdout)
    assert [name for name, _ in found] == ["hierarchical"] * 4, done.stdout
    assert all(float(crossed) < least + 0.2 for _, crossed in found), found


@pytest.mark.parametrize(
    ("hosts", "flags", "plane"),
    [
        ("h1:3,h2:1", [], "hierarchical"),
        ("h1:2,h2:2", ["--hierarchical-threshold", "0"], "gloo"),
        ("h1:2,h2:2", ["--cpu-operations", "gloo"], "gloo"),
    ],
    ids=["by default", "threshold of 0", "gloo"],
)
def test_which_plane_it_is(bed: Bed, tmp_path: Path, hosts: str, flags: list[str], plane: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    where = ["-H", hosts, *flags]
    done = bed["h1"].run([*warm.launcher(), *where, warm.python(), str(script)], timeout=50)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"FOUND (\w+)", done.stdout) == [plane] * 4
