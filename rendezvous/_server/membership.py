"""Registrations in, ranks and topology out. Pure: no clock, no lock, no socket.

An epoch is one generation of the job's membership. Its Membership knows which workers are expected, admits them, and
assigns the ranks once all have registered:

* **with a launcher** the slots are known: ``hosts`` has the number of workers of each host, and each worker brings its
  rank.
* **without one** only the number is known. Workers with the same host identity form a host. Hosts are in order of their
  first worker's arrival, and so are a host's workers; if workers bring an index, the lower index goes first instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdgloo.rendezvous._worker_info import WorkerInfo, control_tree, started_by
from hvdgloo.topology import Host, Topology, Worker, abbreviated, fill, ranges


class NotAcceptedError(Exception):
    """A worker cannot be admitted; the text is the reason. ``taken``: another worker has its place."""

    def __init__(self, reason: str, *, taken: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.taken = taken


@dataclass(frozen=True)
class RegisteredWorker:
    """An admitted worker: its client id, its description of itself, and the number of its arrival."""

    client: str
    info: WorkerInfo
    arrival: int


class Membership:
    """The workers of one epoch.

    Args:
        epoch: number of the epoch.
        size: number of expected workers, without a launcher.
        hosts: (name, slots) in order, with a launcher. Exactly one of ``size`` and ``hosts`` is given.

    Raises:
        ValueError: neither or both are given, or there is no slot.
    """

    def __init__(self, epoch: int, *, size: int | None = None, hosts: Sequence[tuple[str, int]] | None = None) -> None:
        if (size is None) == (hosts is None):
            raise ValueError("an epoch needs either the number of workers (size) or the hosts with their slots (hosts)")
        self.epoch = epoch
        self.hosts = None if hosts is None else tuple((str(name), int(slots)) for name, slots in hosts)
        if self.hosts is not None:
            if any(slots < 1 for _, slots in self.hosts):
                raise ValueError("every host of an epoch needs at least one slot")
            size = sum(slots for _, slots in self.hosts)
        if size is None or size < 1:
            raise ValueError(f"an epoch needs at least one worker, not {size}")
        self.size = size
        self._places = self._fill()
        self._registrations: dict[str, RegisteredWorker] = {}
        self._slots: dict[int, str] = {}  # rank or index to the client that has it
        self._arrivals = 0

    @property
    def arrived(self) -> int:
        return len(self._registrations)

    @property
    def complete(self) -> bool:
        return len(self._registrations) == self.size

    @property
    def registrations(self) -> tuple[RegisteredWorker, ...]:
        """All admitted workers, in order of arrival."""
        return tuple(self._registrations.values())

    def join(self, client: str, info: WorkerInfo) -> None:
        """Admit a worker. The same client may repeat the call.

        Raises:
            NotAcceptedError: it brings no rank although ranks are known, a rank out of range, or another client's rank,
                or the epoch is full.
        """
        registration = self._registrations.get(client)
        if registration is not None:
            if registration.info != info:
                raise NotAcceptedError("this client has already registered as another worker", taken=True)
            return
        slot = self._slot(info)
        if slot is not None and slot in self._slots:
            other = self._registrations[self._slots[slot]].info
            what = "rank" if info.rank is not None else "index"
            raise NotAcceptedError(
                started_by(other, info, f"{what} {slot}")
                or f"{what} {slot} of epoch {self.epoch} is taken by pid {other.pid} on host {other.host_name}; "
                f"two workers were started with the same {what}, or this one was started again",
                taken=True,
            )
        if self.complete:
            for each in self.registrations:
                if own := started_by(each.info, info, "a worker"):
                    raise NotAcceptedError(own, taken=True)
            raise NotAcceptedError(f"epoch {self.epoch} is complete: {self.summary()}", taken=True)
        self._registrations[client] = RegisteredWorker(client, info, self._arrivals)
        self._arrivals += 1
        if slot is not None:
            self._slots[slot] = client

    def leave(self, client: str) -> bool:
        """Forget a worker that left before all had registered; return False if it had not, or if it is too late."""
        if self.complete or client not in self._registrations:
            return False
        del self._registrations[client]
        self._slots = {slot: other for slot, other in self._slots.items() if other != client}
        return True

    def clear(self) -> None:
        """Forget all workers, to start again."""
        self._registrations.clear()
        self._slots.clear()

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not registered; empty without a launcher, since they are not known then."""
        return [] if self.hosts is None else [rank for rank in range(self.size) if rank not in self._slots]

    def arrived_by_host(self) -> dict[str, int]:
        """Return the number of admitted workers by host name, hosts in order; a host without any has 0.

        Without a launcher, hosts of one name but several identities are distinguished by the start of the identity.
        """
        if self.hosts is not None:
            counts = Counter(self._places[rank][0] for rank in self._slots)
            return _summed((name, counts[host]) for host, (name, _) in enumerate(self.hosts))
        identities: dict[str, str] = {}
        for registration in self.registrations:
            identities.setdefault(registration.info.host_identity, registration.info.host_name)
        names = Counter(identities.values())
        counts_by_identity = Counter(registration.info.host_identity for registration in self.registrations)
        return {
            name if names[name] == 1 else f"{name} [{identity[:6]}]": counts_by_identity[identity]
            for identity, name in identities.items()
        }

    def summary(self) -> str:
        """Describe the number of admitted workers, their hosts, and the missing ranks, for errors and for people."""
        expected = _summed(self.hosts) if self.hosts is not None else {}
        parts = [
            f"{name} {arrived} of {expected[name]}" if name in expected else f"{name} {arrived}"
            for name, arrived in self.arrived_by_host().items()
        ]
        text = f"{self.arrived} of {self.size} {'worker is' if self.size == 1 else 'workers are'} in"
        if parts:
            text += f" (hosts: {abbreviated(parts)})"
        missing = self.missing_ranks()
        if missing:
            text += f"; missing: rank {ranges(missing)}"
        return text

    def topology(self) -> tuple[Topology, dict[str, int]]:
        """Build the topology, once ``complete``.

        Returns:
            the topology, and the rank of each client.

        Raises:
            ValueError: workers without a launcher brought ranks that do not fill hosts one after the other.
        """
        if not self.complete:
            raise ValueError(f"epoch {self.epoch} is not complete: {self.summary()}")
        groups = self._groups()
        hosts: list[Host] = []
        workers: list[Worker] = []
        ranks: dict[str, int] = {}
        for index, (name, registrations) in enumerate(groups):
            identities = {registration.info.host_identity for registration in registrations}
            addresses = tuple(dict.fromkeys(registration.info.address for registration in registrations))
            # Workers that a launcher put on one host but that disagree about its identity share no memory.
            hosts.append(Host(name, identities.pop() if len(identities) == 1 else "", addresses))
            for local_rank, registration in enumerate(registrations):
                rank, info = len(workers), registration.info
                if info.rank is not None and info.rank != rank:
                    raise ValueError(
                        f"rank {info.rank} is on host {info.host_name}, but ranks must fill hosts one after the other: "
                        f"by that order it would be rank {rank}. Number the workers of each host consecutively, or "
                        "leave out their ranks and let the rendezvous server choose"
                    )
                workers.append(Worker(rank, index, local_rank, info.pid, info.address, info.port))
                ranks[registration.client] = rank
        infos = [registration.info for _, registrations in groups for registration in registrations]
        return Topology(self.epoch, tuple(hosts), tuple(workers), *control_tree(infos)), ranks

    def _fill(self) -> list[tuple[int, int]]:
        if self.hosts is None:
            return []
        names, slots = [name for name, _ in self.hosts], [count for _, count in self.hosts]
        return fill(names, slots, self.size)

    def _slot(self, info: WorkerInfo) -> int | None:
        """Return the worker's own claim to a place: a rank, an index, or None."""
        if self.hosts is not None and info.rank is None:
            raise NotAcceptedError(
                f"a launcher knows the ranks of epoch {self.epoch}, but this worker brings none (HVDGLOO_RANK)"
            )
        if info.rank is not None and info.rank >= self.size:
            raise NotAcceptedError(f"rank {info.rank} does not exist: epoch {self.epoch} has {self.size} workers")
        kind = _claim(info)
        for registration in self._registrations.values():
            if _claim(registration.info) != kind:
                raise NotAcceptedError(
                    f"this worker brings {kind}, but others bring {_claim(registration.info)}: set HVDGLOO_RANK, or "
                    "HVDGLOO_INDEX, for all workers or for none"
                )
            break  # all admitted workers agree, so one of them is enough
        return info.rank if info.rank is not None else info.index

    def _groups(self) -> list[tuple[str, list[RegisteredWorker]]]:
        """Return the hosts in order: name, and workers in order."""
        if self.hosts is not None:
            by_host: list[tuple[str, list[RegisteredWorker]]] = [(name, []) for name, _ in self.hosts]
            for rank, (host, _) in enumerate(self._places):
                by_host[host][1].append(self._registrations[self._slots[rank]])
            return by_host
        ordered = sorted(self.registrations, key=_order)
        by_identity: dict[str, list[RegisteredWorker]] = {}
        for registration in ordered:
            by_identity.setdefault(registration.info.host_identity, []).append(registration)
        return [(registrations[0].info.host_name, registrations) for registrations in by_identity.values()]


def _claim(info: WorkerInfo) -> str:
    return "a rank" if info.rank is not None else "an index" if info.index is not None else "neither rank nor index"


def _order(registration: RegisteredWorker) -> int:
    claim = registration.info.rank if registration.info.rank is not None else registration.info.index
    return registration.arrival if claim is None else claim


def _summed(pairs: Any) -> dict[str, int]:
    """Add up entries of the same name: a host may be listed twice."""
    totals: dict[str, int] = {}
    for name, count in pairs:
        totals[name] = totals.get(name, 0) + count
    return totals
