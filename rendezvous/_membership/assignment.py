"""The assignment of ranks to workers in an epoch, and the rank with the newest state.

Previous members keep their order, and hosts stay in the order of their lowest previous rank; new hosts follow. The
ranks of a host are consecutive, its previous members first: rank 0 was always a member before, unless no worker was.
The local rank follows the slots instead: a new worker starts in the lowest free slot, and once all slots of its host
are in use, its local rank is its slot. So the GPU that it takes at its start is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from hvdgloo.rendezvous._worker_info import WorkerInfo
from hvdgloo.topology import Host, Topology, Worker

NO_STATE = -1
"""Serial of a worker that never had the job's state."""


class Candidate(msgspec.Struct, frozen=True):
    """A worker that can be a member of the next epoch.

    Attributes:
        worker: its id.
        host, slot: its host and slot.
        rank: its rank in the last epoch; None for a new worker.
        place: sort key among new workers.
        serial, digest: serial number and digest of its newest commit.
        host_name: the host's name in messages.
        machine: hosts with the same machine form one host of the epoch; empty for a host by itself.
    """

    worker: str
    host: str
    slot: int
    rank: int | None
    place: tuple[int, int]
    serial: int = NO_STATE
    digest: str = ""
    host_name: str = ""
    machine: str = ""


class Member(msgspec.Struct, frozen=True):
    """A member of an epoch; its rank is its index in ``Assignment.members``.

    Attributes:
        worker: the worker's id.
        host, slot: its host and slot.
        local_rank: its rank among the members on its host.
        host_name: the host's name in messages.
        machine: as in ``Candidate``.
    """

    worker: str
    host: str
    slot: int
    local_rank: int
    host_name: str = ""
    machine: str = ""

    @property
    def home(self) -> str:
        """Its host in the epoch's topology."""
        return self.machine or self.host


class Assignment(msgspec.Struct, frozen=True, dict=True):
    """The members of an epoch.

    Attributes:
        epoch: number of the epoch.
        members: the members, by rank.
        root: rank that has the newest state.
        everyone: True if all members have that state already, so that nothing needs to be sent.
        fresh: ids of new workers.
    """

    epoch: int
    members: tuple[Member, ...]
    root: int = 0
    everyone: bool = False
    fresh: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Worker id to rank."""
        return {member.worker: rank for rank, member in enumerate(self.members)}

    @cached_property
    def slots(self) -> tuple[tuple[str, int], ...]:
        """Hosts in order of their ranks, and the number of members on each."""
        counts: dict[str, int] = {}
        for member in self.members:
            counts[member.home] = counts.get(member.home, 0) + 1
        return tuple(counts.items())

    @cached_property
    def workers(self) -> Counter[str]:
        """The number of members on each host, as discovery names them."""
        return Counter(member.host for member in self.members)


NO_MEMBERS = Assignment(-1, ())
"""Assignment before the first epoch."""


def choose(epoch: int, candidates: Sequence[Candidate], largest: int | None = None) -> Assignment:
    """Choose the members of an epoch and their ranks.

    Args:
        epoch: number of the epoch.
        candidates: the candidates, in any order.
        largest: largest number of members, if there is a limit. Previous members go first, then new workers in order.
    """
    old = sorted((c for c in candidates if c.rank is not None), key=lambda c: c.rank or 0)
    new = sorted((c for c in candidates if c.rank is None), key=lambda c: c.place)
    chosen = (old + new)[:largest]
    by_host: dict[str, list[Candidate]] = {}
    for candidate in chosen:
        by_host.setdefault(candidate.machine or candidate.host, []).append(candidate)
    ranked: list[Member] = []
    for members in by_host.values():
        local_ranks = {c.worker: local for local, c in enumerate(sorted(members, key=lambda c: c.slot))}
        ranked += [Member(c.worker, c.host, c.slot, local_ranks[c.worker], c.host_name, c.machine) for c in members]
    known = {c.worker: c for c in chosen}
    root, everyone = _newest([known[member.worker] for member in ranked])
    return Assignment(epoch, tuple(ranked), root, everyone, frozenset(c.worker for c in chosen if c.rank is None))


def _newest(members: Sequence[Candidate]) -> tuple[int, bool]:
    """Return the lowest rank with the newest commit, and whether all members have that same commit."""
    if not members:
        return 0, False
    newest = max(range(len(members)), key=lambda rank: (members[rank].serial, -rank))
    commits = {(member.serial, member.digest) for member in members}
    return newest, len(commits) == 1 and members[newest].serial != NO_STATE


def topology_of(assignment: Assignment, infos: Mapping[str, WorkerInfo]) -> Topology:
    """Return the topology of an epoch.

    Args:
        assignment: the epoch's members.
        infos: the descriptions that at least its members gave of themselves, by worker.
    """
    members = [(member, infos[member.worker]) for member in assignment.members]
    hosts: dict[str, list[tuple[Member, WorkerInfo]]] = {}
    for member, info in members:
        hosts.setdefault(member.home, []).append((member, info))
    numbers = {home: number for number, home in enumerate(hosts)}
    # Rank 0's settings hold for all ranks, but every rank must be able to be part of a tree.
    first = members[0][1]
    return Topology(
        assignment.epoch,
        tuple(
            Host(
                some[0][0].machine or some[0][0].host_name,
                # Workers that a launcher put on one host but that disagree about its identity share no memory.
                some[0][1].host_identity if len({info.host_identity for _, info in some}) == 1 else "",
                tuple(dict.fromkeys(info.address for _, info in some)),
            )
            for some in hosts.values()
        ),
        tuple(
            Worker(rank, numbers[member.home], member.local_rank, info.pid, info.address, info.port)
            for rank, (member, info) in enumerate(members)
        ),
        first.control_fanin if all(info.control_fanin for _, info in members) else 0,
        first.control_tree_ranks,
    )
