"""Bodies of requests and answers: keys, values, and the topology. Pure.

They are msgpack, like all messages between processes. Values are bytes and stay bytes. A reader trusts no length: the
codec checks each against what really arrived.

Every worker gets the whole topology, so in a job of N workers the server sends N times N entries. It is written by
columns and compressed once. Derivable values are left out: an address that is the host's first one, a port that no
worker listens on. Process ids, which are close to each other on one host, are written as differences.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec

from hvdgloo._net.codec import Codec, Count, Message
from hvdgloo.topology import Host, Topology, Worker

MAX_COUNT = 1 << 20
"""Most keys or values in one request."""

_MOST = msgspec.Meta(max_length=MAX_COUNT)
_KEYS: Codec[list[str]] = Codec(Annotated[list[str], _MOST], "body with keys")
_VALUES: Codec[list[bytes]] = Codec(Annotated[list[bytes], _MOST], "body with values")
_ITEMS: Codec[list[tuple[str, bytes]]] = Codec(Annotated[list[tuple[str, bytes]], _MOST], "body with items")


def pack_keys(keys: Sequence[str]) -> bytes:
    return _KEYS.encode(list(keys))


def unpack_keys(body: bytes) -> list[str]:
    """Decode a body with keys.

    Raises:
        ValueError: the body is not a list of keys; the text says why.
    """
    return _KEYS.decode(body)


def pack_values(values: Sequence[bytes]) -> bytes:
    return _VALUES.encode(list(values))


def unpack_values(body: bytes) -> list[bytes]:
    """Decode a body with values.

    Raises:
        ValueError: the body is something else; the text says what.
    """
    return _VALUES.decode(body)


def pack_items(items: Mapping[str, bytes]) -> bytes:
    return _ITEMS.encode(list(items.items()))


def unpack_items(body: bytes) -> dict[str, bytes]:
    """Decode a body with items.

    Raises:
        ValueError: the body is not what ``pack_items`` makes, or names a key twice.
    """
    pairs = _ITEMS.decode(body)
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError(f"{len(pairs)} keys, but only {len(items)} different ones")
    return items


class _Topology(Message, frozen=True):
    """A topology by columns.

    Attributes:
        hosts: name, identity, number of workers, and addresses of each host.
        pids: process id of each worker; for all but a host's first, the difference from the one before.
        addresses: address by rank, for workers that do not have their host's first one.
        ports: port by rank, for workers that have one.
        local_ranks: local rank by rank, for workers whose local rank is not their index on their host.
        control_fanin, control_tree_ranks: see ``hvdgloo.topology.Topology``.
    """

    epoch: int
    hosts: list[tuple[str, str, Count, list[str]]]
    pids: list[int]
    addresses: dict[int, str]
    ports: dict[int, int]
    local_ranks: dict[int, int]
    control_fanin: Count
    control_tree_ranks: Count


_LARGEST = 1 << 28
"""Most bytes of a topology, before compression."""


class _Placed(Message, frozen=True):
    rank: Count
    topology: bytes


_TOPOLOGY: Codec[_Topology] = Codec(_Topology, "topology")
_PLACED: Codec[_Placed] = Codec(_Placed, "answer to a worker")


def pack_topology(topology: Topology) -> bytes:
    """Encode a topology, once for all workers."""
    slots, workers = topology.slots, topology.workers
    places = [place for n in slots for place in range(n)]
    before = [0, *(worker.pid for worker in workers)]
    usual = [next(iter(host.addresses), "") for host in topology.hosts]
    columns = _Topology(
        topology.epoch,
        [(host.name, host.identity, n, list(host.addresses)) for host, n in zip(topology.hosts, slots, strict=True)],
        [worker.pid - (before[worker.rank] if places[worker.rank] else 0) for worker in workers],
        {worker.rank: worker.address for worker in workers if worker.address != usual[worker.host]},
        {worker.rank: worker.port for worker in workers if worker.port},
        {worker.rank: worker.local_rank for worker in workers if worker.local_rank != places[worker.rank]},
        topology.control_fanin,
        topology.control_tree_ranks,
    )
    return zlib.compress(_TOPOLOGY.encode(columns))


def unpack_topology(packed: bytes) -> Topology:
    """Decode a topology, as the inverse of ``pack_topology``.

    Raises:
        ValueError: the bytes are something else; the text says what.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, _LARGEST)
    except zlib.error as error:
        raise ValueError(f"not a topology: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"not a topology: it is cut off, or larger than {_LARGEST} bytes")
    columns = _TOPOLOGY.decode(data)
    if sum(slots for _, _, slots, _ in columns.hosts) != len(columns.pids):
        raise ValueError(f"not a topology: {len(columns.pids)} process ids, but another number of workers")
    return Topology(
        columns.epoch,
        tuple(Host(name, identity, tuple(addresses)) for name, identity, _, addresses in columns.hosts),
        tuple(_workers(columns)),
        columns.control_fanin,
        columns.control_tree_ranks,
    )


def _workers(columns: _Topology) -> Iterator[Worker]:
    ranks = itertools.count()
    for host, (_, _, slots, addresses) in enumerate(columns.hosts):
        usual, pid = next(iter(addresses), ""), 0
        for place in range(slots):
            rank = next(ranks)
            pid += columns.pids[rank]
            local_rank = columns.local_ranks.get(rank, place)
            yield Worker(rank, host, local_rank, pid, columns.addresses.get(rank, usual), columns.ports.get(rank, 0))


def pack_placed(rank: int, topology: bytes) -> bytes:
    """Encode the answer to one worker: its rank, and the result of ``pack_topology``."""
    return _PLACED.encode(_Placed(rank, topology))


def unpack_placed(body: bytes) -> tuple[int, Topology]:
    """Decode the answer to a worker: its rank, and the topology.

    Raises:
        ValueError: the body is something else, or the topology has no such rank; the text says what.
    """
    placed = _PLACED.decode(body)
    topology = unpack_topology(placed.topology)
    if placed.rank >= topology.size:
        raise ValueError(f"rank {placed.rank} is none of the topology's {topology.size}")
    return placed.rank, topology
