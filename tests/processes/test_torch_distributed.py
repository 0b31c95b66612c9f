"""torch.distributed with the backend hvdgloo: real processes, whose ranks compute for themselves what must come out."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.job import Ended, Job
from tests.support.launching import clean_environment, run_command, wait_for

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

HEAD = """
import functools, os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import hvdgloo.torch.distributed
rank, size = int(os.environ["HVDGLOO_RANK"]), int(os.environ["SIZE"])

def begin(**more):
    options = {"timeout": timedelta(seconds=20), **more}
    store = "file://" + os.environ["JOB_FOLDER"] + "/store"
    dist.init_process_group("hvdgloo", init_method=store, rank=rank, world_size=size, **options)

def given(of, count, dtype, number=0):
    \"\"\"The tensor that a rank gives: anyone can make it.\"\"\"
    return _given(of, count, dtype, number).clone()

@functools.lru_cache(200)
def _given(of, count, dtype, number):
    generator = torch.Generator().manual_seed(1000 * of + number)
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(count, generator=generator, dtype=torch.float64) * 10).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 5, (count,), generator=generator).to(dtype)

def inputs(count, dtype, number=0, ranks=None):
    return [given(of, count, dtype, number) for of in (range(size) if ranks is None else ranks)]

def folded(tensors, combine):
    \"\"\"Combined in the order of ranks; half types in float32, and rounded once.\"\"\"
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = tensors[0].to(wide)
    for tensor in tensors[1:]:
        result = combine(result, tensor.to(wide))
    return result.to(dtype)
"""


def run(size: int, code: str, folder: Path, **environ: str) -> list[str]:
    """Run ranks that must succeed; returns what each has printed."""
    ended = ended_of(size, code, folder, **environ)
    assert [worker.returncode for worker in ended] == [0] * size, [worker.stderr for worker in ended]
    return [worker.stdout for worker in ended]


def ended_of(size: int, code: str, folder: Path, **environ: str) -> list[Ended]:
    with Job(size, HEAD + code, folder, SIZE=str(size), **environ) as job:
        return job.wait(55)


EXTENDED = pytest.mark.extended


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=EXTENDED)])
def test_reductions_follow_the_order_of_ranks(size: int, tmp_path: Path) -> None:
    """Of every element type and size: one that goes at once, one that the segment grows for, and one in many rounds."""
    code = """
begin()
combine = {"SUM": torch.add, "MIN": torch.minimum, "MAX": torch.maximum, "PRODUCT": torch.mul}
integers = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, *integers):
    for count in (1, 1000, 40_000, 1_200_000):
        if count in (1, 1_200_000) and dtype not in (torch.float32, torch.bfloat16):
            continue
        for name, function in combine.items():
            tensors = inputs(count, dtype)
            if name == "PRODUCT" and dtype not in (torch.float32, torch.int64):
                continue
            own = tensors[rank].clone()
            dist.all_reduce(own, getattr(dist.ReduceOp, name))
            assert torch.equal(own, folded(tensors, function)), (dtype, count, name)
            block = torch.empty(count, dtype=dtype)
            many = [given(of, count * size, dtype) for of in range(size)]
            dist.reduce_scatter_tensor(block, many[rank], getattr(dist.ReduceOp, name))
            expected = folded([whole[rank * count : (rank + 1) * count] for whole in many], function)
            assert torch.equal(block, expected), (dtype, count, name)
        if dtype.is_floating_point:
            own = inputs(count, dtype)[rank]
            dist.all_reduce(own, dist.ReduceOp.AVG)
            mean = folded([t.float() if dtype.itemsize == 2 else t for t in inputs(count, dtype)], torch.add) / size
            assert torch.allclose(own, mean.to(dtype), rtol=2**-7 if dtype is torch.bfloat16 else 2**-9), (dtype, count)
premultiplied = torch.ones(3) + rank
dist.all_reduce(premultiplied, dist._make_nccl_premul_sum(0.5))
assert premultiplied.tolist() == 3 * [sum(0.5 * (1 + of) for of in range(size))]
for op, function in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)):
    for dtype in (torch.int32, torch.uint8, torch.bool):
        own = inputs(1000, dtype)[rank]
        dist.all_reduce(own, getattr(dist.ReduceOp, op))
        assert torch.equal(own, folded(inputs(1000, dtype), function)), (op, dtype)
pair = [inputs(1000, torch.int32)[rank], inputs(10, torch.int32, 1)[rank]]
dist.all_reduce_coalesced(pair, dist.ReduceOp.BOR)
assert torch.equal(pair[0], folded(inputs(1000, torch.int32), torch.bitwise_or))
assert torch.equal(pair[1], folded(inputs(10, torch.int32, 1), torch.bitwise_or))
for dtype in (torch.complex64, torch.complex128):
    own = inputs(1000, dtype)[rank]
    dist.all_reduce(own)
    assert torch.equal(own, folded(inputs(1000, dtype), torch.add))
flags = torch.tensor([True, rank == 0, False])
dist.all_reduce(flags, dist.ReduceOp.MAX)
assert flags.tolist() == [True, True, False]
dist.destroy_process_group()
"""
    run(size, code, tmp_path)


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=EXTENDED)])
def test_every_other_collective_moves_the_right_bytes(size: int, tmp_path: Path) -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
begin()
last = size - 1
for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16):
    for count in (1, 1001, 70_000):
        same = lambda a, b: torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        own, all_given = given(rank, count, dtype), inputs(count, dtype)
        tensor = own.clone()
        dist.broadcast(tensor, last)
        assert same(tensor, all_given[last])
        whole = torch.empty(size * count, dtype=dtype)
        dist.all_gather_into_tensor(whole, own)
        assert same(whole, torch.cat(all_given))
        parts = [torch.empty(count, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, own)
        assert all(same(part, tensor) for part, tensor in zip(parts, all_given))
        dist.gather(own, parts if rank == last else None, last)
        assert rank != last or all(same(part, tensor) for part, tensor in zip(parts, all_given))
        block = torch.empty(count, dtype=dtype)
        dist.scatter(block, inputs(count, dtype, 7) if rank == last else None, last)
        assert same(block, inputs(count, dtype, 7)[rank])
        given_to = [given(rank, count, dtype, number) for number in range(size)]
        dist.all_to_all(parts, given_to)
        assert all(same(part, given(of, count, dtype, rank)) for of, part in enumerate(parts))
        dist.all_to_all_single(whole, torch.cat(given_to))
        assert same(whole, torch.cat([given(of, count, dtype, rank) for of in range(size)]))
splits = [rank + of for of in range(size)]  # of two dimensions, some of them empty
rows = torch.arange(sum(splits) * 3.0).view(-1, 3) + 100 * rank
out = torch.empty(sum(splits), 3)
dist.all_to_all_single(out, rows, splits, splits)
at = [sum(of + to for to in range(rank)) for of in range(size)]
expected = [torch.arange(sum(of + to for to in range(size)) * 3.0).view(-1, 3) + 100 * of for of in range(size)]
blocks = [whole[begin : begin + rank + of] for of, (begin, whole) in enumerate(zip(at, expected))]
assert torch.equal(out, torch.cat(blocks))
root = torch.full((3,), 1.0 + rank)
dist.reduce(root, 0)
assert root.tolist() == 3 * [size * (size + 1) / 2 if rank == 0 else 1.0 + rank]
pair = [torch.full((2,), 1.0), torch.full((3, 2), float(rank))]
dist.all_reduce_coalesced(pair)
assert pair[0].tolist() == 2 * [size] and pair[1].unique().tolist() == [size * (size - 1) / 2]
with dist._coalescing_manager(async_ops=True) as manager:
    tensors = [torch.ones(count) for count in (1, 10, 70_000)]
    for tensor in tensors:
        dist.all_reduce(tensor)
manager.wait()
assert all(tensor.unique().tolist() == [size] for tensor in tensors)
strided = torch.arange(12.0).view(3, 4).t()[:, :2]
dist.all_reduce(strided)
assert torch.equal(strided, size * torch.arange(12.0).view(3, 4).t()[:, :2])
dist.all_reduce(torch.empty(0))
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
assert [len(each["text"]) for each in objects] == [1000 * of for of in range(size)]
dist.barrier()
alone = dist.new_group([0])
if rank == 0:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=alone)
    assert tensor.tolist() == [1, 1, 1]
dist.destroy_process_group()
"""
    run(size, code, tmp_path)


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=EXTENDED)])
def test_overlapping_groups_and_asynchronous_calls_do_not_wait_for_each_other(size: int, tmp_path: Path) -> None:
    """Each rank waits for its operations in an order of its own; a future's callback calls a collective itself."""
    code = """
import itertools, random
begin()
sets = [list(each) for number in range(2, size + 1) for each in itertools.combinations(range(size), number)]
groups = [(members, dist.new_group(members)) for members in sets]
order, own_order = random.Random(5), random.Random(rank)
for turn in range(6):
    works = []
    for members, group in order.sample(groups, len(groups)):
        count = order.choice([1, 300, 30_000, 300_000])
        if rank not in members:
            continue
        tensor = given(rank, count, torch.float32, turn)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        works.append((work, tensor, folded(inputs(count, torch.float32, turn, members), torch.add)))
    for work, tensor, expected in own_order.sample(works, len(works)):
        if own_order.random() < 0.3:
            work.get_future().wait()
        elif own_order.random() < 0.3:
            while not work.is_completed():
                time.sleep(0)
        work.wait()
        assert torch.equal(tensor, expected)
tensor = torch.ones(2)

def again(future):
    (result,) = future.value()
    dist.all_reduce(result)
    return result

assert dist.all_reduce(tensor, async_op=True).get_future().then(again).wait().tolist() == 2 * [size**2]
dist.destroy_process_group()
"""
    run(size, code, tmp_path)


def test_each_rank_chooses_for_itself_whether_it_waits_at_once(tmp_path: Path) -> None:
    """A caller that waits at once carries a small operation out in its own thread, and must meet those that do not."""
    code = """
import random
begin()
own_choice = random.Random(rank)

def call(function, *args):
    work = function(*args, async_op=own_choice.random() < 0.5)
    if work is not None:
        work.wait()

for turn in range(15):
    for count in (1, 1000, 4097, 16_384):
        own = given(rank, count, torch.float32, turn)
        call(dist.all_reduce, own)
        assert torch.equal(own, folded(inputs(count, torch.float32, turn), torch.add)), (turn, count)
        each = count // size + 1
        many, block = inputs(each * size, torch.float32, turn), torch.empty(each)
        call(dist.reduce_scatter_tensor, block, many[rank])
        assert torch.equal(block, folded([w[rank * each :][:each] for w in many], torch.add)), (turn, count)
        gathered = torch.empty(count * size)
        call(dist.all_gather_into_tensor, gathered, given(rank, count, torch.float32, turn))
        assert torch.equal(gathered, torch.cat(inputs(count, torch.float32, turn))), (turn, count)
        told = given(rank, count, torch.float32, turn)
        call(dist.broadcast, told, turn % size)
        assert torch.equal(told, given(turn % size, count, torch.float32, turn)), (turn, count)
    work = dist.barrier(async_op=own_choice.random() < 0.5)
    if work is not None:
        work.wait()
dist.destroy_process_group()
"""
    run(4, code, tmp_path)


def test_messages_find_their_receives_by_source_and_tag(tmp_path: Path) -> None:
    code = """
begin()
others = [of for of in range(size) if of != rank]
for count in (1, 30_000, 2_000_000):
    sends = [dist.isend(given(rank, count, torch.float32, to), to) for to in others]
    for of in reversed(others):
        tensor = torch.empty(count)
        dist.recv(tensor, of)
        assert torch.equal(tensor, given(of, count, torch.float32, rank))
    for send in sends:
        send.wait()
next, previous = (rank + 1) % size, (rank - 1) % size
sends = [dist.isend(torch.full((tag + 1,), float(tag)), next, tag=tag) for tag in range(5)]
tensors = {tag: torch.empty(tag + 1) for tag in (3, 0, 4, 1, 2)}
receives = {tag: dist.irecv(tensor, previous, tag=tag) for tag, tensor in tensors.items()}
for tag in (4, 3, 2, 1, 0):
    receives[tag].wait()
    assert tensors[tag].tolist() == (tag + 1) * [float(tag)]
for send in sends:
    send.wait()
if rank == 0:
    found = set()
    for _ in others:
        tensor = torch.empty(1)
        source = dist.recv(tensor, tag=9)
        found.add((source, tensor.item()))
    assert found == {(1, 1.0), (2, 2.0)}, found
else:
    dist.send(torch.tensor([float(rank)]), 0, tag=9)
ops = [dist.P2POp(dist.isend, torch.ones(3) * rank, next), dist.P2POp(dist.irecv, received := torch.empty(3), previous)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert received.tolist() == 3 * [previous]
dist.barrier()
if rank == 0:
    dist.send(torch.ones(4), 1)
elif rank == 1:
    try:
        dist.recv(torch.empty(3), 0)
    except dist.DistBackendError as error:
        assert "rank 0 sent 16 bytes with tag 0, and recv was given a tensor of 12" in str(error), error
    else:
        raise AssertionError("a message of another size was received")
dist.destroy_process_group()
"""
    run(3, code, tmp_path)


@pytest.mark.parametrize("how", ["small", "large", "future", "recv"])
def test_a_killed_rank_is_an_error_that_names_it_within_a_second(how: str, tmp_path: Path) -> None:
    code = f"""
how = {how!r}
begin()
small, large = torch.ones(4), torch.ones(3_000_000)
dist.all_reduce(small)
dist.all_reduce(large)
if how == "recv":
    dist.send(small, 0) if rank else dist.recv(small, 1)
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    if how == "small":
        dist.all_reduce(small)
    elif how == "large":
        dist.all_reduce(large)
    elif how == "future":
        dist.all_reduce(large, async_op=True).get_future().wait()
    else:
        dist.recv(small, 1)
except Exception as error:
    assert time.monotonic() - began < 1
    print(type(error).__name__, error)
try:
    dist.all_reduce(small)
except dist.DistBackendError as error:
    print("and then", error)
"""
    ended = ended_of(2, code, tmp_path)
    assert [each.returncode for each in ended] == [0, -signal.SIGKILL], ended[0].stderr
    first, then = ended[0].stdout.splitlines()
    # A future tells its waiter in torch's own class.
    assert re.search(r"rank 1 \(host \S+, pid \d+\) has ended", first), first
    assert first.startswith("DistBackendError") or how == "future"
    assert "rank 1" in then


def test_a_rank_that_is_killed_in_the_middle_of_its_message_is_an_error_as_well(tmp_path: Path) -> None:
    code = """
begin(timeout=timedelta(seconds=10))
tensor = torch.ones(30_000_000)  # many times the segment's size
if rank:
    dist.send(tensor[:1], 0)
    dist.isend(tensor, 0)  # as much as there is room for
    os.kill(os.getpid(), signal.SIGKILL)
dist.recv(tensor[:1], 1)
for call in (lambda: dist.recv(tensor, 1), lambda: dist.irecv(tensor, 1).get_future().wait()):
    try:
        call()
    except Exception as error:
        print(error, flush=True)
"""
    ended = ended_of(2, code, tmp_path)
    assert [each.returncode for each in ended] == [0, -signal.SIGKILL], ended[0].stderr
    lines = [line for line in ended[0].stdout.splitlines() if "hvdgloo" in line]
    assert len(lines) == 2, ended[0].stdout
    assert all(re.search(r"messages from rank 1 to rank 0 .* rank 1 \(host \S+, pid \d+\) has ended", x) for x in lines)


def test_ranks_that_call_different_collectives_get_an_error_that_names_both(tmp_path: Path) -> None:
    code = """
begin()
for name, call in (
    ("kind", lambda group: dist.all_reduce(torch.ones(4), group=group) if rank else dist.barrier(group)),
    ("count", lambda group: dist.all_reduce(torch.ones(4 + rank), group=group)),
    ("dtype", lambda group: dist.all_reduce(torch.ones(4, dtype=[torch.int32, torch.float32][rank]), group=group)),
    ("op", lambda group: dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group=group)),
    ("average", lambda group: dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.AVG][rank], group)),
    ("root", lambda group: dist.broadcast(torch.ones(4), rank, group=group)),
    ("large", lambda group: dist.all_reduce(torch.ones(3_000_000 + rank), group=group)),
):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    try:
        call(group)
        dist.barrier(group)
    except dist.DistBackendError as error:
        print(name, error)
    else:
        print(name, "no error")
"""
    outputs = run(2, code, tmp_path)
    for output in outputs:
        lines = dict(line.split(" ", 1) for line in output.splitlines())
        assert list(lines) == ["kind", "count", "dtype", "op", "average", "root", "large"], output
    said = {
        name: [text for output in outputs for text in re.findall(rf"^{name} (.*)", output, re.M)]
        for name in ("kind", "count", "dtype", "op", "average", "root", "large")
    }
    for name, calls in {
        "kind": ("barrier", "all_reduce(SUM, 4 x float32)"),
        "count": ("all_reduce(SUM, 4 x float32)", "all_reduce(SUM, 5 x float32)"),
        "dtype": ("all_reduce(SUM, 4 x int32)", "all_reduce(SUM, 4 x float32)"),
        "op": ("all_reduce(SUM, 4 x float32)", "all_reduce(MAX, 4 x float32)"),
        "average": ("all_reduce(SUM, 4 x float32)", "all_reduce(AVG, 4 x float32)"),
        "root": ("broadcast(16 bytes, root 0)", "broadcast(16 bytes, root 1)"),
        "large": ("all_reduce(SUM, 3000000 x float32)", "all_reduce(SUM, 3000001 x float32)"),
    }.items():
        for text in said[name]:
            assert all(re.search(rf"rank {rank} called {re.escape(calls[rank])}", text) for rank in (0, 1)), text


def test_a_late_rank_is_warned_of_and_then_an_error_that_names_it(tmp_path: Path) -> None:
    code = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
begin(timeout=timedelta(seconds=2))
dist.all_reduce(torch.ones(3))
if rank == 0:
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        print(error)
    open(os.environ["JOB_FOLDER"] + "/over", "w").close()
while not os.path.exists(os.environ["JOB_FOLDER"] + "/over"):
    time.sleep(0.01)
"""
    outputs = run(2, code, tmp_path, HVDGLOO_STALL_CHECK_TIME_SECONDS="0.5")
    warning, error = outputs[0].splitlines()
    assert re.search(
        r"all_reduce\(SUM, 3 x float32\) in the default process group has waited for rank 1 \(host", warning
    )
    doing = r"whose process is running and last called all_reduce\(SUM, 3 x float32\) in this group, 2\.\d s ago"
    assert re.search(rf"rank 1 \(host \S+, pid \d+\), {doing}, did not come within the timeout of 2 s", error), error


ABSENT = re.compile(
    r"rank 1 \(host \S+, pid \d+, which is running\) did not call this group's first operation within the timeout of "
    "1 s"
)


def test_ranks_that_never_call_a_group_s_first_operation_are_named(tmp_path: Path) -> None:
    code = """
begin(timeout=timedelta(seconds=1))
if rank != 1:
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        print(error, flush=True)
    open(f"{os.environ['JOB_FOLDER']}/over{rank}", "w").close()
while not all(os.path.exists(f"{os.environ['JOB_FOLDER']}/over{of}") for of in (0, 2)):
    time.sleep(0.01)  # a rank that has ended is another matter
"""
    outputs = run(3, code, tmp_path)
    for rank in (0, 2):
        assert ABSENT.search(outputs[rank]), outputs


def test_timeouts_of_a_call_and_of_a_wait_hold_for_a_group_s_first_operation_as_well(tmp_path: Path) -> None:
    code = """
begin(timeout=timedelta(seconds=50))
options = dist.BarrierOptions()
options.timeout = timedelta(seconds=1)
if rank == 0:
    for call in (
        lambda: dist.new_group([0, 1]).barrier(options).wait(),
        lambda: dist.new_group([0, 1]).barrier(timeout=timedelta(seconds=1)).wait(),
    ):
        began = time.monotonic()
        try:
            call()
        except dist.DistBackendError as error:
            print(error, flush=True)
        assert time.monotonic() - began < 10
    work = dist.all_reduce(torch.ones(1), async_op=True)
    try:
        work.wait(timedelta(seconds=0.5))
    except dist.DistBackendError as error:
        print(error, flush=True)
    assert time.monotonic() - began < 15
    open(os.environ["JOB_FOLDER"] + "/over", "w").close()
    work.wait()
else:
    dist.new_group([0, 1]), dist.new_group([0, 1])
    while not os.path.exists(os.environ["JOB_FOLDER"] + "/over"):
        time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
"""
    outputs = run(2, code, tmp_path)
    assert "has not ended within this wait's timeout" in outputs[0], outputs
    assert len(ABSENT.findall(outputs[0])) == 2, outputs


def test_a_monitored_barrier_names_the_ranks_that_are_missing_and_leaves_the_group_as_it_is(tmp_path: Path) -> None:
    code = """
begin(timeout=timedelta(seconds=50))
group = dist.group.WORLD
def reached(**options):
    try:
        group.monitored_barrier(**options)
    except dist.DistBackendError as error:
        print(error, flush=True)
    else:
        print("passed", flush=True)
reached()  # the group's first call
if rank in (0, 3):
    reached(timeout=timedelta(seconds=0.5))
dist.all_reduce(tensor := torch.ones(1))
assert tensor.item() == size
if rank == 0:
    reached(timeout=0.2, wait_all_ranks=True)
dist.barrier()
if rank != 0:
    reached(timeout=0.2)  # too late for rank 3's first failure, and for all of the second
"""
    outputs = run(4, code, tmp_path)
    lines = [output.splitlines() for output in outputs]
    assert all(of_one[0] == "passed" for of_one in lines), outputs
    assert "Rank 1 failed to pass monitoredBarrier in 500 ms" in lines[0][1]
    assert "Ranks 1, 2, 3 failed to pass monitoredBarrier in 200 ms" in lines[0][2]
    reached = (
        "Rank 3 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
    )
    assert reached in lines[3][1], outputs
    assert "Rank 1 failed to pass" in lines[3][1], outputs
    assert "Rank 1 failed to pass" in lines[1][1], outputs
    assert "Ranks 1, 2, 3 failed to pass" in lines[3][2], outputs


def test_groups_leave_nothing_behind_and_can_be_made_again(tmp_path: Path) -> None:
    code = """
def held():
    maps = [line for line in open("/proc/self/maps") if "hvdgloo" in line]
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    fds = [os.readlink(link) for link in links if os.path.islink(link)]
    return len(maps), len([fd for fd in fds if "memfd" in fd or "pidfd" in fd]), threading.active_count()

def once(number):
    store = "file://" + os.environ["JOB_FOLDER"] + f"/store{number}"
    dist.init_process_group("hvdgloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    group = dist.new_group()
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.all_reduce(tensor, group=group)
    (dist.send if rank else dist.recv)(tensor, 1 - rank)
    assert tensor[0] == size**2
    dist.barrier()
    dist.destroy_process_group()

once(0)
before = held()
for number in range(1, 4):
    once(number)
assert held() == before == (0, 0, 1), (held(), before)
"""
    run(2, code, tmp_path)


def test_a_forked_child_has_no_part_in_its_parent_s_groups(tmp_path: Path) -> None:
    code = """
begin()
dist.all_reduce(torch.ones(2), async_op=True).wait()
child = os.fork()
if child == 0:
    try:
        dist.all_reduce(torch.ones(2))
    except dist.DistBackendError as error:
        print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.tolist() == [2, 2]
dist.destroy_process_group()
"""
    outputs = run(2, code, tmp_path)
    assert all("belongs to this process's parent" in output for output in outputs), outputs


def test_tensors_without_memory_on_the_cpu_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    code = """
begin()
freed = torch.ones(4)
freed.untyped_storage().resize_(0)
for tensor, text in (
    (torch.ones(2, device="meta"), "a meta tensor has no values"),
    (torch.eye(3).to_sparse(), "send tensor.to_dense()"),
    (freed, "memory has been freed"),
):
    for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.all_gather([t, t], t)):
        try:
            call(tensor)
        except (ValueError, RuntimeError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{text}: it was sent")
for call, text in (
    (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND), "BAND, BOR and BXOR are for integers"),
    (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)), "it can move them unchanged"),
):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.tolist() == [2, 2]
dist.destroy_process_group()
"""
    run(2, code, tmp_path)


def test_importing_torch_is_enough_and_imports_nothing_more(tmp_path: Path) -> None:
    code = """
import sys, torch
import torch.distributed as dist
assert dist.Backend.HVDGLOO == "hvdgloo"
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("hvdgloo", "msgspec", "requests", "flask")))
"""
    done = run_command([sys.executable, "-c", code], env=clean_environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['hvdgloo', 'hvdgloo._torch_backend', 'hvdgloo.version']"
    off = run_command(
        [sys.executable, "-c", "import torch.distributed as dist\nprint(hasattr(dist.Backend, 'HVDGLOO'))"],
        env={**clean_environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cwd=tmp_path,
    )
    assert off.stdout.split() == ["False"], off.stderr


def test_a_program_that_says_gloo_gets_hvdgloo_where_that_is_asked_for(tmp_path: Path) -> None:
    """And only where gloo is a group's only backend. The log says so, once."""
    code = """
import os, sys
import torch, torch.distributed as dist
rank = int(os.environ["HVDGLOO_RANK"])
store = "file://" + os.environ["JOB_FOLDER"] + "/store"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.monitored_barrier()
print(dist.get_backend(), type(dist.group.WORLD).__name__, type(dist.new_group()).__name__, tensor.tolist())
print(type(dist.new_group(backend="cpu:gloo,cuda:gloo")).__name__)
dist.destroy_process_group()
"""
    with Job(2, code, tmp_path, fresh=True, HVDGLOO_AS_GLOO="1", HVDGLOO_LOG_LEVEL="info") as job:
        ended = job.wait()
    for each in ended:
        assert each.returncode == 0, each.stderr
        assert each.stderr.count("groups of the backend gloo are made by hvdgloo") == 1, each.stderr
        first, other = each.stdout.splitlines()
        assert first == "gloo HvdglooProcessGroup HvdglooProcessGroup [2.0, 2.0, 2.0]"
        assert other in ("HvdglooProcessGroup", "ProcessGroup")


def interrupted(code: str, folder: Path) -> str:
    """Run two ranks, of which rank 0 is interrupted by Ctrl-C once it has printed "waits"; returns what it printed."""
    with Job(2, HEAD + code, folder, SIZE="2") as job:
        wait_for(lambda: "waits" in job.output(0).stdout, 20)
        os.kill(job.workers[0].pid, signal.SIGINT)
        ended = job.succeed()
    assert "interrupted\n" in ended[0].stdout, ended[0]
    assert "interrupted by KeyboardInterrupt" in ended[0].stdout
    return ended[0].stdout


AN_INTERRUPTED_CALL = """
def call():
    try:
        dist.all_reduce(torch.ones(2))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except dist.DistBackendError as error:
        print(error, flush=True)

def wait_for_the_end():
    while not os.path.exists(os.environ["JOB_FOLDER"] + "/over"):
        time.sleep(0.01)
    os._exit(0)

def end():
    open(os.environ["JOB_FOLDER"] + "/over", "w").close()

begin()
"""


def test_ctrl_c_in_a_wait_ends_it_and_the_group(tmp_path: Path) -> None:
    code = """
dist.all_reduce(torch.ones(2))
if rank == 1:
    wait_for_the_end()
print("waits", flush=True)
call()
call()
end()
"""
    printed = interrupted(AN_INTERRUPTED_CALL + code, tmp_path)
    name = "all_reduce(SUM, 2 x float32)"
    group = "in the default process group"
    failed_before = f"the group failed before, in {name}: interrupted by KeyboardInterrupt"
    assert printed.splitlines()[-1] == f"hvdgloo: {name} {group}: {failed_before}"


def test_a_rank_that_ends_before_a_group_s_first_operation_is_named_at_once(tmp_path: Path) -> None:
    code = """
begin()
if rank == 1:
    print(os.getpid(), flush=True)
    sys.exit()
try:
    dist.all_reduce(torch.ones(1))
except dist.DistBackendError as error:
    print(error)
try:
    dist.send(torch.ones(1), 1)
except dist.DistBackendError as error:
    print(error)
"""
    ended = ended_of(2, code, tmp_path)
    assert [worker.returncode for worker in ended] == [0, 0], ended
    for line in ended[0].stdout.splitlines():
        assert re.search(rf"rank 1 \(host \S+, pid {ended[1].stdout.strip()}\) ended without calling this", line)
    assert len(ended[0].stdout.splitlines()) == 2


def test_a_rank_that_is_late_for_a_group_s_first_operation_is_warned_of(tmp_path: Path) -> None:
    code = """
begin()
if rank == 1:
    while not os.path.exists(os.environ["JOB_FOLDER"] + "/warned"):
        time.sleep(0.01)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
    environ = {"HVDGLOO_STALL_CHECK_TIME_SECONDS": "0.5", "HVDGLOO_LOG_LEVEL": "warning"}
    with Job(2, HEAD + code, tmp_path, SIZE="2", **environ) as job:
        wait_for(lambda: "has waited for rank 1 (host" in job.output(0).stderr, 20)
        (tmp_path / "warned").touch()
        ended = job.succeed()
    assert "the first operation of the default process group" in ended[0].stderr


def test_ctrl_c_in_a_group_s_first_operation_ends_it(tmp_path: Path) -> None:
    code = """
if rank == 1:
    wait_for_the_end()

def tell():
    while dist.group.WORLD._get_backend(torch.device("cpu"))._queue._thread is None:
        time.sleep(0.01)
    print("waits", flush=True)

threading.Thread(target=tell).start()
call()
call()
end()
"""
    interrupted(AN_INTERRUPTED_CALL + code, tmp_path)


def test_a_message_from_a_rank_that_has_ended_without_one_is_not_waited_for(tmp_path: Path) -> None:
    code = """
begin(timeout=timedelta(seconds=50))
if rank == 1:
    print(os.getpid(), flush=True)
    sys.exit()
for receive in (lambda: dist.recv(torch.ones(1), 1), lambda: dist.recv(torch.ones(1))):
    try:
        receive()
    except dist.DistBackendError as error:
        print(error)
"""
    ended = ended_of(2, code, tmp_path)
    assert [worker.returncode for worker in ended] == [0, 0], ended
    lines = ended[0].stdout.splitlines()
    assert len(lines) == 2, ended[0]
    for line in lines:
        assert re.search(
            rf"rank 1 \(host \S+, pid {ended[1].stdout.strip()}\) has ended without sending a message", line
        )


def test_an_error_s_traceback_is_short_and_says_the_reason_once(tmp_path: Path) -> None:
    code = """
import traceback
begin()
dist.all_reduce(torch.ones(1))
for call in (
    lambda: dist.all_reduce(torch.ones(1)) if rank else dist.barrier(),
    lambda: dist.all_reduce(torch.ones(50_000), async_op=True).wait(),
):
    try:
        call()
    except dist.DistBackendError as error:
        text = "".join(traceback.format_exception(error))
        assert text.count("Traceback") == 1, text
        assert text.count("rank 0 called barrier") == 1, text
        assert text.count("hvdgloo: ") == 1, text
        assert text.count("/hvdgloo/") <= 2, text
        print("seen")
"""
    outputs = run(2, code, tmp_path)
    assert all(output.count("seen") == 2 for output in outputs), outputs


def test_a_rank_that_a_group_cannot_have_is_refused(tmp_path: Path) -> None:
    code = "dist.init_process_group('hvdgloo', store=dist.HashStore(), rank=1, world_size=1)"
    (ended,) = ended_of(1, code, tmp_path)
    assert "rank 1 of a process group of 1: world_size must be greater than every rank" in ended.stderr


def test_a_value_that_does_not_say_whether_gloo_is_replaced_is_warned_of() -> None:
    environ = {**clean_environment(), "HVDGLOO_AS_GLOO": "maybe"}
    done = run_command([sys.executable, "-c", "import hvdgloo.torch.distributed"], env=environ, check=True)
    assert "HVDGLOO_AS_GLOO=maybe has no effect: expected 1 or 0" in done.stderr


@EXTENDED
def test_every_way_to_train_ends_with_the_parameters_that_gloo_gives(tmp_path: Path) -> None:
    """DDP, FSDP2, tensor parallel and a pipeline, on two ranks: bit for bit."""
    code = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

def model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

def data(of):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(of))

def train(trained, inputs):
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        trained(inputs).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in trained.parameters()]

def ddp():
    return train(DistributedDataParallel(model()), data(rank))

def fsdp2():
    mesh, trained = init_device_mesh("cpu", (size,)), model()
    for layer in (trained[0], trained[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    return train(trained, data(rank))

def tensor_parallel():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(model(), init_device_mesh("cpu", (size,)), plan), data(0))

def pipeline():
    whole = model()
    part = whole[0] if rank == 0 else whole[1:]
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, want: (out - want).square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        schedule.step(data(0)) if rank == 0 else schedule.step(target=torch.ones(16, 4), losses=[])
        optimizer.step()
    return [p.detach().clone() for p in part.parameters()]

found = {}
for backend in ("gloo", "hvdgloo"):
    store = "file://" + os.environ["JOB_FOLDER"] + "/" + backend
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    found[backend] = {way.__name__: way() for way in (ddp, fsdp2, tensor_parallel, pipeline)}
    dist.destroy_process_group()
for way, expected in found["gloo"].items():
    assert all(map(torch.equal, expected, found["hvdgloo"][way])), way
    assert all(parameter.isfinite().all() for parameter in expected), way
"""
    run(2, code, tmp_path)
