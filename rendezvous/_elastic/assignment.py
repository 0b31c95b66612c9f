"""Who has which rank in an epoch, and whose state is the newest.

Workers that were members before keep their order, and hosts stay in the order of their lowest old rank; new hosts
follow. The ranks of a host are consecutive, its old members first: rank 0 has always been a member before, unless
nobody has. The local rank, on the other hand, follows the slots: a newcomer starts in the lowest slot that is free, and
once all slots of its host are in use, its local rank is its slot. So it finds free the GPU that it takes at its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

NO_STATE = -1
"""The serial of a worker that has never had the state of the job."""


@dataclass(frozen=True)
class Candidate:
    """A worker that can be a member of the next epoch.

    Attributes:
        worker: its id.
        host, slot: where it is.
        rank: its rank in the last epoch; None for a newcomer.
        place: newcomers are in ascending order of this.
        serial, digest: of its newest commit.
        host_name: the host's name in messages.
        machine: several hosts that have the same one form one host of the epoch; empty for a host by itself.
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


@dataclass(frozen=True)
class Member:
    """A member of an epoch; its rank is its index in ``Assignment.members``.

    Attributes:
        worker: the worker's id.
        host, slot: where it is.
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
        """The host of the epoch that it is on."""
        return self.machine or self.host


@dataclass(frozen=True)
class Assignment:
    """The members of an epoch.

    Attributes:
        epoch: its number.
        members: by rank.
        root: the rank that has the newest state.
        everyone: all have that state already, so that nothing needs to travel.
        fresh: ids of newcomers.
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
        """The number of members on each host, as discoveries name them."""
        return Counter(member.host for member in self.members)


def choose(epoch: int, candidates: Sequence[Candidate], largest: int | None = None) -> Assignment:
    """The epoch that these candidates form.

    Args:
        epoch: its number.
        candidates: in any order.
        largest: the most that there may be, if there is a limit. Old members go first, then newcomers in their order.
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
    """The rank with the newest commit, the lowest one among equals, and whether all have that very commit."""
    if not members:
        return 0, False
    newest = max(range(len(members)), key=lambda rank: (members[rank].serial, -rank))
    commits = {(member.serial, member.digest) for member in members}
    return newest, len(commits) == 1 and members[newest].serial != NO_STATE
