"""Several ranks on each of several hosts, over shared memory inside and Gloo between, with real hosts and real ssh."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdgloo._backends.select import gloo_provider
from tests.support import warm
from tests.support.hosts import Bed
from tests.support.pages import ROOT
from tests.support.selection import extended

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


ENCODED = """
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.numpy import FRONTEND

hvd.init()

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

def crossed(tensor, compression):
    reducer = GradientReducer(FRONTEND, op=hvd.Sum, compression=compression)
    reducer.ready("w", tensor)  # connects what is not connected yet
    reducer.wait()
    hvd.barrier()
    before = sent()
    reducer.ready("w", tensor)
    reducer.wait()
    hvd.barrier()
    return sent() - before

large = np.random.default_rng(hvd.rank()).normal(size=1 << 21).astype(np.float32)
hosts = max(hvd.allgather_object(hvd.cross_size()))
full = 2 * (hosts - 1) / hosts * large.nbytes
for name in ("none", "int8", "int4"):
    tensor = large.copy()
    nbytes = crossed(tensor, getattr(hvd.Compression, name))
    same = len(set(hvd.allgather_object(hash(tensor.tobytes())))) == 1
    print("FOUND", name, round(nbytes / full, 3), same, flush=True)
hvd.shutdown()
"""


@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")
@pytest.mark.parametrize("hosts", ["h1:2,h2:2", *extended("h1:2,h2:1,h3:1")])
def test_encoded_gradients_take_fewer_bytes_on_the_wire(bed: Bed, tmp_path: Path, hosts: str) -> None:
    """A quarter, an eighth, and what TCP adds; the setting counts where the program has no compressor of its own."""
    script = tmp_path / "worker.py"
    script.write_text(ENCODED)
    done = bed["h1"].run(
        [*warm.launcher(), "-H", hosts, "--wire", "bf16", warm.python(), str(script)],
        env={"PYTHONHASHSEED": "0"},
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"FOUND (\w+) ([\d.]+) (\w+)", done.stdout)
    assert len(found) == 12, done.stdout
    for name, most in (("none", 0.51), ("int8", 0.26), ("int4", 0.15)):
        shares = [float(share) for found_name, share, _ in found if found_name == name]
        assert all(0.9 * most < share < most for share in shares), (name, shares)
    assert {same for _, _, same in found} == {"True"}


@pytest.mark.extended
@pytest.mark.timeout(150)  # mostly a tenth of it
@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes, and the example needs torch")
def test_the_example_with_rare_meetings_runs_as_its_page_says(bed: Bed) -> None:
    pytest.importorskip("sklearn")
    page = (ROOT / "docs/slow-networks.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^hvdgloo-run (.*) python (examples/torch_digits_local_sgd\.py .*)$", page, re.MULTILINE)
    flags, program = (text.split() for text in command)
    done = bed["h1"].run([*warm.launcher(), *flags, warm.python(), *program], cwd=ROOT, timeout=140)
    assert done.returncode == 0, done.stderr
    accuracy, outer = re.findall(r"accuracy: ([\d.]+)%, after 320 steps and (\d+) outer steps of 4 ranks", done.stdout)[
        0
    ]
    assert float(accuracy) >= 95.0
    assert int(outer) == 320 // 8
    assert "all ranks hold identical parameters" in done.stdout
