"""Topologies for tests: ranks that are told on which hosts they are."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hvdgloo.topology import Host, Topology, Worker


def on_hosts(
    *slots: int, first: int = 0, identities: Sequence[str] = (), pid: int | None = None, **tree: int
) -> Topology:
    """Return the topology of hosts with these numbers of workers.

    Args:
        first: number of the first host; 0 calls it h0.
        identities: of the hosts, unless each has one of its own.
        pid: rank 0's process id, and one more for each rank; by default all are in this process.
        tree: Topology's ``control_fanin`` and ``control_tree_ranks``.
    """
    identities = identities or [f"identity {number}" for number in range(len(slots))]
    hosts = tuple(Host(f"h{number}", identity) for number, identity in enumerate(identities, first))
    places = [(host, local) for host, count in enumerate(slots) for local in range(count)]
    pids = [os.getpid()] * len(places) if pid is None else range(pid, pid + len(places))
    workers = tuple(Worker(rank, *place, pids[rank], "127.0.0.1", 0) for rank, place in enumerate(places))
    return Topology(0, hosts, workers, **tree)
