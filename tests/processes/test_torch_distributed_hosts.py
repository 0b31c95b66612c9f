"""torch.distributed's backend hvdgloo with several ranks on each of several hosts, started by hvdgloo-run over ssh."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.hosts import Bed, HostProcess

torch = pytest.importorskip("torch")

EXTENDED = pytest.mark.extended

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


HEAD = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import hvdgloo.torch.distributed
dist.set_debug_level_from_env()  # which a warm interpreter has read already
dist.init_process_group("hvdgloo", timeout=__import__("datetime").timedelta(seconds=40))
rank, size = dist.get_rank(), dist.get_world_size()

def fails(call):
    began = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        print(f"{time.monotonic() - began:.1f} {error}", flush=True)
    else:
        print("no error", flush=True)
"""

PLACES = {"two on each of two hosts": ("h1", "h1", "h2", "h2"), "one on each of two hosts": ("h1", "h2")}


def started(bed: Bed, hosts: Sequence[str], code: str, folder: Path, **more: str) -> list[HostProcess]:
    """Start ranks that no launcher ends when one of them fails."""
    script = folder / "rank.py"
    script.write_text(HEAD + code)
    environ = {"MASTER_ADDR": bed[hosts[0]].address, "MASTER_PORT": "29511", "WORLD_SIZE": str(len(hosts))}
    environ["HVDGLOO_OPERATION_TIMEOUT"] = "4"
    return [
        bed[host].popen([warm.python(), str(script)], env={**environ, **more, "RANK": str(rank)})
        for rank, host in enumerate(hosts)
    ]


def outputs(processes: Sequence[HostProcess]) -> list[tuple[float, str]]:
    """Wait for the ranks' ends; returns after how many seconds each of them had an error, and which."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=45)
        seconds, _, text = "".join(out.splitlines()[-1:]).partition(" ")  # some versions of Gloo print lines before it
        assert text, (out, err)
        found.append((float(seconds), text))
    return found


def test_ranks_of_several_hosts_learn_that_two_of_one_host_called_different_collectives(
    bed: Bed, tmp_path: Path
) -> None:
    code = """
dist.all_reduce(torch.ones(3))
fails(lambda: dist.all_reduce(torch.ones(3_000_000)) if rank == size - 1 else dist.barrier())
os._exit(0)
"""
    for _, text in outputs(started(bed, ("h1", "h1", "h2", "h2"), code, tmp_path)):
        assert re.search(r"rank \d called barrier", text), text
        assert "rank 3 called all_reduce(SUM, 3000000 x float32)" in text, text


@pytest.mark.parametrize("places", PLACES)
def test_calls_are_compared_between_hosts_where_debugging_asks_for_it(bed: Bed, tmp_path: Path, places: str) -> None:
    """Gloo itself would end the process."""
    code = """
for _ in range(3):
    dist.all_reduce(tensor := torch.ones(3))
    assert tensor[0] == size
fails(lambda: dist.all_reduce(torch.ones(4), async_op=True).wait() if rank >= size / 2 else dist.barrier())
os._exit(0)
"""
    hosts = PLACES[places]
    for _, text in outputs(started(bed, hosts, code, tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL")):
        assert re.search(r"rank \d called barrier", text), text
        assert re.search(r"rank \d called all_reduce\(SUM, 4 x float32\)", text), text


@pytest.mark.parametrize("places", PLACES)
def test_a_killed_rank_is_named_on_every_host(bed: Bed, tmp_path: Path, places: str) -> None:
    code = """
dist.all_reduce(torch.ones(3))
if rank == size - 1:
    print("0.0", os.getpid(), flush=True)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
fails(lambda: dist.all_reduce(torch.ones(3_000_000)))
os._exit(0)
"""
    hosts = PLACES[places]
    *others, (_, pid) = outputs(started(bed, hosts, code, tmp_path))
    for seconds, text in others:
        assert f"rank {len(hosts) - 1} (host h2, pid {pid})" in text, text
        assert seconds < 4


@pytest.mark.parametrize(
    "place", ["two on each of two hosts", pytest.param("one on each of two hosts", marks=EXTENDED)]
)
def test_a_host_that_loses_its_power_during_an_operation_is_named_within_the_heartbeat(
    make_bed: Callable[..., Bed], tmp_path: Path, place: str
) -> None:
    code = """
dist.all_reduce(torch.ones(3))
if rank == size - 1:
    time.sleep(60)
print("waits", flush=True)
fails(lambda: dist.all_reduce(torch.ones(3_000_000)))
os._exit(0)
"""
    bed, hosts = make_bed(["h1", "h2"]), PLACES[place]
    processes = started(bed, hosts, code, tmp_path)
    here = [process for process, host in zip(processes, hosts, strict=True) if host == "h1"]
    for process in here:
        assert process.stdout is not None
        assert "waits\n" in process.stdout
    bed["h2"].power_off()
    for seconds, text in outputs(here):
        for rank in range(len(hosts)):
            assert (f"rank {rank} (host h2" in text) == (hosts[rank] == "h2"), text
        assert seconds < 12, text
