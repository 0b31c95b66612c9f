"""CUDA tensors: over NCCL where a rank has a GPU of its own, staged through the host where two share one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.job import Job

START = """
import threading, time
import torch
import hvdgloo.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
device = torch.device("cuda", 0)
torch.cuda.set_device(device)

def planes():
    from hvdgloo._job import process
    return [backend.name for backend in process.current().engine._groups[0].backends]
"""

COLLECTIVES = """
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
              torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64):
    tensor = (torch.arange(6, device=device).reshape(2, 3) + rank).to(dtype)
    total = sum(torch.arange(6, device=device).reshape(2, 3) + r for r in range(size)).to(dtype)
    result = hvd.allreduce(tensor, op=hvd.Sum)
    assert result.device == device and result.dtype is dtype
    assert torch.equal(result, total), (dtype, result)
    assert torch.equal(hvd.allreduce(tensor.t(), op=hvd.Max), (tensor.long() - rank + size - 1).to(dtype).t())
    assert torch.equal(hvd.reducescatter(tensor, op=hvd.Sum), total.tensor_split(size)[rank])
for dtype in (torch.float32, torch.bool, torch.int16):
    tensor = (torch.arange(6, device=device).reshape(2, 3) + rank).to(dtype)
    every = [(torch.arange(6, device=device).reshape(2, 3) + r).to(dtype) for r in range(size)]
    assert torch.equal(hvd.allgather(tensor), torch.cat(every))
    assert torch.equal(hvd.allgather(tensor[: rank + 1]), torch.cat([t[: r + 1] for r, t in enumerate(every)]))
    assert torch.equal(hvd.broadcast(tensor, root_rank=size - 1), every[-1])
    received, counts = hvd.alltoall(tensor[:size], splits=torch.ones(size, dtype=torch.int32))
    assert torch.equal(received, torch.stack([t[rank] for t in every])) and counts.tolist() == [1] * size
assert hvd.allreduce(torch.tensor([rank == 0, False], device=device), op=hvd.Max).tolist() == [True, False]
scaled = hvd.allreduce(torch.tensor([6, 7], device=device), op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
assert scaled.tolist() == [6 * size, 6 * size], scaled
mixed = hvd.grouped_allreduce([torch.ones(3, device=device), torch.ones(3), torch.ones(2, device=device).half()],
                              op=hvd.Sum)
assert [t.device.type for t in mixed] == ["cuda", "cpu", "cuda"] and all((t == size).all() for t in mixed)
many = [torch.full((i + 1,), float(i), device=device) for i in range(200)]
for i, result in enumerate(hvd.grouped_allreduce(many, op=hvd.Sum)):
    assert (result == i * size).all()
same = hvd.allreduce(torch.ones(5, device=device), op=hvd.Adasum)
assert torch.allclose(same, torch.ones(5, device=device))
x = torch.ones(4, device=device, requires_grad=True)
hvd.allreduce(x * 3, op=hvd.Sum).sum().backward()
assert torch.equal(x.grad, torch.full((4,), 3.0 * size, device=device))
"""

# A long kernel is still writing the tensor when it is submitted; the submitting thread must not wait for it.
FENCES = """
a = torch.randn(4096, 4096, device=device)
hvd.allreduce(torch.ones(1, device=device))
torch.cuda.synchronize()
for _ in range(5):
    tensor = torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(200_000_000)
    tensor += rank + 1
    torch.cuda.set_sync_debug_mode("error")
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    torch.cuda.set_sync_debug_mode("default")
    assert not hvd.poll(handle)
    hvd.synchronize(handle)
    expected = float(size * (size + 1) // 2)
    assert (tensor == expected).all()
    gathered = hvd.allgather(tensor[:4])
    gathered += 1  # on this thread's stream, right after another thread's stream has written it
    assert (gathered == expected + 1).all()
"""

TRAINING = """
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), hvd.SyncBatchNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
plain.load_state_dict(model.state_dict())
model, plain = model.double().to(device), plain.double().to(device)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
batch = torch.randn(8 * size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(device)
target = torch.randn(8 * size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(device)
part = slice(8 * rank, 8 * rank + 8)
ours = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters())
theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
for _ in range(5):
    ours.zero_grad()
    loss = ((model(batch[part]) - target[part]) ** 2).mean()
    loss.backward()
    ours.step()
    theirs.zero_grad()
    ((plain(batch) - target) ** 2).mean().backward()
    theirs.step()
for name, value in plain.state_dict().items():
    assert torch.allclose(model.state_dict()[name].double(), value.double(), rtol=1e-5, atol=1e-8), name
hvd.broadcast_optimizer_state(ours, root_rank=0)

scaler = torch.amp.GradScaler("cuda")
for step in range(4):
    ours.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model.float()(batch[part].float()), target[part].float())
    if step == 1 and rank == 0:
        loss = loss * float("inf")  # one rank's gradients overflow: all skip this step, none hangs
    scaler.scale(loss).backward()
    scaler.step(ours)
    scaler.update()
for value in model.state_dict().values():
    assert torch.allclose(hvd.broadcast(value, root_rank=0).double(), value.double(), equal_nan=True)
"""

JOIN = """
for _ in range(3 + rank):
    hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum, name="late")
assert hvd.join() == size - 1
"""

END = """
assert planes() == PLANES, planes()
hvd.shutdown()
print("done")
"""


@pytest.mark.parametrize(
    "part", [COLLECTIVES, FENCES, TRAINING, JOIN], ids=["collectives", "fences", "training", "join"]
)
@pytest.mark.parametrize(("size", "planes"), [(1, ["local", "nccl"]), (1, ["gloo", "nccl"]), (2, ["gloo"])])
def test_on_one_gpu(tmp_path: Path, size: int, planes: list[str], part: str) -> None:
    code = START + f"PLANES = {planes!r}\n" + part + END
    if planes[0] == "local":  # a program that nothing has launched
        code = (
            "import os\nfor name in [n for n in os.environ if n.startswith('HVDGLOO_')]: del os.environ[name]\n" + code
        )
    with Job(size, code, tmp_path) as job:
        for ended in job.wait(50):
            assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr
        assert ("ranks 0 and 1 use the same GPU" in job.output(0).stderr) == (size == 2)


def test_the_host_if_it_is_asked_for(tmp_path: Path) -> None:
    code = START + "PLANES = ['gloo']\n" + COLLECTIVES + END
    with Job(1, code, tmp_path, HVDGLOO_GPU_OPERATIONS="gloo") as job:
        (ended,) = job.wait(50)
        assert ended.returncode == 0, ended.stderr


def test_nccl_that_cannot_be_had_is_an_error_that_says_why(tmp_path: Path) -> None:
    code = START + "hvd.allreduce(torch.ones(1, device=device))\n"
    with Job(2, code, tmp_path, HVDGLOO_GPU_OPERATIONS="nccl") as job:
        for ended in job.wait(50):
            assert ended.returncode == 1
            assert "ranks 0 and 1 use the same GPU, which NCCL refuses" in ended.stderr


def test_a_device_here_and_none_there(tmp_path: Path) -> None:
    code = (
        START
        + """
try:
    hvd.allreduce(torch.ones(2, device=device if rank else "cpu"), name="x")
except hvd.HorovodInternalError as error:
    assert "device type" in str(error), error
    assert hvd.allreduce(torch.ones(2, device=device), op=hvd.Sum).tolist() == [2.0, 2.0]
    print("done")
"""
    )
    with Job(2, code, tmp_path) as job:
        for ended in job.wait(50):
            assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


def test_pain_22_a_killed_rank_is_named(tmp_path: Path) -> None:
    code = (
        START
        + """
import os, signal
try:
    for step in range(10_000):
        hvd.allreduce(torch.ones(1 << 20, device=device), name="x")
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
except hvd.HorovodInternalError as error:
    assert "rank 1" in str(error), error
    print("done")
"""
    )
    with Job(2, code, tmp_path) as job:
        survivor, _ = job.wait(50)
        assert (survivor.returncode, survivor.stdout.strip()) == (0, "done"), survivor.stderr
