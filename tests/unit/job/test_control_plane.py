"""The search of ranks of one process, as if on several hosts, for the ranks that they report to."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import pytest

from hvdgloo._engine.tree_position import position_of
from hvdgloo._job.control_plane import ControlPlane, World, tree_position_of
from hvdgloo._net.handshake import Handshake, Link, listen
from hvdgloo.config import Config
from hvdgloo.errors import ConnectError
from hvdgloo.rendezvous import RendezvousClient
from hvdgloo.topology import Topology
from tests.support.rendezvous import InProcess
from tests.support.topologies import on_hosts

SECRET = bytes(range(32))
Found = tuple[dict[int, Link], dict[str, Any]]


def topology(slots: Sequence[int], fanin: int = 16, tree_ranks: int = 2, strange: Sequence[int] = ()) -> Topology:
    """
    Args:
        strange: hosts whose ranks do not agree on where they are.
    """
    identities = ["" if number in strange else f"identity {number}" for number in range(len(slots))]
    return on_hosts(*slots, identities=identities, pid=100, control_fanin=fanin, control_tree_ranks=tree_ranks)


class _AbsentError(Exception):
    """This rank died after it had registered."""


def met(
    there: Topology, configs: Sequence[Config], *, known: bool = True, absent: Sequence[int] = ()
) -> list[Found | BaseException]:
    """Return each rank's findings, or the reason for its failure."""
    client = cast(RendezvousClient, InProcess())
    key = f"0.0.{os.urandom(4).hex()}"
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", None))
        first = listener.getsockname()[:2] if known else None

        def connect(rank: int) -> Found:
            config = configs[rank]
            control_plane = ControlPlane(config, SECRET, None, client, World(rank, there, key, 0, first), "127.0.0.1")
            if rank in absent:
                raise _AbsentError
            place = tree_position_of(rank, there)
            return control_plane.connect(place, listener if rank == 0 else None, [[0, 1]])

        pool = stack.enter_context(ThreadPoolExecutor(there.size))
        futures = [pool.submit(connect, rank) for rank in range(there.size)]
        results = [future.exception(20) or future.result() for future in futures]
        for result in results:
            if isinstance(result, tuple):
                for link in result[0].values():
                    stack.callback(link.sock.close)
    return results


def config(**settings: Any) -> Config:
    return Config(secret=SECRET, connect_timeout=5.0, start_timeout=5.0, **settings)


@pytest.mark.parametrize("known", [True, False], ids=["rank 0 is known", "rank 0 says where it is"])
@pytest.mark.parametrize(("slots", "fanin"), [((2, 3, 1, 2), 1), ((2, 3, 1, 2), 2), ((1, 1, 1, 1), 16)], ids=str)
def test_each_rank_meets_its_neighbours_and_knows_what_rank_0_has_decided(
    slots: Sequence[int], fanin: int, known: bool
) -> None:
    size = sum(slots)
    configs = [config(fusion_threshold=100 + rank) for rank in range(size)]
    results = met(topology(slots, fanin), configs, known=known)
    for rank, found in enumerate(results):
        assert isinstance(found, tuple), found
        links, decided = found
        place = position_of(rank, slots, fanin)
        assert set(links) == {*place.children, *([place.parent] if rank else [])}
        assert decided["fusion_threshold"] == 100
        assert decided["process_sets"] == [[0, 1]]
        assert abs(decided["clock_offset"]) < 0.5
        local = {neighbour for neighbour, link in links.items() if link.sock.family.name == "AF_UNIX"}
        assert local == set(links) & set(topology(slots).local_ranks(rank))
    assert len({found[1]["world"] for found in results if isinstance(found, tuple)}) == 1


@pytest.mark.parametrize(
    ("slots", "settings", "expected"),
    [
        ((17, 8, 8), {"tree_ranks": 33}, True),
        ((16, 8, 8), {"tree_ranks": 33}, False),
        ((32, 32), {}, False),
        ((11, 11, 11), {"fanin": 0}, False),
        ((1, 1, 1), {"tree_ranks": 3}, True),
        ((1, 1, 1), {"tree_ranks": 4}, False),
        ((2, 2, 2), {"strange": [1]}, False),
        ((2, 1, 2), {"strange": [1]}, True),
    ],
)
def test_a_tree_is_for_many_ranks_on_three_hosts_or_more(
    slots: Sequence[int], settings: dict[str, Any], expected: bool
) -> None:
    """All ranks of a host with one identity can meet at an abstract socket; a rank that is alone need not."""
    assert (tree_position_of(0, topology(slots, **settings)) is not None) == expected


@pytest.mark.parametrize("fanin", [0, 1, 2])
def test_ranks_with_other_settings_take_the_tree_of_rank_0(fanin: int) -> None:
    configs = [config(control_fanin=rank % 3, control_tree_ranks=2 + 97 * (rank % 2)) for rank in range(8)]
    slots = (2, 2, 2, 2)
    for rank, found in enumerate(met(topology(slots, fanin), configs)):
        assert isinstance(found, tuple), found
        if fanin:
            place = position_of(rank, slots, fanin)
            assert set(found[0]) == {*place.children, *([place.parent] if rank else [])}
        else:
            assert set(found[0]) == ({0} if rank else set(range(1, 8)))


def test_a_leader_waits_for_its_host_s_ranks_and_for_other_hosts_at_the_same_time() -> None:
    """Rank 1 waits for rank 2, on its own host, which is absent; nothing is wrong with rank 3, which reports to it."""
    hurried = Config(secret=SECRET, connect_timeout=0.5, start_timeout=60.0)
    results = met(topology((1, 2, 1), 1), [hurried] * 4, absent=[2])
    assert isinstance(results[1], ConnectError)
    assert str(results[1]).startswith("rank 1 waited 0.5 s on ")
    assert "for control connections from rank 2 (host h1" in str(results[1])
    assert isinstance(results[3], tuple)


def test_a_leader_that_has_registered_is_waited_for_no_longer_than_for_a_connection() -> None:
    hurried = Config(secret=SECRET, connect_timeout=0.5, start_timeout=8.0)
    begin = time.monotonic()
    results = met(topology((1, 1, 1), 1), [hurried] * 3, absent=[1])
    assert time.monotonic() - begin < 5
    assert isinstance(results[2], ConnectError)
    assert results[2].rank == 1
    assert "rank 2 (host h2, pid 102) waited 0.5 s for rank 1 (host h1, pid 101) to say where it listens" in str(
        results[2]
    )
    assert "rank 1 (host h1" in str(results[0])


def test_a_leader_that_does_not_come_is_named_by_its_host_s_other_ranks() -> None:
    there = topology((1, 2, 1))
    hurried = Config(secret=SECRET, connect_timeout=0.2, start_timeout=0.2)
    client = cast(RendezvousClient, InProcess())
    control_plane = ControlPlane(hurried, SECRET, None, client, World(2, there, "alone"), "127.0.0.1")
    with pytest.raises(
        ConnectError, match=r"rank 2 \(host h1, .* not connect to rank 1 \(host h1.* same host"
    ) as error:
        control_plane.connect(tree_position_of(2, there), None, [])
    assert error.value.rank == 1


def test_a_proof_for_one_leader_is_none_for_another() -> None:
    def describe(rank: int) -> str:
        return f"rank {rank} (somewhere)"

    with listen("127.0.0.1", None) as listener, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(Handshake(SECRET, 0, 0, parent=4).accept_all, listener, [5], {}, 0.5, describe)
        with pytest.raises(ConnectError, match=r"rank 5 .* could not connect to rank 3 .* does not know this job's"):
            Handshake(SECRET, 0, 0, parent=3).connect(*listener.getsockname()[:2], 5, 5.0, describe)
        with pytest.raises(ConnectError, match=r"^rank 4 waited .* from rank 5"):
            accepting.result(10)
