"""The planes of ranks on several hosts, as ``hvd.init()`` opens them: real shared memory and real Gloo, ranks as
threads, of which some are told that they are on other hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdgloo._backends.base import Backend, Encoding, has_ended
from hvdgloo._backends.hierarchical import HierarchicalBackend
from hvdgloo._backends.select import Planes, gloo_provider, plane_settings
from hvdgloo.config import Config
from hvdgloo.errors import BackendError, ConnectError, RendezvousError
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer, ReduceOp, WireFormat
from tests.support.backends import Ranks, check_alltoall, check_broadcast, check_rows, finish
from tests.support.selection import extended
from tests.support.topologies import on_hosts
from tests.support.world import SECRET, closed_later

pytestmark = pytest.mark.skipif(not gloo_provider("auto"), reason="hosts need Gloo, and that needs torch or pygloo")

SLICED, WHOLE = 1, 1 << 60
"""Thresholds with which everything is cut into slices for all ranks of a host, and nothing."""


class Hosts(Ranks[Backend]):
    """A backend for each rank.

    Args:
        sizes: ranks on each host.
        threshold: from how many bytes on tensors are cut.
        identities: of the hosts; ranks of a host whose identity is empty share no memory.
    """

    def __init__(self, sizes: Sequence[int], threshold: int, identities: Sequence[str] = ()) -> None:
        size = sum(sizes)
        config = Config(
            secret=SECRET,
            connect_timeout=20.0,
            hierarchical_threshold=threshold,
            hierarchical_distribution_threshold=threshold,
        )
        topology, store = on_hosts(*sizes, identities=identities), MemoryStore()

        def open_planes(rank: int) -> Backend:
            planes = Planes(config, plane_settings(config), topology, rank, store, "test/", "127.0.0.1")
            return planes.open(0, range(size))

        super().__init__(size, open_planes)


@pytest.fixture
def hosts() -> Iterator[Callable[..., Hosts]]:
    """Makes hosts, whose ranks are closed in the end."""
    with closed_later(Hosts) as make:
        yield make


def use_everything(made: Hosts, count: int) -> None:
    """Every collective; results are checked.

    Args:
        count: of elements, more or less.
    """
    size = made.size
    rows = [count * ((rank % 3) + 1) // size for rank in range(size)]

    def rank(place: int) -> None:
        backend = made.backends[place]
        for op, expected in ((ReduceOp.SUM, sum(range(size))), (ReduceOp.MAX, size - 1), (ReduceOp.MIN, 0)):
            array = np.full(count, place)
            finish(backend.allreduce(Buffer.of_array(array), op))
            assert (array == expected).all()
        for root in range(size):
            check_broadcast(backend, place, root, count)
        check_rows(backend, place, rows)
        check_alltoall(backend, place, size)

    made.run(rank)


@pytest.mark.parametrize("threshold", [SLICED, WHOLE], ids=["in slices", "whole"])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (3, 1, 2), (2, 1, 1, 1, 2, 1)], ids=str)
def test_all_collectives_on_hosts_of_any_number_and_size(
    hosts: Callable[..., Hosts], sizes: tuple[int, ...], threshold: int
) -> None:
    made = hosts(sizes, threshold)
    assert all(isinstance(backend, HierarchicalBackend) for backend in made.backends)
    for count in (3, 5000):
        use_everything(made, count)


@pytest.mark.parametrize("count", [5, 9000])
@pytest.mark.parametrize("threshold", [SLICED, WHOLE], ids=["in slices", "whole"])
def test_sums_are_the_same_bits_on_all_ranks_and_in_every_run(
    hosts: Callable[..., Hosts], threshold: int, count: int
) -> None:
    made = hosts((2, 1, 3), threshold)
    arrays = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(6)]
    results = set()
    for _ in range(3):
        given = [array.copy() for array in arrays]
        made.run(
            lambda place, given=given: finish(
                made.backends[place].allreduce(Buffer.of_array(given[place]), ReduceOp.SUM)
            )
        )
        results.update(array.tobytes() for array in given)
    assert len(results) == 1
    np.testing.assert_allclose(given[0], sum(arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="pygloo does not encode")
@pytest.mark.parametrize("sizes", [(2, 2), (1,) * 7, *extended((1, 1, 1), (2, 1, 1, 1, 1, 1))], ids=str)
def test_encoded_sums_are_the_same_bits_on_all_ranks_beside_others_that_are_exact(
    hosts: Callable[..., Hosts], sizes: tuple[int, ...]
) -> None:
    """Large enough for several pieces, and for the ring; ranks wait in different orders."""
    made, count = hosts(sizes, SLICED), 300_001
    arrays = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(made.size)]
    exact = np.sum(arrays, 0, np.float64)

    def rank(place: int) -> list[np.ndarray]:
        backend, results = made.backends[place], []
        assert isinstance(backend, Encoding)
        for form in (WireFormat.INT8, WireFormat.INT4, WireFormat.BF16):
            encoded, plain, after = arrays[place].copy(), np.full(count, place), arrays[place].copy()
            works = [
                backend.allreduce_encoded(Buffer.of_array(encoded), form),
                backend.allreduce(Buffer.of_array(plain), ReduceOp.SUM),
                backend.allreduce_encoded(Buffer.of_array(after), form),
            ]
            for work in works if place % 2 else reversed(works):
                finish(work)
            assert (plain == sum(range(made.size))).all()
            assert encoded.tobytes() == after.tobytes()
            results.append(encoded)
        return results

    for form, results in zip(("int8", "int4", "bf16"), zip(*made.run(rank), strict=True), strict=True):
        assert len({result.tobytes() for result in results}) == 1
        error = np.linalg.norm(results[0] - exact) / np.linalg.norm(exact)
        assert 0 < error < {"int8": 0.016, "int4": 0.26, "bf16": 0.006}[form]


@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="pygloo does not encode")
def test_an_encoded_sum_fails_when_its_group_is_aborted(hosts: Callable[..., Hosts]) -> None:
    made = hosts((1, 1), SLICED)
    backend = made.backends[0]
    assert isinstance(backend, Encoding)
    array = np.ones(100_000, np.float32)
    work = backend.allreduce_encoded(Buffer.of_array(array), WireFormat.INT8)
    assert not work.completes_within(0.05)
    backend.abort()
    with pytest.raises(BackendError, match=r"aborted|allreduce of 400000 bytes as int8"):
        finish(work)
    assert has_ended(work, 10)


def test_if_one_host_cannot_share_memory_all_ranks_use_gloo(
    hosts: Callable[..., Hosts], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = hosts((2, 1, 2), WHOLE, ("one", "two", ""))
    assert {backend.name for backend in made.backends} == {"gloo"}
    assert "ranks of one host do not share memory everywhere" in caplog.text
    use_everything(made, 50)


def test_ranks_are_told_what_has_kept_their_host_s_leader_from_the_other_hosts() -> None:
    """They wait for its word longer than it waits for the other host, whose rank has died."""
    topology, store = on_hosts(2, 1, pid=7), MemoryStore()
    config = Config(secret=SECRET, connect_timeout=1.0)

    def failure(rank: int) -> BaseException | None:
        planes = Planes(config, plane_settings(config), topology, rank, store, "test/", "127.0.0.1")
        with pytest.raises((ConnectError, RendezvousError)) as raised:
            planes.open(0, range(3))
        return raised.value

    with ThreadPoolExecutor(2) as pool:
        leader, member = pool.map(failure, range(2), timeout=30)
    assert isinstance(member, ConnectError)
    assert member.rank == 0
    assert str(member) == f"rank 0 (host h0, pid 7) could not be connected with the other hosts: {leader}"
