"""Topology: its arithmetic against counting by hand, for any slots."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.topology import Host, Topology, Worker, abbreviated, fill

Slots = list[int]
slots_of_hosts = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def _topology(slots: Slots) -> Topology:
    places = [(host, local) for host, count in enumerate(slots) for local in range(count)]
    return Topology(
        0,
        tuple(Host(f"h{i}", f"id{i}", (f"10.0.0.{i}", f"fd00::{i}")) for i in range(len(slots))),
        tuple(
            Worker(rank, host, local, 100 + rank, f"10.0.0.{host}", rank) for rank, (host, local) in enumerate(places)
        ),
    )


@given(slots_of_hosts)
def test_arithmetic_agrees_with_counting(slots: Slots) -> None:
    topology = _topology(slots)
    assert topology.size == sum(slots)
    assert topology.slots == tuple(slots)
    assert topology.is_homogeneous == (min(slots) == max(slots))
    rank = 0
    for host, count in enumerate(slots):
        first = rank
        for local in range(count):
            assert topology.local_size(rank) == count
            assert topology.local_ranks(rank) == tuple(range(first, first + count))
            # Hosts that are large enough to have this local rank, in order.
            peers = [h for h, n in enumerate(slots) if n > local]
            assert topology.cross_size(rank) == len(peers)
            assert topology.cross_rank(rank) == peers.index(host)
            assert topology.cross_ranks(rank) == tuple(sum(slots[:h]) + local for h in peers)
            rank += 1


@given(slots_of_hosts)
def test_cross_groups_and_local_groups_both_divide_the_ranks(slots: Slots) -> None:
    topology = _topology(slots)
    for groups in (topology.cross_ranks, topology.local_ranks):
        distinct = {groups(rank) for rank in range(topology.size)}
        assert sorted(rank for group in distinct for rank in group) == list(range(topology.size))
        assert all(rank in groups(rank) for rank in range(topology.size))


def test_travels_as_pickle_after_it_was_asked() -> None:
    topology = _topology([2, 1])
    assert topology.slots == (2, 1)  # cached in the instance
    assert pickle.loads(pickle.dumps(topology)) == topology


def _workers(*places: tuple[int, int, int]) -> tuple[Worker, ...]:
    return tuple(Worker(rank, host, local, 1, "127.0.0.1", 0) for rank, host, local in places)


HOSTS = (Host("a", "1"), Host("b", "2"))


@pytest.mark.parametrize(
    ("hosts", "workers", "says"),
    [
        pytest.param(HOSTS, _workers((0, 0, 0), (2, 1, 0)), "worker 1 .* rank is 2", id="a rank is skipped"),
        pytest.param(HOSTS, _workers((1, 0, 0), (0, 1, 0)), "worker 0 .* rank is 1", id="ranks in another order"),
        pytest.param(
            HOSTS,
            _workers((0, 0, 0), (1, 1, 1)),
            "1 workers of host 1 have the local ranks \\[1\\]",
            id="local rank skipped",
        ),
        pytest.param(
            HOSTS,
            _workers((0, 0, 0), (1, 0, 0)),
            "2 workers of host 0 have the local ranks \\[0, 0\\]",
            id="local rank twice",
        ),
        pytest.param(HOSTS, _workers((0, 1, 0), (1, 0, 0)), "host 1, but", id="hosts in another order"),
        pytest.param(HOSTS, _workers((0, 0, 0), (1, 1, 0), (2, 0, 1)), "rank 2 is on host 0, but", id="back"),
        pytest.param(HOSTS, _workers((0, 0, 0)), "2 hosts, but workers on 1", id="a host without workers"),
        pytest.param(HOSTS[:1], _workers((0, 0, 0), (1, 1, 0)), "1 hosts, but workers on 2", id="a host too few"),
        pytest.param(HOSTS, (), "2 hosts, but workers on 0", id="no workers"),
    ],
)
def test_invalid_topologies_are_refused(hosts: tuple[Host, ...], workers: tuple[Worker, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Topology(0, hosts, workers)


@given(slots_of_hosts.filter(lambda slots: sum(slots) > 1), st.data())
def test_any_two_workers_exchanged_are_refused(slots: Slots, data: Any) -> None:
    topology = _topology(slots)
    i, j = data.draw(st.lists(st.integers(0, topology.size - 1), min_size=2, max_size=2, unique=True))
    workers = list(topology.workers)
    workers[i], workers[j] = workers[j], workers[i]
    with pytest.raises(ValueError, match="says that its rank is"):
        Topology(0, topology.hosts, tuple(workers))


def test_local_is_one_host() -> None:
    topology = Topology.local(3, pid=42, epoch=7, name="here")
    assert (topology.size, topology.slots, topology.epoch) == (3, (3,), 7)
    assert topology.describe(2) == "rank 2 (host here, pid 42)"


@given(slots_of_hosts, st.data())
def test_fill_fills_hosts_in_order(slots: Slots, data: Any) -> None:
    count = data.draw(st.integers(0, sum(slots)))
    places = fill([f"h{i}" for i in range(len(slots))], slots, count)
    assert places == sorted(places)
    assert len(places) == count == len(set(places))
    for host, n in enumerate(slots):
        locals_ = [local for place, local in places if place == host]
        assert locals_ == list(range(len(locals_)))
        # Only the last host in use may have room.
        assert len(locals_) == n or all(place <= host for place, _ in places)


def test_fill_says_how_many_slots_there_are() -> None:
    with pytest.raises(ValueError, match=r"5 processes .* only 3 slots \(a:2, b:1\)"):
        fill(["a", "b"], [2, 1], 5)


@pytest.mark.parametrize(
    ("separator", "expected"),
    [(", ", "h1: 2, h2: 2 and 3 more"), ("; ", "h1: 2; h2: 2; and 3 more")],
)
def test_long_lists_are_cut_off(separator: str, expected: str) -> None:
    parts = [f"h{number}: 2" for number in range(1, 6)]
    assert abbreviated(parts, 2, separator) == expected
    assert abbreviated(parts[:2], 2, separator) == expected.partition(" and")[0].rstrip(";")
