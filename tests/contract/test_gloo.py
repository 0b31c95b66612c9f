"""Properties of Gloo alone, whichever package carries it: torch's sends small tensors from all to all at once and
larger ones in a ring; pygloo's sends pieces; results are the same. Backends in threads, no engine."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from hvdgloo._backends import kernels, pygloo
from hvdgloo._backends.base import Backend
from hvdgloo._backends.select import gloo_backend
from hvdgloo.errors import BackendError, ConnectError
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer, DType, ReduceOp
from tests.support.backends import Ranks, finish

SIZE = 3
# The limits of both: elements on either side of where torch's begins and ends to send to all at once, and pieces end.
COUNTS = [7, 8, 1000, (1 << 19) // 8 // SIZE, (1 << 19) // 8 // SIZE + 1, pygloo.PIECE // 8, pygloo.PIECE // 8 * 4 + 1]


def connected(provider: str) -> Ranks[Backend]:
    store = MemoryStore()
    return Ranks(SIZE, lambda rank: gloo_backend(provider, store, "test/", rank, SIZE, "127.0.0.1", 10))


@pytest.fixture(scope="module", params=["torch", "pygloo"])
def provider(request: pytest.FixtureRequest) -> str:
    """Each package that carries Gloo."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(provider: str) -> Iterator[Ranks[Backend]]:
    with closing(connected(provider)) as made:
        yield made


def values(rank: int, count: int, dtype: DType) -> np.ndarray:
    small = ((np.arange(count) + rank) % 3).astype(np.float32)
    if kernels.is_half(dtype):
        return kernels.narrow(small, dtype)
    array = small.astype(dtype.numpy_dtype)
    if array.dtype.kind == "u":  # also numbers that would be negative in a signed type
        array[rank % 2 :: 2] = ~array[rank % 2 :: 2]
    return array


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_every_type_and_operation(ranks: Ranks[Backend], dtype: DType, op: ReduceOp) -> None:
    def rank(place: int) -> None:
        for count in (1, 70, 1000):
            array = values(place, count, dtype)
            finish(ranks.backends[place].allreduce(Buffer.of_array(array, dtype), op))
            expected = kernels.reduce([values(r, count, dtype) for r in range(SIZE)], dtype, op)
            np.testing.assert_array_equal(array, expected)

    ranks.run(rank)


@pytest.mark.parametrize("count", [9, 400_000])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_floating], ids=str)
def test_nan_wins_on_every_rank_and_in_every_place(
    ranks: Ranks[Backend], dtype: DType, op: ReduceOp, count: int
) -> None:
    """Gloo compares with < and >, which lose a NaN in one of the operands; which one it is depends on the block."""

    def floats(rank: int) -> np.ndarray:
        values = np.resize([1.5, -2.0, np.inf, -np.inf, 0.0, -0.0, 7.0], count) * (rank + 1)
        values[rank::5] = np.copysign(np.nan, (-1.0) ** rank)
        return values.astype(np.float32 if kernels.is_half(dtype) else dtype.numpy_dtype)

    expected = kernels.ufunc(dtype, op).reduce([floats(rank) for rank in range(SIZE)])
    assert 3 * count // 5 <= np.isnan(expected).sum() < count

    def rank(place: int) -> None:
        array = kernels.narrow(floats(place), dtype) if kernels.is_half(dtype) else floats(place)
        finish(ranks.backends[place].allreduce(Buffer.of_array(array, dtype), op))
        np.testing.assert_array_equal(kernels.widen(array, dtype) if kernels.is_half(dtype) else array, expected)

    ranks.run(rank)


@pytest.mark.parametrize("count", COUNTS)
def test_on_both_sides_of_the_limits(ranks: Ranks[Backend], count: int) -> None:
    def rank(place: int) -> None:
        array = values(place, count, DType.FLOAT64)
        finish(ranks.backends[place].allreduce(Buffer.of_array(array), ReduceOp.SUM))
        np.testing.assert_array_equal(array, sum(values(r, count, DType.FLOAT64) for r in range(SIZE)))

    ranks.run(rank)


@pytest.mark.parametrize(
    "counts", [(100, 100, 100), (0, 1, 900), (5, 0, 0), (30_000, 1, 0), (600_000,) * 3, (2, 600_000, 9)], ids=str
)
def test_gathered_rows_may_be_of_any_number(ranks: Ranks[Backend], counts: tuple[int, ...]) -> None:
    def rank(place: int) -> None:
        own, whole = values(place, counts[place], DType.FLOAT64), np.zeros(sum(counts))
        nbytes = [8 * count for count in counts]
        finish(ranks.backends[place].allgather(Buffer.of_array(own), Buffer.of_array(whole), nbytes))
        np.testing.assert_array_equal(whole, np.concatenate([values(r, counts[r], DType.FLOAT64) for r in range(SIZE)]))

    ranks.run(rank)


BLOCKS = [(0, 0, 0), (1, 5, 700), (0, 600_000, 3)]
"""Elements of the blocks that ranks send in an alltoall; each rank sends them in another order."""


@pytest.mark.parametrize("counts", BLOCKS, ids=str)
def test_blocks_of_any_size_are_exchanged(ranks: Ranks[Backend], counts: tuple[int, ...]) -> None:
    sent = [[counts[(source + target) % SIZE] for target in range(SIZE)] for source in range(SIZE)]

    def rank(place: int) -> None:
        own = np.concatenate([np.full(sent[place][to], 10.0 * place + to) for to in range(SIZE)])
        received = [sent[source][place] for source in range(SIZE)]
        whole = np.zeros(sum(received))
        sizes = [8 * count for count in sent[place]], [8 * count for count in received]
        finish(ranks.backends[place].alltoall(Buffer.of_array(own), Buffer.of_array(whole), *sizes))
        expected = [np.full(sent[source][place], 10.0 * source + place) for source in range(SIZE)]
        np.testing.assert_array_equal(whole, np.concatenate(expected))

    ranks.run(rank)


@pytest.mark.parametrize("counts", [(4, 4, 4), (0, 9, 1), (600_000, 0, 5)], ids=str)
def test_sums_are_scattered_in_order_of_ranks(ranks: Ranks[Backend], counts: tuple[int, ...]) -> None:
    arrays = [np.random.default_rng(rank).normal(size=sum(counts)).astype(np.float32) for rank in range(SIZE)]
    expected = (arrays[0] + arrays[1]) + arrays[2]

    def rank(place: int) -> None:
        own = np.zeros(counts[place], np.float32)
        sizes = [4 * count for count in counts]
        source = Buffer.of_array(arrays[place])
        finish(ranks.backends[place].reducescatter(source, Buffer.of_array(own), sizes, ReduceOp.SUM))
        begin = sum(counts[:place])
        np.testing.assert_array_equal(own, expected[begin : begin + counts[place]])

    ranks.run(rank)


@pytest.mark.parametrize("count", [1, 1000, pygloo.PIECE + 5])
def test_a_broadcast_leaves_its_root_as_it_was(ranks: Ranks[Backend], count: int) -> None:
    def rank(place: int) -> None:
        for root in range(SIZE):
            array = np.full(count, place + 1, np.uint8)
            finish(ranks.backends[place].broadcast(Buffer.of_array(array), root))
            assert (array == root + 1).all()

    ranks.run(rank)


def test_operations_end_in_any_order(ranks: Ranks[Backend]) -> None:
    def rank(place: int) -> None:
        backend = ranks.backends[place]
        arrays = [np.full(count, place + 1.0) for count in (1_000_000, 3, 700_000)]
        works = [backend.allreduce(Buffer.of_array(array), ReduceOp.SUM) for array in arrays]
        for work in reversed(works):
            finish(work)
        assert all((array == 6).all() for array in arrays)

    ranks.run(rank)


def test_small_sums_are_the_same_bits_on_all_ranks_in_order_of_ranks(ranks: Ranks[Backend], provider: str) -> None:
    if provider == "pygloo":
        pytest.skip("its sums go round a ring, whatever their size")
    arrays = [np.random.default_rng(rank).normal(size=500).astype(np.float32) for rank in range(SIZE)]
    expected = (arrays[0] + arrays[1]) + arrays[2]
    ranks.run(lambda place: finish(ranks.backends[place].allreduce(Buffer.of_array(arrays[place]), ReduceOp.SUM)))
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-4])
def test_a_wait_of_no_time_ends(ranks: Ranks[Backend], seconds: float) -> None:
    """To torch no milliseconds mean that there is no deadline, and what is shorter than one counts as none."""
    array = np.ones(1000)
    work = ranks.backends[0].allreduce(Buffer.of_array(array), ReduceOp.SUM)
    waiter = ThreadPoolExecutor(1)
    looked = waiter.submit(work.completes_within, seconds)
    try:
        assert looked.result(5) is False
    finally:
        others = [backend.allreduce(Buffer.of_array(np.ones(1000)), ReduceOp.SUM) for backend in ranks.backends[1:]]
        for each in (work, *others):
            finish(each)
        waiter.shutdown()
    assert (array == SIZE).all()


def test_a_late_rank_is_waited_for_and_an_abort_ends_the_wait(provider: str) -> None:
    ranks = connected(provider)
    array = np.ones(100)
    work = ranks.backends[0].allreduce(Buffer.of_array(array), ReduceOp.SUM)
    assert not work.completes_within(0.05)
    others = [ranks.backends[rank].allreduce(Buffer.of_array(np.ones(100)), ReduceOp.SUM) for rank in (1, 2)]
    for each in (work, *others):
        finish(each)
    assert array.tolist() == [3.0] * 100
    work = ranks.backends[0].allreduce(Buffer.of_array(array), ReduceOp.SUM)
    assert not work.completes_within(0.05)
    ranks.backends[0].abort()
    with pytest.raises(BackendError):
        finish(work)
    for backend in ranks.backends[1:]:
        backend.abort()
    ranks.close()


IMPOSTOR = """
import os, socket, struct, sys
"".encode("idna")  # what cannot be imported as another user
if os.getuid() == 0:
    os.setuid(65534)
held = []
for port in sys.argv[1:]:
    for rank in range(2):
        held.append(socket.create_connection(("127.0.0.1", int(port))))
        held[-1].sendall(struct.pack("=q", rank))
print(flush=True)
sys.stdin.read()
"""


class Attacked(MemoryStore):
    """A store whose users learn where Gloo listens when an impostor has connected there, as every rank that there is.

    Args:
        times: how many groups are attacked.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times
        self._ports: dict[str, list[int]] = {}
        self._came: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.impostors: list[subprocess.Popen[bytes]] = []

    def set(self, key: str, value: bytes) -> None:
        group = key.rpartition("/")[0]
        if not group.endswith("met") and not key.endswith("failed"):
            family = struct.pack("=H", socket.AF_INET)
            at = value.index(socket.inet_aton("127.0.0.1")) - 4
            assert value[at : at + 2] == family
            with self._lock:
                ports = self._ports.setdefault(group, [])
                ports.append(struct.unpack_from("!H", value, at + 2)[0])
                if len(ports) == 2 and len(self.impostors) < self._times:
                    command = [sys.executable, "-S", "-c", IMPOSTOR, *map(str, ports)]
                    impostor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                    assert impostor.stdout is not None
                    assert impostor.stdout.readline() == b"\n"
                    self.impostors.append(impostor)
        super().set(key, value)


@pytest.fixture
def attacked() -> Iterator[Callable[[int], Attacked]]:
    made: list[Attacked] = []

    def make(times: int) -> Attacked:
        made.append(Attacked(times))
        return made[-1]

    yield make
    for store in made:
        for impostor in store.impostors:
            impostor.communicate(timeout=10)


def connect(
    store: MemoryStore, secrets: Sequence[bytes] = (b"s", b"s"), timeout: float = 6
) -> list[Backend | BaseException]:
    """A group of as many ranks as there are secrets."""
    from hvdgloo._backends.gloo import GlooBackend

    def join(rank: int) -> Backend | BaseException:
        try:
            return GlooBackend(store, "test/", rank, len(secrets), "127.0.0.1", timeout, secret=secrets[rank])
        except ConnectError as error:
            return error

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(join, range(len(secrets)), timeout=20))


def check_sums(backends: Sequence[Backend | BaseException]) -> None:
    """They can be used, and are closed then."""

    def rank(backend: Backend | BaseException) -> None:
        assert not isinstance(backend, BaseException), backend
        array = np.ones(100_000)
        finish(backend.allreduce(Buffer.of_array(array), ReduceOp.SUM))
        assert (array == len(backends)).all()

    with ThreadPoolExecutor(len(backends)) as pool:
        list(pool.map(rank, backends))
    for backend in backends:
        assert not isinstance(backend, BaseException)
        backend.close()


def test_who_takes_a_rank_s_place_is_noticed_and_all_try_once_more(attacked: Callable[[int], Attacked]) -> None:
    """Gloo believes the first process that connects; the numbers by which it knows its peers are their ranks."""
    pytest.importorskip("torch")
    store = attacked(1)
    backends = connect(store)
    assert len(store.impostors) == 1
    check_sums(backends)


def test_what_the_first_try_leaves_behind_ends_before_the_second(attacked: Callable[[int], Attacked]) -> None:
    """Its group is never closed, since that might wait for ever; but nothing waits at its connections."""
    pytest.importorskip("torch")
    from hvdgloo._backends import gloo

    def drivers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("hvdgloo-gloo-")]

    before = drivers()
    backends = connect(attacked(1))
    assert all(isinstance(backend, gloo.GlooBackend) for backend in backends)
    for thread in set(drivers()) - set(before):
        thread.join(5)
    assert set(drivers()) <= set(before)  # two ranks are all connected, and need no thread afterwards
    check_sums(backends)


def test_who_never_tires_of_it_is_named(attacked: Callable[[int], Attacked]) -> None:
    pytest.importorskip("torch")
    for result in connect(attacked(9)):
        assert isinstance(result, ConnectError)
        assert "something that is not part of this job connects to Gloo's ports" in str(result)


def test_who_gives_up_waits_for_nothing_that_never_ends(attacked: Callable[[int], Attacked]) -> None:
    """Gloo's destructors wait for operations under way, for as long as they may take."""
    pytest.importorskip("torch")
    began = time.monotonic()
    results = connect(attacked(9), timeout=60)
    assert all(isinstance(result, ConnectError) for result in results)
    assert time.monotonic() - began < 15


def test_proofs_are_others_for_each_group_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs that were overheard at one start prove nothing at the next, nor at the second try of the same one."""
    pytest.importorskip("torch")
    from hvdgloo._backends.gloo import GlooBackend

    real, sent, tries = GlooBackend._proof, [], []

    def proof(self: GlooBackend, of: int, to: int) -> bytes:
        made = real(self, of, to)
        if (of, to, self._rank) == (0, 1, 0):
            sent.append(made)
        return made

    def failing_to_connect(self: GlooBackend, *arguments: object) -> None:
        real_connect(self, *arguments)  # type: ignore[arg-type]
        if len(tries) < 2:
            tries.append(self._rank)
            raise BackendError("no")

    real_connect = GlooBackend._connect
    monkeypatch.setattr(GlooBackend, "_proof", proof)
    check_sums(connect(MemoryStore()))
    monkeypatch.setattr(GlooBackend, "_connect", failing_to_connect)
    check_sums(connect(MemoryStore()))
    assert tries
    assert len(sent) == len(set(sent)) == 3


@pytest.mark.parametrize("few", [16, 1], ids=["all", "neighbours"])
def test_ranks_prove_to_each_other_that_they_know_the_secret(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("hvdgloo._backends.gloo.FEW_RANKS", few)
    for result in connect(MemoryStore(), [b"s", b"s", b"another"]):
        assert isinstance(result, ConnectError)
        assert "did not prove that it knows this job's secret" in str(result)
    check_sums(connect(MemoryStore(), [b"s", b"s", b"s"]))
