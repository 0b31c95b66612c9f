"""How ranks of one process, as if on several hosts, find those that they report to."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import pytest

from hvdgloo._engine.seat import seat
from hvdgloo._job.links import Meeting, seat_of
from hvdgloo._net.handshake import Handshake, Link, listen
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, ConnectError
from hvdgloo.rendezvous import MemoryStore, RendezvousClient
from hvdgloo.topology import Host, Topology, Worker

SECRET = bytes(range(32))
Found = tuple[dict[int, Link], dict[str, Any]]


def topology(slots: Sequence[int]) -> Topology:
    hosts = tuple(Host(f"h{number}", f"identity {number}") for number in range(len(slots)))
    places = [(host, local) for host, count in enumerate(slots) for local in range(count)]
    workers = (Worker(rank, *place, 100 + rank, "127.0.0.1", 0) for rank, place in enumerate(places))
    return Topology(0, hosts, tuple(workers))


class _Client:
    """The rendezvous service, in this process."""

    def __init__(self) -> None:
        self.kept = MemoryStore()

    def store(self, scope: str, *, timeout: float) -> MemoryStore:
        return self.kept


def met(slots: Sequence[int], configs: Sequence[Config], *, known: bool = True) -> list[Found | BaseException]:
    """What each rank gets to know, or why it cannot."""
    there, client = topology(slots), cast(RendezvousClient, _Client())
    key = f"0.0.{os.urandom(4).hex()}"
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", None))
        first = listener.getsockname()[:2] if known else None

        def connect(rank: int) -> Found:
            config = configs[rank]
            meeting = Meeting(config, SECRET, None, client, key, 0, there, rank, "127.0.0.1")
            place = seat_of(rank, there, config)
            return meeting.connect(place, listener if rank == 0 else None, first, [[0, 1]])

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
    configs = [config(control_fanin=fanin, control_tree_ranks=2, fusion_threshold=100 + rank) for rank in range(size)]
    results = met(slots, configs, known=known)
    for rank, found in enumerate(results):
        assert isinstance(found, tuple), found
        links, decided = found
        place = seat(rank, slots, fanin)
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
        ((17, 8, 8), {}, True),
        ((16, 8, 8), {}, False),
        ((32, 32), {}, False),
        ((11, 11, 11), {"control_fanin": 0}, False),
        ((1, 1, 1), {"control_tree_ranks": 3}, True),
        ((1, 1, 1), {"control_tree_ranks": 4}, False),
    ],
)
def test_a_tree_is_for_many_ranks_on_three_hosts_or_more(
    slots: Sequence[int], settings: dict[str, int], expected: bool
) -> None:
    assert (seat_of(0, topology(slots), config(**settings)) is not None) == expected


def test_a_rank_with_another_setting_is_told() -> None:
    configs = [config(control_fanin=2, control_tree_ranks=2) for _ in range(3)]
    configs[2] = config(control_fanin=3, control_tree_ranks=2)
    results = met((1, 1, 1), configs)
    assert isinstance(results[2], ConfigError)
    assert re.match(
        r"HVDGLOO_CONTROL_FANIN=3 and HVDGLOO_CONTROL_TREE_RANKS=2 on rank 2 .*, but 2 and 2 on rank 0",
        str(results[2]),
    )


def test_a_leader_that_does_not_come_is_named_by_its_host_s_other_ranks() -> None:
    there = topology((1, 2, 1))
    hurried = Config(secret=SECRET, connect_timeout=0.2, control_tree_ranks=2)
    client = cast(RendezvousClient, _Client())
    meeting = Meeting(hurried, SECRET, None, client, "alone", 0, there, 2, "127.0.0.1")
    with pytest.raises(
        ConnectError, match=r"rank 2 \(host h1, .* not connect to rank 1 \(host h1.* same host"
    ) as error:
        meeting.connect(seat_of(2, there, hurried), None, None, [])
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
