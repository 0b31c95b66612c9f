"""Properties of shared memory alone: its bounds, its order of summing, its end. Backends in threads, no engine."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends import kernels
from hvdgloo._backends.shm import limits, segment_collectives, system
from hvdgloo._backends.shm.backend import ShmBackend, Unsupported
from hvdgloo._backends.shm.tensors import Tensors
from hvdgloo._backends.shm.zero_copy import RESIDENT_FROM
from hvdgloo._net import abstract
from hvdgloo.errors import BackendError, ConnectError
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer, DType, ReduceOp
from tests.support.backends import Ranks, finish
from tests.support.threads import Task
from tests.support.world import SECRET, closed_later

BACKENDS = ("shm", "shm-pipes")
KIB = 1 << 10


MakeRanks = Callable[..., Ranks[ShmBackend]]


def connected(size: int, kind: str, limit: int = 64 * KIB) -> Ranks[ShmBackend]:
    store = MemoryStore()

    def connect(rank: int) -> ShmBackend:
        return ShmBackend(
            store,
            "test/",
            rank,
            size,
            SECRET,
            lambda member: f"rank {member}",
            connect_timeout=5,
            limit=limit,
            pipes=kind == "shm-pipes",
        )

    return Ranks(size, connect)


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    """``make_ranks(size, kind=...)``."""
    with closed_later(connected) as make:
        yield make


@pytest.fixture
def ranks(backend: str, make_ranks: MakeRanks) -> MakeRanks:
    """``ranks(size)``: each kind of shared memory in turn."""
    return functools.partial(make_ranks, kind=backend)


def data(rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    return (np.random.default_rng(rank).normal(size=count) * 100).astype(dtype)


def in_order(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, arrays)


SIZES = [2, 3, 5]
COUNTS = [1, 7, 5000, 300_001]  # one element, fewer than ranks' slices need, one round, many rounds


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_every_element_is_summed_in_order_of_ranks(ranks: MakeRanks, size: int, count: int) -> None:
    """Bit for bit what adding rank after rank gives; floating-point sums depend on their order."""
    group = ranks(size)
    expected = in_order([data(rank, count) for rank in range(size)])

    def rank(place: int) -> np.ndarray:
        array = data(place, count)
        finish(group.backends[place].allreduce(Buffer.of_array(array), ReduceOp.SUM))
        return array

    for result in group.run(rank):
        np.testing.assert_array_equal(result, expected)


def test_half_types_are_summed_in_order_of_ranks_too(ranks: MakeRanks) -> None:
    group = ranks(3)
    values = [32768.0, 2.0**-11, -32768.0]  # in another order the small one is not lost, even in float32

    def rank(place: int) -> np.ndarray:
        array = np.full(5000, values[place], np.float16)
        finish(group.backends[place].allreduce(Buffer.of_array(array), ReduceOp.SUM))
        return array

    assert not np.concatenate(group.run(rank)).any()


@pytest.mark.parametrize("size", SIZES)
def test_payloads_beyond_the_segment_pass_piece_by_piece(ranks: MakeRanks, size: int) -> None:
    group = ranks(size)
    count = 200_003
    blocks = [count // size + 11 * rank for rank in range(size)]

    def rank(place: int) -> None:
        backend = group.backends[place]
        array = data(1, count) if place == 1 else np.zeros(count, np.float32)
        finish(backend.broadcast(Buffer.of_array(array), 1))
        np.testing.assert_array_equal(array, data(1, count))
        own, whole = data(place, blocks[place]), np.zeros(sum(blocks), np.float32)
        finish(backend.allgather(Buffer.of_array(own), Buffer.of_array(whole), [4 * n for n in blocks]))
        np.testing.assert_array_equal(whole, np.concatenate([data(r, n) for r, n in enumerate(blocks)]))
        source, target = data(place, sum(blocks)), np.zeros(blocks[place], np.float32)
        sizes = [4 * n for n in blocks]
        finish(backend.reducescatter(Buffer.of_array(source), Buffer.of_array(target), sizes, ReduceOp.SUM))
        begin = sum(blocks[:place])
        np.testing.assert_array_equal(source, data(place, sum(blocks)))
        expected = in_order([data(r, sum(blocks))[begin : begin + blocks[place]] for r in range(size)])
        np.testing.assert_array_equal(target, expected)
        # To rank r go r thousand and some elements: different numbers to each, none to the first.
        received = np.zeros(size * 30_000 * place, np.float32)
        source = data(place, 30_000 * sum(range(size)))
        sent = [4 * 30_000 * r for r in range(size)]
        incoming = [4 * 30_000 * place] * size
        finish(backend.alltoall(Buffer.of_array(source), Buffer.of_array(received), sent, incoming))
        begin = 30_000 * sum(range(place))
        expected = [data(r, 30_000 * sum(range(size)))[begin : begin + 30_000 * place] for r in range(size)]
        np.testing.assert_array_equal(received, np.concatenate(expected))

    group.run(rank)


@pytest.mark.parametrize("count", COUNTS)
def test_blocks_may_be_reduced_and_gathered_where_they_lie(ranks: MakeRanks, count: int) -> None:
    """A rank's result is its block of the source, and its contribution its block of the target: an allreduce in place,
    step by step. The others' blocks of the source stay as they are."""
    group = ranks(3)
    blocks = [count, 0, count + 5]
    sizes = [4 * block for block in blocks]
    expected = in_order([data(rank, sum(blocks)) for rank in range(3)])

    def rank(place: int) -> None:
        array = data(place, sum(blocks))
        begin = sum(blocks[:place])
        end = begin + blocks[place]
        own = Buffer.of_array(array).part(4 * begin, sizes[place])
        finish(group.backends[place].reducescatter(Buffer.of_array(array), own, sizes, ReduceOp.SUM))
        np.testing.assert_array_equal(array[begin:end], expected[begin:end])
        before = data(place, sum(blocks))
        np.testing.assert_array_equal(array[:begin], before[:begin])
        np.testing.assert_array_equal(array[end:], before[end:])
        finish(group.backends[place].allgather(own, Buffer.of_array(array), sizes))
        np.testing.assert_array_equal(array, expected)

    group.run(rank)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("torch", [False, True])
def test_every_type_and_operation(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, dtype: DType, op: ReduceOp, torch: bool
) -> None:
    """Several tensors at once, scaled before and after, into other memory: as if done one after the other."""
    if torch:
        if not kernels.is_half(dtype):
            pytest.skip("torch computes half types only")
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr("hvdgloo._backends.shm.reduction._torch_halves", None)
        monkeypatch.setitem(sys.modules, "torch", None)
    group = ranks(3)
    counts = [1, 40_000, 3]
    factors = (1.0, 1.0) if dtype is DType.BOOL else (2.0, 0.5)

    def values(place: int, index: int) -> np.ndarray:
        whole = np.random.default_rng((place, index)).integers(0, 4, counts[index]).astype(np.float32)
        if kernels.is_half(dtype):
            return kernels.narrow(whole, dtype)
        return whole.astype(dtype.numpy_dtype)

    def rank(place: int) -> list[np.ndarray]:
        sources = [values(place, index) for index in range(3)]
        targets = [np.zeros_like(source) for source in sources]
        finish(
            group.backends[place].allreduce_several(
                [Buffer.of_array(source, dtype) for source in sources],
                [Buffer.of_array(target, dtype) for target in targets],
                op,
                *factors,
            )
        )
        for index, source in enumerate(sources):
            np.testing.assert_array_equal(source, values(place, index))  # inputs are never written
        return targets

    results = group.run(rank)
    for index in range(3):
        inputs = [values(place, index) for place in range(3)]
        for array in inputs:
            if dtype is not DType.BOOL:
                kernels.scale(Buffer.of_array(array, dtype), factors[0])
        expected = kernels.reduce(inputs, dtype, op)
        if dtype is not DType.BOOL:
            kernels.scale(Buffer.of_array(expected, dtype), factors[1])
        for result in results:
            np.testing.assert_array_equal(result[index], expected)


def test_thousands_of_tensors_at_once(ranks: MakeRanks) -> None:
    group = ranks(2)

    def rank(place: int) -> None:
        arrays = [np.full(index % 5, place + index, np.int32) for index in range(3000)]
        buffers = [Buffer.of_array(array) for array in arrays]
        finish(group.backends[place].allreduce_several(buffers, buffers, ReduceOp.SUM))
        for index, array in enumerate(arrays):
            assert array.tolist() == [2 * index + 1] * (index % 5)

    group.run(rank)


def test_no_more_rounds_are_kept_prepared_than_the_limit(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small tensors came first, and then a large one takes their places."""
    monkeypatch.setattr(segment_collectives, "_MOST_ROUNDS", 8)
    group = make_ranks(2, kind="shm")
    slot = 64 * KIB // segment_collectives.SLOTS
    sizes = [2 * slot // 8, 2 * slot // 8, 2 * slot // 8, 5 * slot // 8, 2 * slot // 8, 20 * slot // 8]

    def kept(rank: int) -> list[int]:
        prepared, found = group.backends[rank]._rounds._prepared, []
        held = [np.ones(size) for size in sizes]
        for array in held:
            finish(group.backends[rank].allreduce(Buffer.of_array(array), ReduceOp.SUM))
            assert (array == 2).all()
            found.append(sum(map(len, prepared.values())))
        return found

    for found in group.run(kept):
        assert 0 < max(found) <= 8
        assert found[-1] == 0  # it has too many by itself


def test_operations_complete_in_the_order_in_which_they_began(ranks: MakeRanks) -> None:
    """Several are under way at once, and waiting for a later one completes the earlier ones."""
    group = ranks(3)

    def rank(place: int) -> None:
        backend = group.backends[place]
        arrays = [data(place, count) for count in (100_000, 3, 50_000)]
        works = [backend.allreduce(Buffer.of_array(array), ReduceOp.SUM) for array in arrays]
        finish(works[2])
        assert works[0].completes_within(0)
        assert works[1].completes_within(0)
        for array in arrays:
            np.testing.assert_array_equal(array, in_order([data(r, array.size) for r in range(3)]))

    group.run(rank)


def test_the_segment_grows_on_demand_up_to_its_limit(make_ranks: MakeRanks) -> None:
    group = make_ranks(2, kind="shm", limit=1 << 20)

    def reduce(nbytes: int) -> None:
        def rank(place: int) -> None:
            array = data(place, nbytes // 4)
            finish(group.backends[place].allreduce(Buffer.of_array(array), ReduceOp.SUM))
            np.testing.assert_array_equal(array, in_order([data(r, nbytes // 4) for r in range(2)]))

        group.run(rank)

    seen = []
    for nbytes in (4, 16 * KIB, 100 * KIB, 8 * KIB, 3 << 20):
        reduce(nbytes)
        assert group.backends[0].segment_bytes == group.backends[1].segment_bytes
        seen.append(group.backends[0].segment_bytes)
    assert seen == [64 * KIB, 64 * KIB, 512 * KIB, 512 * KIB, 1 << 20]


def test_a_rank_that_gets_no_more_memory_keeps_all_where_they_are(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_ranks(3, kind="shm", limit=1 << 20)
    poor = threading.local()

    def check(nbytes: int) -> None:
        if getattr(poor, "here", False):
            raise OSError(errno.ENOMEM, "no more")

    monkeypatch.setattr(limits, "check_room", check)

    def rank(place: int) -> None:
        poor.here = place == 1
        for count in (100_000, 200_000):
            array = data(place, count)
            finish(group.backends[place].allreduce(Buffer.of_array(array), ReduceOp.SUM))
            np.testing.assert_array_equal(array, in_order([data(r, count) for r in range(3)]))

    group.run(rank)
    assert [backend.segment_bytes for backend in group.backends] == [64 * KIB] * 3


def test_a_late_rank_keeps_no_other_longer_than_the_timeout(ranks: MakeRanks) -> None:
    group = ranks(2)
    array = data(0, 100_000)
    began = time.monotonic()
    work = group.backends[0].allreduce(Buffer.of_array(array), ReduceOp.SUM)
    assert not work.completes_within(0.1)
    assert not work.completes_within(0)
    assert time.monotonic() - began < 1
    other = data(1, 100_000)
    late = group.backends[1].allreduce(Buffer.of_array(other), ReduceOp.SUM)
    while not (late.completes_within(0.01) & work.completes_within(0.01)):
        assert time.monotonic() - began < 10
    np.testing.assert_array_equal(array, in_order([data(0, 100_000), data(1, 100_000)]))


def test_only_a_rank_that_sleeps_is_woken(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A post of a value that no rank sleeps for is no system call; one that a rank sleeps for ends the sleep."""
    if not system.has_strong_order():
        pytest.skip("there is no waking by futex on this processor")
    ranks = make_ranks(2, kind="shm")
    first, second = (backend._signals for backend in ranks.backends)
    woken: list[int] = []
    original = system.futex_wake
    monkeypatch.setattr(system, "futex_wake", lambda address: (woken.append(address), original(address))[1])
    first.post(0, 1)
    assert woken == []
    assert second.wait(0, 0, 1, time.monotonic() + 5)
    asleep = threading.Event()
    look = second._look

    def looks() -> None:
        look()
        asleep.set()  # it has said that it will sleep, and has seen that the number is not there

    monkeypatch.setattr(second, "_look", looks)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(second.wait, 0, 0, 3, time.monotonic() + 5)
        assert asleep.wait(5)
        first.post(0, 2)
        first.post(1, 3)
        assert woken == []
        assert not waited.done()
        first.post(0, 3)
        assert waited.result(5)
    assert len(woken) == 1
    first.post(0, 4)
    assert len(woken) == 1


@pytest.mark.parametrize("who", ["itself", "a peer"])
def test_an_abort_ends_a_wait_at_once(ranks: MakeRanks, who: str) -> None:
    group = ranks(2)
    work = group.backends[0].allreduce(Buffer.of_array(data(0, 100_000)), ReduceOp.SUM)
    entered = threading.Event()
    ended: list[float] = []

    def wait() -> None:
        entered.set()
        with pytest.raises(BackendError, match="abort" if who == "itself" else "rank 1 of the set has given up"):
            work.completes_within(10)
        ended.append(time.monotonic())

    thread = Task(wait)
    entered.wait()
    aborted = time.monotonic()
    group.backends[who == "a peer"].abort()
    group.backends[who == "a peer"].abort()
    thread.result(10)
    assert ended[0] - aborted < 0.5
    with pytest.raises(BackendError):
        work.completes_within(0)
    with pytest.raises(BackendError):
        group.backends[0].broadcast(Buffer.of_array(data(0, 5)), 0)


def test_results_of_a_rank_that_gave_up_are_not_believed(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its tensor back while a slow peer still reads there: the peer's operation fails."""
    group = make_ranks(2, kind="shm")
    count = RESIDENT_FROM // 4
    arrays = []
    for backend in group.backends:
        arrays.append(np.frombuffer(backend.allocate(4 * count), np.float32))
        arrays[-1][:] = 1
    works = [group.backends[rank].allreduce(Buffer.of_array(arrays[rank]), ReduceOp.SUM) for rank in (0, 1)]
    copy_from = Tensors.copy_from

    def slow_reader(self: Tensors, source: Any, begin: int, end: int) -> None:
        group.backends[0].abort()
        arrays[0][:] = -1  # its owner uses it for something else
        copy_from(self, source, begin, end)

    assert not works[1].completes_within(0)
    assert not works[0].completes_within(0.05)  # it has taken rank 1's slice, and rank 1 has only reduced its own
    monkeypatch.setattr(Tensors, "copy_from", slow_reader)
    with pytest.raises(BackendError, match="rank 0 of the set has given up"):
        works[1].completes_within(5)


def meet(size: int, **options: Any) -> list[ShmBackend | BaseException]:
    """Connect ranks of which some cannot."""
    store = MemoryStore()

    def connect(rank: int) -> ShmBackend | BaseException:
        secret = options.get("secrets", {}).get(rank, SECRET)
        try:
            return ShmBackend(
                store, "x/", rank, size, secret, lambda member: f"rank {member}", connect_timeout=1, limit=1 << 20
            )
        except (Unsupported, ConnectError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(connect, range(size)))


def thread_ranks(monkeypatch: pytest.MonkeyPatch, name: str, failing: int, error: Exception) -> None:
    """Let a system call fail for the rank that makes it as the ``failing``-th."""
    real, calls, lock = getattr(system, name), [0], threading.Lock()

    def call(*arguments: Any) -> Any:
        with lock:
            calls[0] += 1
            mine = calls[0]
        if mine == failing:
            raise error
        return real(*arguments)

    monkeypatch.setattr(system, name, call)


@pytest.mark.parametrize(
    ("name", "failing", "error", "reason"),
    [
        ("create_memory", 1, OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        ("create_memory", 1, Unsupported("this system has no memfd_create"), "this system has no memfd_create"),
        ("map_memory", 1, OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        ("map_memory", 3, OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        ("futex_wake", 2, OSError(errno.ENOSYS, "Function not implemented"), "Function not implemented"),
    ],
)
def test_what_one_member_cannot_do_none_does(
    monkeypatch: pytest.MonkeyPatch, name: str, failing: int, error: Exception, reason: str
) -> None:
    """Pain 6: what only Linux has is not needed."""
    thread_ranks(monkeypatch, name, failing, error)
    results = meet(3)
    assert all(isinstance(result, Unsupported) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert reason in str(results[0])


def test_who_does_not_know_the_secret_gets_no_memory() -> None:
    results = meet(2, secrets={1: b"another secret"})
    assert all(isinstance(result, ConnectError) for result in results), results
    assert "does not know this job's secret" in str(results[1])


SILENT = """
import os, resource, socket, sys
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
os.setuid(65534)

def connect():
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect("\\0" + sys.argv[1])
    return sock

held = []
try:
    while len(held) < 2000:
        held.append(connect())
except BlockingIOError:
    pass
print(len(held), flush=True)
while True:  # and goes on
    try:
        held[:1000] = [connect() for _ in range(100)]
    except OSError:
        pass
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_another_user_who_connects_and_says_nothing_keeps_no_rank_from_meeting() -> None:
    """Names of abstract sockets are there for all to read, and no permissions protect them."""
    store = MemoryStore()

    def connect(rank: int) -> ShmBackend:
        return ShmBackend(store, "x/", rank, 3, SECRET, lambda member: f"rank {member}", connect_timeout=9, limit=1)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(connect, 0)
        name = json.loads(store.get_many(["x/shm"], timeout=5)[0])["name"]
        with subprocess.Popen([sys.executable, "-c", SILENT, name], stdout=subprocess.PIPE) as stranger:
            try:
                assert stranger.stdout is not None
                assert int(stranger.stdout.readline()) > 30
                began = time.monotonic()
                backends = [first, pool.submit(connect, 1), pool.submit(connect, 2)]
                for backend in backends:
                    backend.result(10).close()
                assert time.monotonic() - began < 5
            finally:
                stranger.kill()


def test_a_member_that_cannot_connect_keeps_all_from_sharing_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has met rank 0 already, and one comes later; all of them do something else then, for the same reason."""
    lock, came, refused = threading.Lock(), list[str](), threading.Event()

    def connect(name: str, deadline: float, cancelled: Callable[[], bool]) -> socket.socket:
        with lock:
            came.append(name)
            turn = len(came)
        if turn == 2:
            refused.set()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if turn == 3:
            assert refused.wait(5)
        return real(name, deadline, cancelled)

    real = abstract.connect
    monkeypatch.setattr(abstract, "connect", connect)
    results = meet(4)
    assert all(isinstance(result, Unsupported) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert re.fullmatch(r"rank [123] could not connect to rank 0: Resource temporarily unavailable", str(results[0]))


def test_processes_of_different_users_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abstract, "lets_in", lambda sock: False)
    results = meet(2)
    assert [str(result) for result in results] == [
        "rank 1 could not connect to rank 0: they are processes of different users"
    ] * 2
    assert all(isinstance(result, Unsupported) for result in results), results


def test_memory_cannot_be_shrunk_under_who_uses_it() -> None:
    descriptor = system.create_memory("test", 1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    os.close(descriptor)
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, 1 << 16)
    with pytest.raises(Unsupported, match="not sealed"):
        system.map_memory(unsealed, 1 << 16)
    os.close(unsealed)


def test_a_memory_limit_is_looked_at_before(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {("/a", "memory.max"): 100 << 20, ("/a", "memory.current"): 50 << 20}
    monkeypatch.setattr(limits, "_groups", lambda: iter(["/a", "/"]))
    monkeypatch.setattr(limits, "_number", lambda folder, name: files.get((folder, name)))
    monkeypatch.setattr(limits, "_reclaimable", lambda folder: 0)
    limits.check_room(30 << 20)
    with pytest.raises(OSError, match="50 MiB are left below the memory limit in /a"):
        limits.check_room(40 << 20)
    results = meet(2)
    assert all(isinstance(result, ShmBackend) for result in results), results
    for result in results:
        assert isinstance(result, ShmBackend)
        result.close()
    files["/a", "memory.max"] = 51 << 20
    assert "below the memory limit" in str(meet(2)[1])
