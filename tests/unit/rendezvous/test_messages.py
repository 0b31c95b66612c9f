"""Bodies with several keys and values, and topologies: there and back, and nothing trusted on the way."""

from __future__ import annotations

import zlib
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.rendezvous import _messages as messages
from hvdgloo.topology import Host, Topology, Worker

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(KEYS, max_size=20))
def test_keys(keys: list[str]) -> None:
    assert messages.unpack_keys(messages.pack_keys(keys)) == keys


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_values(values: list[bytes]) -> None:
    assert messages.unpack_values(messages.pack_values(values)) == values


@given(st.dictionaries(KEYS, st.binary(max_size=50), max_size=20))
def test_items(items: dict[str, bytes]) -> None:
    assert messages.unpack_items(messages.pack_items(items)) == items


@given(st.binary(max_size=200))
def test_anything_else_is_a_value_error(body: bytes) -> None:
    for unpack in (
        messages.unpack_keys,
        messages.unpack_values,
        messages.unpack_items,
        messages.unpack_topology,
        messages.unpack_placed,
    ):
        try:
            unpack(body)
        except ValueError:
            pass


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x00\x0f\xff\xff",
        b"\x91\xc6\xff\xff\xff\xffx",
        b"\x91\xc4\x03xx",
        b"\x91\xc4\x01xx",
        b"\x92\xc4\x01x",
    ],
)
def test_lengths_that_lie(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^not a body with values: "):
        messages.unpack_values(body)


@pytest.mark.parametrize("body", [b"{}", b"\x80", b"\x91\x01", b"\xa1a", b"\x91\x90", b"nonsense", b"\x91" * 100_000])
def test_keys_that_are_none(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^not a body with keys: "):
        messages.unpack_keys(body)


def test_more_than_fit_into_one_request() -> None:
    assert len(messages.unpack_keys(messages.pack_keys([""] * messages.MAX_COUNT))) == messages.MAX_COUNT
    with pytest.raises(ValueError, match=f"<= {messages.MAX_COUNT}"):
        messages.unpack_keys(messages.pack_keys([""] * (messages.MAX_COUNT + 1)))


def test_a_key_given_twice() -> None:
    with pytest.raises(ValueError, match="2 keys, but only 1 different"):
        messages.unpack_items(msgspec.msgpack.encode([("a", b"1"), ("a", b"2")]))


ADDRESSES = st.sampled_from(["127.0.0.1", "10.0.0.5", "fd00::7", ""])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    slots = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    hosts = [Host(draw(KEYS), draw(KEYS), tuple(draw(st.lists(ADDRESSES, max_size=3)))) for _ in slots]
    places = [(host, local) for host, count in enumerate(slots) for local in draw(st.permutations(range(count)))]
    numbers = st.integers(0, 2**31 - 1)
    workers = [
        Worker(rank, *place, draw(numbers), draw(ADDRESSES), draw(st.integers(0, 2**16 - 1)))
        for rank, place in enumerate(places)
    ]
    return Topology(draw(st.integers(0, 2**40)), tuple(hosts), tuple(workers), draw(numbers), draw(numbers))


@given(topologies(), st.data())
def test_a_topology_and_a_rank(topology: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, topology.size - 1))
    assert messages.unpack_placed(messages.pack_placed(rank, messages.pack_topology(topology))) == (rank, topology)


def _cluster(hosts: int, slots: int, random: Random) -> Topology:
    """Workers that were started one after the other on hosts that have been up for long."""
    first_pid = [random.randrange(1 << 16, 1 << 22) for _ in range(hosts)]
    places = [(host, local) for host in range(hosts) for local in range(slots)]
    return Topology(
        0,
        tuple(Host(f"node{i:04d}", random.randbytes(8).hex(), (f"10.12.{i >> 8}.{i & 255}",)) for i in range(hosts)),
        tuple(
            Worker(
                rank,
                host,
                local,
                first_pid[host] + random.randrange(3, 100) * local,
                f"10.12.{host >> 8}.{host & 255}",
                0 if local else random.randrange(32768, 65536),
            )
            for rank, (host, local) in enumerate(places)
        ),
    )


@pytest.mark.parametrize(("hosts", "slots"), [(128, 8), (256, 4), (512, 8)])
def test_a_topology_takes_less_than_10_bytes_per_worker(hosts: int, slots: int) -> None:
    topology = _cluster(hosts, slots, Random(hosts))
    assert len(messages.pack_topology(topology)) < 10 * topology.size


@pytest.mark.parametrize(
    ("pids", "says"),
    [([1, 2, 3], "3 process ids, but another number of workers"), ([1], "1 process ids"), ([1, "2"], "not a topology")],
)
def test_a_topology_whose_columns_do_not_fit(pids: list[object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        messages.unpack_topology(
            zlib.compress(msgspec.msgpack.encode([0, [["h", "id", 2, []]], pids, {}, {}, {}, 16, 33]))
        )


def test_a_topology_that_is_cut_off() -> None:
    packed = messages.pack_topology(_cluster(8, 2, Random(0)))
    with pytest.raises(ValueError, match="cut off"):
        messages.unpack_topology(packed[:-1])


def test_a_topology_that_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_LARGEST", 1 << 20)
    with pytest.raises(ValueError, match="larger than 1048576 bytes"):
        messages.unpack_topology(zlib.compress(bytes(1 << 22)))


def test_a_rank_that_the_topology_does_not_have() -> None:
    with pytest.raises(ValueError, match="rank 2 is none of the topology's 2"):
        messages.unpack_placed(messages.pack_placed(2, messages.pack_topology(_cluster(1, 2, Random(0)))))
