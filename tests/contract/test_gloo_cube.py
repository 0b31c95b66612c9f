"""Groups of more ranks than are connected with each other at once: what goes through the cube and round the ring over
real Gloo, and how many connections and bytes that takes. Backends in threads, no engine."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdgloo._backends.base import Work
from hvdgloo._net import descriptors
from hvdgloo.errors import BackendError, ConfigError, ConnectError
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer, DType, ReduceOp

pytest.importorskip("torch", reason="pygloo's groups are always connected in full")

from hvdgloo._backends import cube, gloo
from hvdgloo._backends.gloo import GlooBackend
from tests.support.backends import Ranks, check_alltoall, check_broadcast, check_rows, finish
from tests.support.launching import wait_for
from tests.support.threads import Task
from tests.support.world import closed_later


class CountingStore(MemoryStore):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self._counting = threading.Lock()
        self.nbytes = self.requests = 0

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]:
        values = super().get_many(keys, timeout=timeout)
        if timeout:
            with self._counting:
                self.nbytes += sum(map(len, values))
                self.requests += 1
        return values


class Measured(Ranks[GlooBackend]):
    """Ranks whose sockets and threads are counted."""

    def __init__(self, size: int) -> None:
        self.store = CountingStore()
        # A pool starts no thread while one is idle. Besides its threads there are an earlier test's, whose groups may
        # still be on their way to their end.
        started = threading.Barrier(size, self._count)

        def connect(rank: int) -> GlooBackend:
            started.wait(10)
            return GlooBackend(self.store, "test/", rank, size, "127.0.0.1", 20, secret=b"secret")

        super().__init__(size, connect)

    def _count(self) -> None:
        self._sockets_before, self._threads_before = sockets(), threads()

    @property
    def sockets(self) -> float:
        """Of a rank, on average; each connection is one at each of its ends."""
        return len(sockets() - self._sockets_before) / self.size

    @property
    def threads(self) -> float:
        """Of a rank, on average, besides its own."""
        return len(threads() - self._threads_before) / self.size

    def abandon(self, place: int) -> None:
        """One of them is in an operation that does not end."""
        self.backends.pop(place).abandon()


def sockets() -> set[str]:
    """This process's sockets, by their inodes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith("socket:")}


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def is_stuck(work: Work) -> bool:
    """Tell whether a work does not end although all its connections have: a fault of Gloo
    (``executor._LET_GO_SECONDS``).

    Gloo's own algorithms have done so in about one of a hundred runs on a busy machine, whatever was tried.
    """
    try:
        finish(work, 10)
    except AssertionError:
        return True
    except BackendError:
        return False
    raise AssertionError("it has succeeded")


@pytest.fixture
def connected() -> Iterator[Callable[[int], Measured]]:
    """Makes groups, which are closed in the end."""
    with closed_later(Measured) as make:
        yield make


def use_everything(ranks: Measured) -> None:
    """Every collective but alltoall, small and large; results are checked."""
    size = ranks.size
    counts = [(5 * rank) % 7 for rank in range(size)]

    def rank(place: int) -> None:
        backend = ranks.backends[place]
        for count in (1, 5000, 300_000):
            array = np.arange(count) + float(place)
            finish(backend.allreduce(Buffer.of_array(array), ReduceOp.SUM))
            np.testing.assert_array_equal(array, np.arange(count) * float(size) + sum(range(size)))
        for root in range(size):
            for count in (3, 9000):
                check_broadcast(backend, place, root, count)
        check_rows(backend, place, counts)

    ranks.run(rank)


def exchange(ranks: Measured) -> None:
    """An alltoall; its result is checked."""
    ranks.run(lambda place: check_alltoall(ranks.backends[place], place, ranks.size))


@pytest.mark.extended
@pytest.mark.parametrize("size", range(2, 10))
def test_all_collectives_among_any_number_of_hosts(
    connected: Callable[[int], Measured], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(gloo, "FEW_RANKS", 1)
    monkeypatch.setattr(cube, "BYTES_PER_STEP", 1 << 16)  # so that pairs on a corner take part, too
    ranks = connected(size)
    use_everything(ranks)
    exchange(ranks)
    use_everything(ranks)
    exchange(ranks)


@pytest.mark.extended
@pytest.mark.parametrize("size", [6, 8, 9, 16])
def test_a_rank_has_few_sockets_until_all_call_alltoall(connected: Callable[[int], Measured], size: int) -> None:
    ranks = connected(size)
    use_everything(ranks)
    assert ranks.sockets <= math.log2(size) + 3
    assert ranks.threads <= 3
    exchange(ranks)
    assert ranks.sockets == size  # one for each other rank, and the listener
    use_everything(ranks)
    assert ranks.sockets == size


def few_descriptors(monkeypatch: pytest.MonkeyPatch, hard: int) -> list[int]:
    """This process has 10 open files and may have 20, or up to a hard limit; returns what limits are then set."""
    limits = [20]
    monkeypatch.setattr(descriptors, "_held", lambda: 10)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[-1], hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both[0]))
    return limits


@pytest.mark.parametrize(("hard", "raised"), [(20, 20), (4096, 10 + 3 + 256)])
def test_the_first_alltoall_raises_the_limit_on_open_files_or_says_so(
    connected: Callable[[int], Measured], monkeypatch: pytest.MonkeyPatch, hard: int, raised: int
) -> None:
    """Gloo accepts connections in a thread of its own, where an error for want of a descriptor would go unnoticed."""
    ranks = connected(8)
    limits = few_descriptors(monkeypatch, hard)
    if hard > 20:
        exchange(ranks)
    else:
        eights, what = [8] * 8, r"^rank {} of a Gloo group needs 3 more open files for connections with other ranks"

        def rank(place: int) -> None:
            sent, received = (Buffer.of_array(np.zeros(8, np.int64)) for _ in range(2))
            with pytest.raises(ConfigError, match=what.format(place)):
                finish(ranks.backends[place].alltoall(sent, received, eights, eights))

        ranks.run(rank)
    assert limits[-1] == raised


def test_too_few_descriptors_for_neighbours_are_told_at_the_start(
    connected: Callable[[int], Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_descriptors(monkeypatch, 20)
    with pytest.raises(ConnectError, match=r"rank 0 of a Gloo group needs \d more open files .*`ulimit -n 270`"):
        connected(6)


def test_a_rank_reads_its_neighbours_addresses_and_no_others(connected: Callable[[int], Measured]) -> None:
    few, many = connected(8), connected(32)
    one = few.store.nbytes / 8 / len(few.backends[0]._cube.neighbours)  # type: ignore[union-attr]
    assert many.store.nbytes / 32 <= 8 * one  # 5 more corners away than 3, and the results of all for rank 0
    assert many.store.nbytes / 32 < 2048 * 6 / 8  # at 128 ranks: 8 neighbours instead of 6
    assert many.store.requests == 2 * 32


@pytest.mark.parametrize("count", [20, 3000], ids=["whole", "in slices"])
def test_sums_are_the_same_bits_on_all_ranks_and_in_every_run(connected: Callable[[int], Measured], count: int) -> None:
    arrays = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(6)]
    results = set()
    for _ in range(2):
        ranks = connected(6)
        for _ in range(2):
            given = [array.copy() for array in arrays]
            ranks.run(
                lambda place, ranks=ranks, given=given: finish(
                    ranks.backends[place].allreduce(Buffer.of_array(given[place]), ReduceOp.SUM)
                )
            )
            results.update(array.tobytes() for array in given)
    assert len(results) == 1
    np.testing.assert_allclose(given[0], sum(arrays), rtol=1e-5, atol=1e-5)


def test_operations_of_all_kinds_end_in_any_order(connected: Callable[[int], Measured]) -> None:
    """One after another through the cube, and beside that round the ring."""
    ranks = connected(6)

    def rank(place: int) -> None:
        backend = ranks.backends[place]
        arrays = [np.full(count, place + 1.0) for count in (1_000_000, 3, 2000, 700_000, 50)]
        works = [backend.allreduce(Buffer.of_array(array), ReduceOp.SUM) for array in arrays]
        for work in reversed(works):
            finish(work)
        assert all((array == 21).all() for array in arrays)

    ranks.run(rank)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.05])
def test_a_wait_that_ends_early_breaks_nothing(connected: Callable[[int], Measured], seconds: float) -> None:
    """A wait of Gloo's own for a receive closes all connections when it ends early."""
    ranks = connected(6)
    arrays = [np.ones(100) for _ in range(6)]
    work = ranks.backends[0].allreduce(Buffer.of_array(arrays[0]), ReduceOp.SUM)
    assert not work.completes_within(seconds)
    others = [
        backend.allreduce(Buffer.of_array(array), ReduceOp.SUM)
        for backend, array in zip(ranks.backends[1:], arrays[1:], strict=True)
    ]
    for each in (work, *others):
        finish(each)
    assert all((array == 6).all() for array in arrays)


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.UINT8], ids=str)
@pytest.mark.parametrize("count", [100, 50_000], ids=["whole", "in slices"])
def test_a_lost_neighbour_ends_an_operation_in_the_middle_and_all_after_it(
    connected: Callable[[int], Measured], dtype: DType, count: int
) -> None:
    """Failures are known at once, and final when no transport touches the memory any more, which an abort brings."""
    ranks = connected(8)
    arrays = [np.ones(count, dtype.numpy_dtype) for _ in range(8)]
    works = [ranks.backends[place].allreduce(Buffer.of_array(arrays[place]), ReduceOp.SUM) for place in range(1, 8)]
    assert not works[0].completes_within(0.05)
    ranks.backends[0].abort()  # its connections end, as a killed process's do
    with pytest.raises(BackendError, match=f"Gloo allreduce of {count * dtype.itemsize} bytes"):
        finish(works[0])
    later = ranks.backends[1].allreduce(Buffer.of_array(arrays[1]), ReduceOp.SUM)
    for backend in ranks.backends:
        backend.abort()
    stuck = [place for place, work in enumerate((*works, later), 1) if is_stuck(work)]
    # Gloo adds integers by an algorithm of its own, floats are added by ours.
    assert len(stuck) <= (1 if dtype is DType.UINT8 else 0)
    for place, work in enumerate((*works, later), 1):
        if place not in stuck:
            with pytest.raises(BackendError):
                finish(work)
    aborted = ranks.backends[0]
    for place in stuck:
        ranks.abandon(1 if place == 8 else place)
    with pytest.raises(BackendError, match="aborted"):
        finish(aborted.allreduce(Buffer.of_array(arrays[0]), ReduceOp.SUM))


def test_an_abort_ends_the_first_alltoall_for_which_a_rank_does_not_come(connected: Callable[[int], Measured]) -> None:
    ranks = connected(8)
    before = ranks.sockets
    eights = [8] * 8
    memory = [(np.zeros(8), np.zeros(8)) for _ in range(8)]
    works = [
        ranks.backends[place].alltoall(Buffer.of_array(own), Buffer.of_array(whole), eights, eights)
        for place, (own, whole) in enumerate(memory)
        if place
    ]
    assert not works[0].completes_within(0.5)
    # An abort ends no connection that does not exist yet: none has been begun.
    assert ranks.sockets == before
    for backend in ranks.backends:
        backend.abort()
    for work in works:
        with pytest.raises(BackendError):
            finish(work)


def test_who_is_no_neighbour_proves_to_know_the_secret_before_the_first_alltoall(
    connected: Callable[[int], Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = connected(8)
    stranger = ranks.backends[3]
    monkeypatch.setattr(stranger, "_key", b"another")
    neighbours = stranger._cube.neighbours  # type: ignore[union-attr]
    other = next(place for place in range(8) if place != 3 and place not in neighbours)
    arrays = [(np.zeros(8), np.zeros(8)) for _ in range(8)]

    def rank(place: int) -> Work:
        own, whole = map(Buffer.of_array, arrays[place])
        return ranks.backends[place].alltoall(own, whole, [8] * 8, [8] * 8)

    works = ranks.run(rank)
    with pytest.raises(
        BackendError, match="connected as rank 3 of the group did not prove that it knows this job's secret"
    ):
        finish(works[other])
    # A connection that is being made cannot be ended by an abort: the others have theirs, or have failed to.
    strangers = {place for place in range(8) if place not in neighbours} | {3}
    for place in strangers:
        with pytest.raises(BackendError):
            finish(works[place])
    others = [ranks.backends[place] for place in range(8) if place not in strangers]
    wait_for(lambda: all(backend._all_connected for backend in others), 30)
    for backend in ranks.backends:
        backend.abort()
    for work in works:
        with pytest.raises(BackendError):
            finish(work)


def test_a_group_that_was_not_connected_leaves_no_thread_behind() -> None:
    def drivers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("hvdgloo-gloo-")}

    store, before = MemoryStore(), drivers()

    def join(rank: int) -> str:
        secret = b"another" if rank == 2 else b"secret"
        with pytest.raises(ConnectError) as raised:
            GlooBackend(store, "test/", rank, 6, "127.0.0.1", 20, secret=secret)
        return str(raised.value)

    with ThreadPoolExecutor(6) as pool:
        assert all(
            "did not prove that it knows this job's secret" in text for text in pool.map(join, range(6), timeout=30)
        )
    for thread in drivers() - before:
        thread.join(10)
        assert not thread.is_alive()


def test_the_garbage_collector_does_not_wait_for_what_is_under_way(connected: Callable[[int], Measured]) -> None:
    """Gloo's destructor waits for it, and an error's traceback refers to the group long after it has been closed."""
    ranks = connected(2)
    first, second = ranks.backends
    work = first.allreduce(Buffer.of_array(np.ones(8)), ReduceOp.SUM)  # the other one never comes
    assert not work.completes_within(0.05)
    refers: list[object] = [first._group]
    refers.append(refers)
    first.close()
    del refers
    Task(gc.collect).result()
    second.abort()
    with pytest.raises(BackendError):
        finish(work)
