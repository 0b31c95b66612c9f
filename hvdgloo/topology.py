"""The assignment of workers to hosts, in order, and everything that follows from it by arithmetic.

Ranks fill hosts in order, so the ranks of one host are consecutive. Local ranks need not be in the same order: in an
elastic job they follow the slots, and ranks follow seniority. All workers of an epoch receive the same Topology, which
is validated at construction, so no later check is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice


@dataclass(frozen=True)
class Host:
    """One host of a job.

    Attributes:
        name: the name that the user gave, or the host's own.
        identity: boot id, network namespace and host name together; equal where ranks can share memory.
        addresses: IP addresses that other hosts were told to use, best first.
    """

    name: str
    identity: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Worker:
    """One process of a job.

    Attributes:
        rank: global rank.
        host: index into ``Topology.hosts``.
        local_rank: rank among the workers of its host.
        pid: process id on its host.
        address: the IP address at which other workers reach it.
        port: the port of its control listener; 0 if it has none.
    """

    rank: int
    host: int
    local_rank: int
    pid: int
    address: str
    port: int


@dataclass(frozen=True)
class Topology:
    """All hosts and workers of one epoch.

    Attributes:
        control_fanin: how many hosts' leaders report to one in the control plane's tree; 0 for no tree.
        control_tree_ranks: the fewest ranks for which there is a tree.

    Raises:
        ValueError: at construction, ranks are not 0..size-1 in the order of hosts, or the local ranks of a host's n
            workers are not 0..n-1 in some order.
    """

    epoch: int
    hosts: tuple[Host, ...]
    workers: tuple[Worker, ...]
    control_fanin: int = 0
    control_tree_ranks: int = 0

    def __post_init__(self) -> None:
        expected_host = -1
        local_ranks: dict[int, list[int]] = {}
        for rank, worker in enumerate(self.workers):
            if worker.rank != rank:
                raise ValueError(f"worker {rank} of the topology says that its rank is {worker.rank}")
            if worker.host == expected_host + 1:
                expected_host = worker.host
            elif worker.host != expected_host:
                raise ValueError(f"rank {rank} is on host {worker.host}, but ranks must fill hosts in order")
            local_ranks.setdefault(worker.host, []).append(worker.local_rank)
        for host, found in local_ranks.items():
            if sorted(found) != list(range(len(found))):
                raise ValueError(f"the {len(found)} workers of host {host} have the local ranks {found}")
        if expected_host + 1 != len(self.hosts):
            raise ValueError(f"{len(self.hosts)} hosts, but workers on {expected_host + 1} of them")

    @property
    def size(self) -> int:
        return len(self.workers)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Number of workers on each host."""
        counts = [0] * len(self.hosts)
        for worker in self.workers:
            counts[worker.host] += 1
        return tuple(counts)

    @property
    def is_homogeneous(self) -> bool:
        return len(set(self.slots)) <= 1

    @cached_property
    def _places(self) -> tuple[Place, ...]:
        return places([(worker.host, worker.local_rank) for worker in self.workers])

    def local_size(self, rank: int) -> int:
        return self._places[rank].local_size

    def cross_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks with the same local rank, one for each host that has one, in order."""
        local_rank = self.workers[rank].local_rank
        return tuple(worker.rank for worker in self.workers if worker.local_rank == local_rank)

    def cross_rank(self, rank: int) -> int:
        return self._places[rank].cross_rank

    def cross_size(self, rank: int) -> int:
        return self._places[rank].cross_size

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks on the same host, in order."""
        host = self.workers[rank].host
        return tuple(worker.rank for worker in self.workers if worker.host == host)

    def restricted(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of only some ranks (ascending), renumbered."""
        hosts = sorted({self.workers[rank].host for rank in ranks})
        counts = [0] * len(hosts)
        workers: list[Worker] = []
        for rank in ranks:
            host = hosts.index(self.workers[rank].host)
            workers.append(replace(self.workers[rank], rank=len(workers), host=host, local_rank=counts[host]))
            counts[host] += 1
        return replace(self, hosts=tuple(self.hosts[host] for host in hosts), workers=tuple(workers))

    def describe(self, rank: int) -> str:
        """Describe a rank for messages: ``rank 3 (host h2, pid 4711)``."""
        worker = self.workers[rank]
        return f"rank {rank} (host {self.hosts[worker.host].name}, pid {worker.pid})"

    @classmethod
    def local(cls, size: int, *, pid: int, epoch: int = 0, name: str = "localhost") -> Topology:
        """Return the topology of ``size`` workers in one process, as in the ``local`` backend."""
        return cls(
            epoch,
            (Host(name, "", ("127.0.0.1",)),),
            tuple(Worker(rank, 0, rank, pid, "127.0.0.1", 0) for rank in range(size)),
        )


@dataclass(frozen=True)
class Place:
    """One rank's place, derived from all ranks' hosts. Hosts count from 0; the rest is as in ``hvd.*``."""

    host: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def places(spots: Sequence[tuple[int, int]]) -> tuple[Place, ...]:
    """Return every rank's place.

    Args:
        spots: for each rank, the index of its host and its local rank, as ``fill`` returns them.
    """
    local_sizes = Counter(host for host, _ in spots)
    cross_sizes = Counter(local for _, local in spots)
    seen: Counter[int] = Counter()
    found = []
    for host, local in spots:
        found.append(Place(host, local, local_sizes[host], seen[local], cross_sizes[local]))
        seen[local] += 1
    return tuple(found)


def fill(names: Sequence[str], slots: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Assign ``count`` ranks to hosts in order, each host filled before the next.

    Returns:
        for each rank, the index of its host and its local rank.

    Raises:
        ValueError: the hosts have fewer than ``count`` slots; the text gives both numbers.
    """
    if count > sum(slots):
        listed = ", ".join(f"{name}:{n}" for name, n in zip(names, slots, strict=True))
        raise ValueError(
            f"{count} processes were requested, but the hosts have only {counted_slots(sum(slots))} ({listed})"
        )
    # islice, since a host may claim any number of slots.
    return list(islice(((host, local) for host, n in enumerate(slots) for local in range(n)), count))


def abbreviated(parts: Sequence[str], show: int = 16, separator: str = ", ") -> str:
    """Join a list for people to read, writing out only its beginning."""
    more = len(parts) - show
    return separator.join(parts[:show]) + (f"{separator.rstrip(', ')} and {more} more" if more > 0 else "")


def ranges(numbers: Sequence[int]) -> str:
    """Abbreviate ascending numbers: ``0, 3-7, 12``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return abbreviated(["-".join(map(str, part)) for part in parts])


def counted_slots(number: int) -> str:
    """Return ``1 slot``, ``2 slots``."""
    return f"{number} slot{'s' if number != 1 else ''}"
