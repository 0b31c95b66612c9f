"""torch.distributed's backend hvdgloo with several ranks on each of several hosts, started by hvdgloo-run over ssh."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.hosts import Bed

torch = pytest.importorskip("torch")

WORKER = """
import os, signal, time
import torch
import torch.distributed as dist
import hvdgloo.torch.distributed
dist.init_process_group("hvdgloo")
rank, size = dist.get_rank(), dist.get_world_size()
every = [torch.arange(300_000.0) + of for of in range(size)]
for count in (3, 300_000):
    given = [tensor[:count] for tensor in every]
    tensor = given[rank].clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(given))
    tensor = given[rank].clone()
    dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True).wait()
    assert torch.allclose(tensor, sum(given) / size)
    tensor = given[rank].clone()
    dist.broadcast(tensor, size - 1)
    assert torch.equal(tensor, given[-1])
    whole = torch.empty(size * count)
    dist.all_gather_into_tensor(whole, given[rank])
    assert torch.equal(whole, torch.cat(given))
    block = torch.empty(count)
    for op, expected in ((dist.ReduceOp.SUM, sum(given)), (dist.ReduceOp.MAX, given[-1])):
        dist.reduce_scatter_tensor(block, given[rank].repeat(size), op)
        assert torch.equal(block, expected)
    parts = [torch.empty(count) for _ in range(size)]
    dist.all_to_all(parts, [given[rank] + of for of in range(size)])
    assert all(torch.equal(part, given[of] + rank) for of, part in enumerate(parts))
across = dist.new_group([0, 2])
apart = dist.new_group([1, 3])
turned = dist.new_group([0, 2, 1, 3], use_local_synchronization=False)
for group, members in ((across, (0, 2)), (apart, (1, 3)), (turned, range(4))):
    if rank in members:
        tensor = torch.ones(50_000) + rank
        dist.all_reduce(tensor, group=group)
        assert tensor.unique().tolist() == [sum(1.0 + of for of in members)]
peer = (rank + 2) % size
send = dist.isend(torch.full((70_000,), float(rank)), peer)
tensor = torch.empty(70_000)
dist.recv(tensor, peer)
send.wait()
assert tensor.unique().tolist() == [peer]
print("PLANE", dist.group.WORLD._queue.connection.backend.name, flush=True)
dist.barrier()  # before the kill, since a rank may be ended before its next line once another is lost
if os.environ["END"] == "well":
    dist.destroy_process_group()
    raise SystemExit
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    while True:
        dist.all_reduce(torch.ones(300_000))
except dist.DistBackendError as error:
    print("LOST", round(time.monotonic() - began, 1), error, flush=True)
"""


@pytest.mark.parametrize("end", ["well", "killed"])
def test_hosts_are_reduced_first_and_then_between(bed: Bed, tmp_path: Path, end: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    flags = ["-H", "h1:2,h2:2", "--hierarchical-threshold", "4096"]
    command = [*warm.launcher(), *flags, "-x", f"END={end}", warm.python(), str(script)]
    done = bed["h1"].run(command, timeout=50)
    assert re.findall(r"PLANE (\w+)", done.stdout) == ["hierarchical"] * 4, done.stdout + done.stderr
    assert (done.returncode == 0) == (end == "well"), done.stderr
    if end == "killed":
        assert "rank 3" in done.stderr
