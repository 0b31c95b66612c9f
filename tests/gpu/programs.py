"""Programs that ranks run in the tests of this folder. With ``HVDGLOO_TEST_DEVICE=cpu`` the same programs run on the
CPU, which is how they themselves are tested without a GPU (``tests/processes/test_gpu_programs.py``)."""

from __future__ import annotations

START = """
import os, threading, time
import torch
import hvdgloo.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
on_cpu = os.environ.get("HVDGLOO_TEST_DEVICE") == "cpu"
if on_cpu:
    device = torch.device("cpu")
else:
    # Each rank its own GPU where there are enough.
    device = torch.device("cuda", hvd.local_rank() if torch.cuda.device_count() >= size else 0)
    torch.cuda.set_device(device)

def settle():
    if not on_cpu:
        torch.cuda.synchronize(device)

def planes():
    from hvdgloo._job import process
    return [backend.name for backend in process.current().engine._groups[0].backends]
"""

OWN_HOST = """
import os
os.environ["NCCL_HOSTID"] = f"host of {os.getpid()}"
"""
"""Comes before START: to NCCL, which otherwise refuses two ranks on one GPU, each rank is on a host of its own."""

SOCKETS = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""Variables with which such ranks reach each other."""

# torch's sanitizer sees the kernels only of threads that have entered its mode, which the data thread does here; and it
# knows only of events that were waited for, not of those that were found to have happened.
WATCHED = """
import torch.cuda._sanitizer
from hvdgloo._backends import gpu
mode = torch.cuda._sanitizer.cuda_sanitizer.dispatch
use_own_stream, has_happened = gpu.use_own_stream, gpu.has_happened
def use_own_stream_and_be_watched(device):
    mode.__enter__()
    use_own_stream(device)
def has_happened_and_is_noted(event):
    happened = has_happened(event)
    if happened:
        mode.event_handler._handle_event_synchronization(event.cuda_event)
    return happened
gpu.use_own_stream, gpu.has_happened = use_own_stream_and_be_watched, has_happened_and_is_noted
"""

COLLECTIVES = """
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
              torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64):
    tensor = (torch.arange(6, device=device).reshape(2, 3) + rank).to(dtype)
    total = sum(torch.arange(6, device=device).reshape(2, 3) + r for r in range(size)).to(dtype)
    result = hvd.allreduce(tensor, op=hvd.Sum)
    assert result.device == device and result.dtype is dtype
    assert result.tolist() == total.tolist(), (dtype, result)
    largest = (tensor.long() - rank + size - 1).to(dtype).t()
    assert hvd.allreduce(tensor.t(), op=hvd.Max).tolist() == largest.tolist(), dtype
    rows = (torch.arange(2 * size, device=device).reshape(2 * size, 1) + rank).to(dtype)
    even = sum(torch.arange(2 * size, device=device).reshape(2 * size, 1) + r for r in range(size)).to(dtype)
    assert hvd.reducescatter(rows, op=hvd.Sum).tolist() == even.tolist()[2 * rank : 2 * rank + 2], dtype
    assert hvd.reducescatter(tensor, op=hvd.Sum).tolist() == [part.tolist() for part in total.tensor_split(size)][rank]
for dtype in (torch.float32, torch.bool, torch.int16):
    tensor = (torch.arange(6, device=device).reshape(2, 3) + rank).to(dtype)
    every = [(torch.arange(6, device=device).reshape(2, 3) + r).to(dtype) for r in range(size)]
    assert torch.equal(hvd.allgather(tensor), torch.cat(every))
    assert torch.equal(hvd.broadcast(tensor, root_rank=size - 1), every[-1])
    if size <= 2:
        received, counts = hvd.alltoall(tensor[:size], splits=torch.ones(size, dtype=torch.int32))
        assert torch.equal(received, torch.stack([t[rank] for t in every])) and counts.tolist() == [1] * size
assert hvd.allreduce(torch.tensor([rank == 0, False], device=device), op=hvd.Max).tolist() == [True, False]
scaled = hvd.allreduce(torch.tensor([6, 7], device=device), op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
assert scaled.tolist() == [6 * size, 6 * size], scaled
mixed = hvd.grouped_allreduce([torch.ones(3, device=device), torch.ones(3), torch.ones(2, device=device).half()],
                              op=hvd.Sum)
assert [t.device.type for t in mixed] == [device.type, "cpu", device.type] and all((t == size).all() for t in mixed)
many = [torch.full((i + 1,), float(i), device=device) for i in range(200)]
for i, result in enumerate(hvd.grouped_allreduce(many, op=hvd.Sum)):
    assert (result == i * size).all()
same = hvd.allreduce(torch.ones(5, device=device), op=hvd.Adasum)
assert torch.allclose(same, torch.ones(5, device=device))
x = torch.ones(4, device=device, requires_grad=True)
hvd.allreduce(x * 3, op=hvd.Sum).sum().backward()
assert torch.equal(x.grad, torch.full((4,), 3.0 * size, device=device))
"""

UNEVEN = """
for counts in ([r + 1 for r in range(size)], [3 * (r == size - 1) for r in range(size)], [0] * size):
    own = torch.arange(3.0 * counts[rank], device=device).reshape(-1, 3) + rank
    whole = torch.cat([torch.arange(3.0 * n, device=device).reshape(-1, 3) + r for r, n in enumerate(counts)])
    assert torch.equal(hvd.allgather(own), whole)
    pair = hvd.grouped_allgather([own, own.half()])
    assert torch.equal(pair[0], whole) and torch.equal(pair[1], whole.half())
odd = torch.arange(2.0 * size + 1, device=device) + rank
total = sum(torch.arange(2.0 * size + 1, device=device) + r for r in range(size))
assert torch.equal(hvd.reducescatter(odd, op=hvd.Sum), total.tensor_split(size)[rank])
x = torch.arange(4.0 * size, device=device, requires_grad=True)
splits = torch.tensor([r + 1 if r < 3 else 3 for r in range(size)], device=device)  # on the GPU, too
received, counts = hvd.alltoall(x, splits=splits)
assert counts.device.type == "cpu" and counts.tolist() == [min(rank + 1, 3)] * size
((rank + 1.0) * received).sum().backward()
sent = [r + 1.0 for r, n in enumerate(splits.tolist()) for _ in range(n)]
assert x.grad.tolist() == sent + [0.0] * (4 * size - len(sent))
"""

# A long kernel is still writing the tensor when it is submitted; the submitting thread must not wait for it.
STREAMS = """
def work_on(stream):
    for _ in range(5):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 20, device=device)
            torch.cuda._sleep(200_000_000)
            tensor += rank + 1
            # This mode is the whole process's, and through the host the data thread waits rightly.
            torch.cuda.set_sync_debug_mode("default" if "shm" in PLANES[-1:] else "error")
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
            torch.cuda.set_sync_debug_mode("default")
            by_stream = os.environ.get("HVDGLOO_GPU_COMPLETION") == "stream"
            assert by_stream or not hvd.poll(handle)
            hvd.synchronize(handle)
            expected = float(size * (size + 1) // 2)
            assert (tensor == expected).all()
            gathered = hvd.allgather(tensor[:4])
            gathered += 1  # on this stream, right after another one has written it
            assert (gathered == expected + 1).all()
            del gathered, tensor  # whose memory is used again at once

if not on_cpu:
    hvd.allreduce(torch.ones(1, device=device))
    work_on(torch.cuda.current_stream())
    work_on(torch.cuda.Stream())
    # Another stream's tensor, for which the program makes its own stream wait.
    made, side = torch.zeros(1 << 20, device=device), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        made += rank + 1
    torch.cuda.current_stream().wait_stream(side)
    assert (hvd.allreduce(made, op=hvd.Sum) == size * (size + 1) // 2).all()
    # A stream that is current on a thread of the program's only; the main thread's is another.
    failed = []
    def on_a_thread():
        try:
            torch.cuda.set_device(device)
            work_on(side)
        except BaseException as error:
            failed.append(error)
    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join(50)
    assert not thread.is_alive() and not failed, failed
"""

# Each rank's tensors are on one GPU while another is its current one. Needs two GPUs.
ANOTHER_GPU = """
if not on_cpu:
    other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    hvd.allreduce(torch.ones(1, device=device))
    for _ in range(5):
        tensor = torch.zeros(1 << 20, device=device)
        torch.cuda._sleep(200_000_000)
        tensor += rank + 1
        with torch.cuda.device(other):
            summed = hvd.allreduce(tensor, op=hvd.Sum)
        assert summed.device == device
        assert (summed == size * (size + 1) // 2).all()
        del summed, tensor
"""

CAPTURE = """
if not on_cpu:
    tensor = torch.ones(4, device=device)
    hvd.allreduce(tensor)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            hvd.allreduce(tensor)
    except RuntimeError as error:
        assert "cannot be captured into a CUDA graph" in str(error), error
    else:
        raise AssertionError("a collective was captured")
    settle()
assert hvd.allreduce(torch.ones(4, device=device), op=hvd.Sum).tolist() == [float(size)] * 4
"""

# A graph is captured, in the strictest mode, while a collective is under way.
CAPTURE_BESIDE = """
if not on_cpu:
    hvd.allreduce(torch.ones(1, device=device))
    static, large, side = torch.ones(1024, device=device), torch.ones(1 << 24, device=device), torch.cuda.Stream()
    settle()
    for i in range(5):
        torch.cuda._sleep(200_000_000)
        handle = hvd.allreduce_async_(large, op=hvd.Average, name="beside")
        time.sleep(0.02)  # until the data thread has it; the delay on the GPU is several times as long
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="global")
            doubled = static * 2 + i
            graph.capture_end()
            graph.replay()
        hvd.synchronize(handle)
        side.synchronize()
        assert (doubled == 2 + i).all() and (large == 1).all()
"""

# Operations of random kinds and sizes on several streams, behind random delays, with memory that is used again at once.
STRESS = """
import contextlib, random
choose = random.Random(7)  # the same on every rank
streams = [None] if on_cpu else [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
def on(stream):
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
def check(handle, kind, i, stream):
    with on(stream):
        result = hvd.synchronize(handle)
        torch.full_like(result, -3e8)  # takes the memory that was just freed
        k = i % 5
        wanted = {"allreduce": (size * (size + 1) / 2 + size * k,) * 2, "allgather": (1 + k, size + k),
                  "broadcast": (1 + k,) * 2}[kind]
        assert (result.min().item(), result.max().item()) == wanted, (i, kind)
pending = []
for i in range(STEPS):
    count = choose.choice([1, 7, 1000, 1 << 16, 1 << 20, 3_000_001])
    kind = choose.choice(["allreduce", "allreduce", "allgather", "broadcast"])
    stream, cycles = choose.choice(streams), choose.choice([0, 0, 3_000_000, 30_000_000])
    with on(stream):
        torch.full((count,), -1e9, device=device)
        tensor = torch.empty(count, device=device)
        if cycles and not on_cpu:
            torch.cuda._sleep(cycles)
        tensor.fill_(float(rank + 1 + i % 5))
        if kind == "allreduce":
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
        elif kind == "allgather":
            handle = hvd.allgather_async(tensor)
        else:
            handle = hvd.broadcast_async(tensor, root_rank=0)
        del tensor
        torch.full((count,), -2e9, device=device)
    pending.append((handle, kind, i, stream))
    while len(pending) > choose.choice([0, 3, 8]):
        check(*pending.pop(0))
for each in pending:
    check(*each)
"""
"""With STEPS."""

CHANNELS_LAST = """
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), hvd.SyncBatchNorm(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
model = model.to(device, memory_format=torch.channels_last)
plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(4):
    optimizer.zero_grad()
    images = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
    model(images.to(memory_format=torch.channels_last)).square().mean().backward()
    optimizer.step()
assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
for name, value in model.state_dict().items():
    assert torch.equal(hvd.broadcast(value, root_rank=0), value), name
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
    ((model(batch[part]) - target[part]) ** 2).mean().backward()
    ours.step()
    theirs.zero_grad()
    ((plain(batch) - target) ** 2).mean().backward()
    theirs.step()
for name, value in plain.state_dict().items():
    assert torch.allclose(model.state_dict()[name].double(), value.double(), rtol=1e-5, atol=1e-8), name
hvd.broadcast_optimizer_state(ours, root_rank=0)

# Gradients accumulated over two backward passes, and sent as float16.
torch.manual_seed(4)
small, alone = torch.nn.Linear(8, 3).to(device), torch.nn.Linear(8, 3).to(device)
alone.load_state_dict(small.state_dict())
ours = hvd.DistributedOptimizer(torch.optim.SGD(small.parameters(), lr=0.1), small.named_parameters(),
                                compression=hvd.Compression.fp16, backward_passes_per_step=2)
theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
for _ in range(3):
    ours.zero_grad()
    for half in (slice(8 * rank, 8 * rank + 4), slice(8 * rank + 4, 8 * rank + 8)):
        torch.nn.functional.mse_loss(small(batch[half].float()), target[half].float()).backward()
    ours.step()
    theirs.zero_grad()
    (2 * torch.nn.functional.mse_loss(alone(batch.float()), target.float())).backward()
    theirs.step()
for mine, value in zip(small.parameters(), alone.parameters()):
    assert torch.allclose(mine, value, rtol=1e-2, atol=1e-3)

model = model.float()
ours = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
scaler = torch.amp.GradScaler(device.type)
scales, weights = [scaler.get_scale()], []
for step in range(4):
    ours.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16 if on_cpu else torch.float16):
        loss = torch.nn.functional.mse_loss(model(batch[part].float()).float(), target[part].float())
    if step == 1 and rank == 0:
        loss = loss * float("inf")  # one rank's gradients overflow: all skip this step, none hangs
    scaler.scale(loss).backward()
    scaler.step(ours)
    scaler.update()
    scales.append(scaler.get_scale())
    weights.append(model[0].weight.detach().clone())
assert scales[2] == scales[1] / 2, scales  # the infinite step was noticed on every rank,
assert torch.equal(weights[1], weights[0])  # and changed nothing;
assert not torch.equal(weights[3], weights[1])  # a later one did.
for name, value in model.state_dict().items():
    assert torch.isfinite(value).all(), name
    assert torch.allclose(hvd.broadcast(value, root_rank=0).double(), value.double()), name
"""

SETS = """
sets = [hvd.add_process_set(hvd.ProcessSet(ranks)) for ranks in ([0], list(range(size)), list(range(1, size)))
        if len(ranks) not in (0, size)]
for _ in range(20):
    handles = [hvd.allreduce_async(torch.full((1 << 16,), rank + 1.0, device=device), op=hvd.Sum, process_set=each,
                                   name=f"set {each.process_set_id}") for each in sets if each.included()]
    whole = hvd.allreduce(torch.ones(1 << 16, device=device), op=hvd.Sum)
    assert (whole == size).all()
    for each, handle in zip([each for each in sets if each.included()], handles):
        assert (hvd.synchronize(handle) == sum(r + 1.0 for r in each.ranks)).all()
"""

JOIN = """
for _ in range(3 + rank):
    hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum, name="late")
assert hvd.join() == size - 1
"""

COMPILED = """
torch.manual_seed(1)
plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
model.load_state_dict(plain.state_dict())
ours = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
compiled = torch.compile(model, backend="aot_eager" if on_cpu else "inductor")
batch = torch.randn(4 * size, 64, generator=torch.Generator().manual_seed(2)).to(device)
for _ in range(4):
    ours.zero_grad()
    compiled(batch[4 * rank : 4 * rank + 4]).square().mean().backward()
    ours.step()
    theirs.zero_grad()
    plain(batch).square().mean().backward()
    theirs.step()
for mine, value in zip(model.parameters(), plain.parameters()):
    assert torch.allclose(mine, value, rtol=1e-3, atol=1e-4)
"""

ELASTIC = """
import signal
state = hvd.elastic.TorchState(step=0, total=torch.zeros((), device=device))
@hvd.elastic.run
def train(state):
    while state.step < 20:
        if hvd.rank() == 1 and state.step == 10 and hvd.size() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        state.total = state.total + hvd.allreduce(torch.ones(1 << 16, device=device), op=hvd.Sum, name="x")[0]
        state.step += 1
        state.commit()
    return hvd.size(), state.total.item()
print(*train(state))
"""

END = """
if not on_cpu:
    assert planes() == PLANES, planes()
hvd.shutdown()
print("done")
"""

LOST = """
import signal
hvd.allreduce(torch.ones(1, device=device)) if WHEN != "connecting" else hvd.barrier()
try:
    if WHEN == "connecting" and rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(10_000):
        if WHEN == "allreduce" and rank == 1 and step == 5:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if WHEN == "shutdown" and step == 5:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            break
        hvd.allreduce(torch.ones(1 << 22, device=device), name="x")
except hvd.HorovodInternalError as error:
    assert "rank 1" in str(error), error
hvd.shutdown()
print("done")
"""
"""With WHEN: "connecting", "allreduce" or "shutdown"."""

RAISES = """
import sys
hvd.allreduce(torch.ones(1, device=device))
try:
    for step in range(10_000):
        if rank == 1 and step == 20:
            raise ValueError("the program's own")
        hvd.allreduce(torch.ones(1 << 22, device=device), name="x")
except hvd.HorovodInternalError as error:
    assert "rank 1" in str(error), error
    print("done", flush=True)
    os._exit(0)
"""

APART = """
hvd.allreduce(torch.ones(1 << 20, device=device))
settle()
if rank:
    time.sleep(SECONDS)  # what is tested is that the ranks' ends lie apart
hvd.shutdown()
print("done")
"""
"""With SECONDS between the ends of the first rank and of the others."""

AGAIN = """
for turn in range(3):
    if turn:
        hvd.init()
    assert (hvd.allreduce(torch.ones(1 << 16, device=device), op=hvd.Sum) == size).all()
    hvd.barrier()
    hvd.shutdown()
print("done")
"""

LOADER = """
hvd.allreduce(torch.ones(1, device=device))
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.tensor([float(i)])
for batch in torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2, pin_memory=not on_cpu):
    hvd.allreduce(batch.to(device, non_blocking=True))
"""

PARTS = {
    "collectives": COLLECTIVES + UNEVEN + SETS,
    "training": TRAINING + CHANNELS_LAST,
    "streams": STREAMS + CAPTURE + CAPTURE_BESIDE + "STEPS = 120\n" + STRESS,
    "join": LOADER + JOIN,
}
"""Programs of these tests' jobs: a few long programs, since most of a short one's time is its start. With PLANES."""

THROUGHPUT = """
import json
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def model():
    torch.manual_seed(1)
    layers = [layer for _ in range(16) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers).to(device)

def seconds(step):
    for _ in range(5):
        step()
    settle()
    begin = time.perf_counter()
    for _ in range(20):
        step()
    settle()
    return (time.perf_counter() - begin) / 20

batch = torch.randn(64, 2048, device=device)
ours = model()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=1e-3), ours.named_parameters())

def step_of_ours():
    optimizer.zero_grad()
    ours(batch).square().mean().backward()
    optimizer.step()

steps = {"hvdgloo": step_of_ours}
if size > 1:
    store = dist.FileStore(os.path.join(os.environ["JOB_FOLDER"], "store"), size)
    dist.init_process_group("gloo" if on_cpu else "nccl", store=store, rank=rank, world_size=size)
    theirs = DistributedDataParallel(model(), device_ids=None if on_cpu else [device.index])
    plain = torch.optim.SGD(theirs.parameters(), lr=1e-3)

    def step_of_theirs():
        plain.zero_grad()
        theirs(batch).square().mean().backward()
        plain.step()

    steps["DDP"] = step_of_theirs
# In turns, so that neither alone has warm libraries and memory; the best of three.
rounds = [{name: seconds(step) for name, step in steps.items()} for _ in range(3)]
times = {name: min(each[name] for each in rounds) for name in steps}
if size > 1:
    dist.destroy_process_group()
if rank == 0:
    with open(os.path.join(os.environ["JOB_FOLDER"], "times.json"), "w") as file:
        json.dump(times, file)
"""
