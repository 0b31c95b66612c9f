"""The connection between a group's ranks: through the store that torch.distributed hands over, they learn of each
other's hosts and processes, and get the data plane that hvdgloo's own jobs get."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import Store

from hvdgloo._backends.base import Backend, get_all, label_of
from hvdgloo._backends.plane_reason import why
from hvdgloo._backends.select import Planes, gloo_backend, plane_settings
from hvdgloo._backends.shm.backend import ShmBackend
from hvdgloo._backends.shm.calls import Calls
from hvdgloo._backends.shm.small import SmallCollectives
from hvdgloo._net.descriptors import close_keeping_numbers
from hvdgloo._net.proofs import derive, prove
from hvdgloo._platform.machine import usable_cores
from hvdgloo.config import Config
from hvdgloo.errors import BackendError, ConfigError, RendezvousTimeoutError
from hvdgloo.rendezvous import host_identity
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.topology import Host, Topology, Worker
from hvdgloo.torch.distributed._record import own_number

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
"""Bytes of shared memory that each rank of a group takes at most: programs have many groups, one for each dimension of
a mesh and more."""

_TELLING_SECONDS = 2.0
"""More than rank 0 needs to tell the others that some are missing."""

_FIRST_LOOK, _LAST_LOOK = 0.0005, 0.02
"""Seconds between looks at the store."""

_ABSENT_LOOK = 0.25
"""Seconds between looks for ranks that have ended before the group's first operation."""

MOST_WATCHED = 128
"""The greatest group whose absent ranks are looked for: each rank asks the store for each other rank's process."""


class TorchStore:
    """torch's store as the rendezvous store of data planes.

    A wait inside of a store would keep all other threads of this process from using it, so keys are looked for again
    and again instead.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._store.set(key, value)  # type: ignore[arg-type]  # which the stubs do not know: bytes

    def has(self, key: str) -> bool:
        """Tell whether a key was set."""
        return bool(self._store.check([key]))

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]:
        """Wait for the values of keys.

        Raises:
            RendezvousTimeoutError: some were not set within ``timeout`` seconds.
        """
        deadline, pause = time.monotonic() + timeout, _FIRST_LOOK
        while not self._store.check(list(keys)):
            left = deadline - time.monotonic()
            if left <= 0:
                raise RendezvousTimeoutError(f"{', '.join(keys)}: not set within {timeout:g} s")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_LOOK)
        return [bytes(self._store.get(key)) for key in keys]


class Peers:
    """The processes of a group that can be seen to end: this host's, by a descriptor of each (pidfd_open(2)).

    Args:
        topology: of the group.
        rank: within the group.
        namespaces: each rank's PID namespace; numbers of other namespaces mean other processes.
    """

    def __init__(self, topology: Topology, rank: int, namespaces: Sequence[str]) -> None:
        self._topology, self._poll = topology, select.poll()
        self._ranks: dict[int, int] = {}
        self._ended: list[int] = []
        if not hasattr(os, "pidfd_open"):
            return
        own = topology.workers[rank]
        for worker in topology.workers:
            if worker.host != own.host or worker.rank == rank or namespaces[worker.rank] != namespaces[rank]:
                continue
            try:
                descriptor = os.pidfd_open(worker.pid)
            except ProcessLookupError:
                self._ended.append(worker.rank)
                continue
            except OSError:
                return  # no such descriptors here
            self._ranks[descriptor] = worker.rank
            self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        return [*self._ended, *(self._ranks[descriptor] for descriptor, _ in self._poll.poll(0))]

    def after_fork_in_child(self) -> None:
        """Let a forked child not keep the descriptors."""
        close_keeping_numbers(list(self._ranks))

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._ranks:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        self._ranks = {}


class Absent:
    """The ranks that have not called a group's first operation, for which this rank waits.

    Args:
        store: where ranks that call it set ``rank<number>``, and rank 0 ``ranks``.
        everyone: where each rank that was made a member has set ``process<number>``.
        names: numbers of the group's ranks there, and in messages.
        rank: this one, within the group.
        label: of the group, for messages.
        warning_after: seconds until the absent ranks are warned of; 0 for never.
    """

    def __init__(
        self, store: TorchStore, everyone: TorchStore, names: Sequence[int], rank: int, label: str, warning_after: float
    ) -> None:
        self._store, self._everyone, self._names, self._rank, self._label = store, everyone, names, rank, label
        self._begun = self._next_look = time.monotonic()
        self._warning_at = self._begun + warning_after if warning_after else math.inf
        self._others = [other for other in range(len(names)) if other != rank]
        self._processes: dict[int, dict[str, Any]] = {}
        self._descriptors: dict[int, int] = {}
        self._poll = select.poll()
        self._own = (host_identity(), _pid_namespace())

    def look(self) -> None:
        """Look for ranks that can never come, and warn once of those that are late.

        Raises:
            BackendError: an absent rank's process on this host has ended.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _ABSENT_LOOK
        # In this order: a rank may have called the operation before it ended.
        ended = [rank for rank in self._others if self._has_ended(rank) and not self._has_come(rank)]
        if ended:
            raise BackendError(
                f"{self._describe(ended)} ended without calling this group's first operation; all ranks of a group "
                "must make the same calls"
            )
        if now >= self._warning_at:
            self._warning_at = math.inf
            absent = [rank for rank in self._others if not self._has_come(rank)]
            if absent:
                logger.warning(
                    "the first operation of %s has waited for %s for %.0f s; ranks connect when all have called it",
                    self._label,
                    self._describe(absent),
                    now - self._begun,
                )

    def close(self) -> None:
        """Close the descriptors of other processes."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _has_come(self, rank: int) -> bool:
        return self._store.has(f"rank{rank}" if rank else "ranks")

    def _process(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank has published of its process, if it has; the store is asked until then."""
        key = f"process{self._names[rank]}"
        if rank not in self._processes and self._everyone.has(key):
            self._processes[rank] = json.loads(self._everyone.get_many([key], timeout=0)[0])
        return self._processes.get(rank)

    def _has_ended(self, rank: int) -> bool:
        process = self._process(rank)
        if process is None or (process["identity"], process["pid namespace"]) != self._own:
            return False
        if rank not in self._descriptors:
            try:
                self._descriptors[rank] = os.pidfd_open(process["pid"])
            except ProcessLookupError:
                return True
            except (AttributeError, OSError):
                return False  # no such descriptors here
            self._poll.register(self._descriptors[rank], select.POLLIN)
        return self._descriptors[rank] in dict(self._poll.poll(0))

    def _describe(self, ranks: Sequence[int]) -> str:
        found = ((self._names[rank], self._process(rank)) for rank in ranks)
        return ", ".join(
            f"rank {name}" + (f" (host {process['name']}, pid {process['pid']})" if process else "")
            for name, process in found
        )


def publish_process(store: Store, rank: int) -> None:
    """Tell the other ranks of a group which process is this rank, for ``Absent``."""
    TorchStore(store).set(f"process{rank}", json.dumps(_process_facts(Config.from_env())).encode())


class Connection:
    """One rank's place in a connected group.

    Args:
        store: torch's, with this group's prefix.
        rank, size: within the group.
        label: of the group, for messages.
        timeout: seconds within which the other ranks must arrive.
        cancelled: polled; tells whether to give up.
        names: numbers of the ranks in messages, if they are not those within the group.
        everyone: where all ranks have published their processes, if it is not ``store``.

    Attributes:
        numbers: each rank's number among all of the job's.
        plane: the data plane, and why it is used, for people.

    Raises:
        HvdglooError: the ranks could not be connected.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        label: str,
        timeout: float,
        cancelled: Callable[[], bool],
        *,
        names: Sequence[int] | None = None,
        everyone: Store | None = None,
    ) -> None:
        self.label = label
        self._names = range(size) if names is None else names
        self.backend: Backend
        self.small: SmallCollectives | None = None
        self.calls: Calls | None = None
        config = replace(Config.from_env(), connect_timeout=timeout)
        self.stall_warning_time = 0.0 if config.stall_check_disable else config.stall_warning_time
        facts = _own_facts(config, rank)
        if size == 1:
            found, settings, secret = [facts], plane_settings(config), b""
        else:
            absent = Absent(
                TorchStore(store), TorchStore(everyone or store), self._names, rank, label, self.stall_warning_time
            )

            def given_up() -> bool:
                if size <= MOST_WATCHED:
                    absent.look()
                return cancelled()

            try:
                found, settings, secret = _exchange(TorchStore(store), rank, size, facts, config, timeout, given_up)
            finally:
                absent.close()
        self.topology, in_order = _topology(found)
        self.numbers: list[int] = [each["number"] for each in found]
        self.peers = Peers(self.topology, rank, [each["pid namespace"] for each in found])
        config = replace(config, secret=secret)
        if in_order:
            settings["shm_segment"] = min(int(settings["shm_segment"]), SEGMENT_BYTES)
            settings["gpu_operations"] = "gloo"  # there are no tensors on GPUs, for which planes would prepare
            planes = Planes(
                config, settings, self.topology, rank, TorchStore(store), "plane/", facts["address"], arena=0
            )
            self.backend = planes.open(0, range(size), cancelled)
        else:
            provider, address = settings["gloo_provider"] or "torch", facts["address"]
            self.backend = gloo_backend(
                provider, TorchStore(store), "plane/", rank, size, address, timeout, cancelled, secret
            )
        if isinstance(self.backend, ShmBackend):
            ranks_here = max(size, int(os.environ.get("LOCAL_WORLD_SIZE") or 0))
            enough = all(each["cores"] >= ranks_here for each in found)
            self.small = self.backend.small_collectives(may_spin=enough)
            self.calls = self.backend.calls()
        self.plane = f"{label_of(self.backend)}: {why(self.backend.name, self.topology, range(size))}"

    def describe(self, ranks: Sequence[int]) -> str:
        """Name ranks of the group."""
        hosts, workers = self.topology.hosts, self.topology.workers
        return ", ".join(
            f"rank {self._names[rank]} (host {hosts[workers[rank].host].name}, pid {workers[rank].pid})"
            for rank in ranks
        )

    def arrivals(self) -> tuple[int, int, int] | None:
        """Return the last rank to begin the call under way, and who waited how long for it; see ``Calls``."""
        return None if self.calls is None else self.calls.arrivals()

    def late(self) -> list[int]:
        """Return the ranks that this one waits for, as far as that can be seen."""
        return self.backend.late() if isinstance(self.backend, ShmBackend) else []

    def check_peers(self) -> None:
        """Check that no process of the group has ended, and that all ranks make the same calls.

        Raises:
            BackendError: some process has ended, or ranks called different collectives; it names them.
        """
        if self.calls is not None and (difference := self.calls.mismatch()):
            raise BackendError(f"{difference}; all ranks of a group must call the same collectives in the same order")
        ended = self.peers.ended()
        if ended:
            raise BackendError(f"{self.describe(ended)} has ended")

    def after_fork_in_child(self) -> None:
        """Let a forked child not keep what belongs to its parent."""
        self.peers.after_fork_in_child()
        after_fork = getattr(self.backend, "after_fork_in_child", None)
        if after_fork is not None:
            after_fork()

    def close(self, *, failed: bool = False) -> None:
        """Release everything.

        Args:
            failed: True if some operation has failed or never ended. Gloo's threads may still be running it; shared
                memory has no threads but the caller's own.
        """
        self.peers.close()
        if failed and not isinstance(self.backend, ShmBackend):
            self.backend.abandon()
        else:
            self.backend.close()


def _own_facts(config: Config, own_rank: int) -> dict[str, Any]:
    return {
        **_process_facts(config),
        "address": config.address or _own_address(),
        "number": own_number(own_rank),
        "cores": usable_cores(),
    }


def _process_facts(config: Config) -> dict[str, Any]:
    return {
        "identity": host_identity(),
        "name": host_name(config.hostname),
        "pid": os.getpid(),
        "pid namespace": _pid_namespace(),
    }


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _own_address() -> str:
    """Return this host's address in a connection to where torch's ranks meet."""
    master = os.environ.get("MASTER_ADDR") or "localhost"
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # no packet is sent: the system only chooses the way
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _exchange(
    store: TorchStore,
    rank: int,
    size: int,
    facts: dict[str, Any],
    config: Config,
    timeout: float,
    cancelled: Callable[[], bool],
) -> tuple[list[dict[str, Any]], dict[str, Any], bytes]:
    """Tell the other ranks about this one, and hear about them.

    Returns:
        each rank's facts, rank 0's settings, and the group's secret.

    Raises:
        BackendError: some ranks did not come in time; it names them.
    """
    if rank == 0:
        keys = [f"rank{other}" for other in range(1, size)]
        try:
            found = [facts, *(json.loads(value) for value in get_all(store, keys, timeout, cancelled))]
        except RendezvousTimeoutError:
            missing = [other for other in range(1, size) if not store.has(f"rank{other}")]
            store.set("ranks", json.dumps({"missing": missing}).encode())
            raise _not_there(missing, timeout) from None
        nonce = secrets.token_bytes(32)
        told: dict[str, Any] = {
            "ranks": found,
            "settings": plane_settings(config),
            "nonce": nonce.hex(),
            "job's secret": config.secret is not None,
        }
        store.set("ranks", json.dumps(told).encode())
    else:
        store.set(f"rank{rank}", json.dumps(facts).encode())
        try:
            (value,) = get_all(store, ["ranks"], timeout + _TELLING_SECONDS, cancelled)
        except RendezvousTimeoutError:
            raise _not_there([0], timeout) from None
        told = json.loads(value)
        if "missing" in told:
            raise _not_there(told["missing"], timeout)
        nonce = bytes.fromhex(told["nonce"])
    if not told["job's secret"]:
        # Every process that reaches the store can read this: torch's own trust model, which a job's secret replaces.
        return told["ranks"], told["settings"], nonce
    if config.secret is None:
        raise ConfigError(
            "rank 0 of the group has the job's secret (HVDGLOO_SECRET or HVDGLOO_SECRET_FILE), and this process has "
            "none; start all of them with hvdgloo-run"
        )
    return told["ranks"], told["settings"], prove(derive(config.secret, "torch.distributed"), "group", nonce)


def _not_there(missing: Sequence[int], timeout: float) -> BackendError:
    ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return BackendError(f"{ranks} did not call this group's first operation within the timeout of {timeout:g} s")


def _topology(found: Sequence[dict[str, Any]]) -> tuple[Topology, bool]:
    """Return the group's topology, and whether its ranks are numbered host by host, as most planes need it."""
    identities = list(dict.fromkeys(each["identity"] for each in found))
    numbers = [identities.index(each["identity"]) for each in found]
    in_order = numbers == sorted(numbers)
    if not in_order:  # each rank is a host of its own then
        identities = [f"{each['identity']} {rank}" for rank, each in enumerate(found)]
        numbers = list(range(len(found)))
    hosts: list[Host] = []
    workers: list[Worker] = []
    local_ranks = [0] * len(identities)
    for rank, each in enumerate(found):
        host = numbers[rank]
        if host == len(hosts):
            hosts.append(Host(each["name"], identities[host], (each["address"],)))
        workers.append(Worker(rank, host, local_ranks[host], each["pid"], each["address"], 0))
        local_ranks[host] += 1
    return Topology(0, tuple(hosts), tuple(workers)), in_order
