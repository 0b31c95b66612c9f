"""The connection between a group's ranks: through the store that torch.distributed hands over, they learn of each
other's hosts and processes, and get the data plane that hvdgloo's own jobs get."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import DebugLevel, Store, get_debug_level

from hvdgloo._backends.base import Backend, Work, get_all, label_of
from hvdgloo._backends.hierarchical import HierarchicalBackend
from hvdgloo._backends.plane_reason import why
from hvdgloo._backends.select import Planes, gloo_backend, plane_settings
from hvdgloo._backends.shm.backend import ShmBackend
from hvdgloo._backends.shm.calls import Call, Calls
from hvdgloo._backends.shm.small import SmallCollectives
from hvdgloo._net.proofs import derive, prove
from hvdgloo._platform.machine import usable_cores
from hvdgloo.config import Config
from hvdgloo.errors import BackendError, ConfigError, RendezvousTimeoutError
from hvdgloo.topology import Host, Topology, Worker
from hvdgloo.torch.distributed._failures import ALL_ALIKE, Compared, Failures
from hvdgloo.torch.distributed._processes import MOST_WATCHED, Absent, Peers, Published, process_facts
from hvdgloo.torch.distributed._record import own_number
from hvdgloo.torch.distributed._store import TorchStore

SEGMENT_BYTES = 4 << 20
"""Bytes of shared memory that each rank of a group takes at most: programs have many groups, one for each dimension of
a mesh and more."""

_TELLING_SECONDS = 2.0
"""More than rank 0 needs to tell the others that some are missing."""


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
        self.label, self._rank = label, rank
        self._names = range(size) if names is None else names
        self.backend: Backend
        self.small: SmallCollectives | None = None
        self.calls: Calls | None = None
        self._compared: Calls | None = None
        config = replace(Config.from_env(), connect_timeout=timeout)
        self.stall_warning_time = 0.0 if config.stall_check_disable else config.stall_warning_time
        facts = _own_facts(config, rank)
        if size == 1:
            found, settings, secret = [facts], plane_settings(config), b""
        else:
            published = Published(TorchStore(everyone or store), self._names)
            absent = Absent(TorchStore(store), published, rank, size, label, self.stall_warning_time)

            def given_up() -> bool:
                if size <= MOST_WATCHED:
                    absent.look()
                return cancelled()

            try:
                found, settings, secret = _exchange(
                    TorchStore(store), rank, size, facts, config, timeout, given_up, published
                )
            finally:
                published.close()
        self.topology, in_order = _topology(found)
        self.numbers: list[int] = [each["number"] for each in found]
        self.peers = Peers(self.topology, rank, [each["pid namespace"] for each in found])
        config = replace(config, secret=secret)
        if in_order:
            settings["shm_segment"] = min(int(settings["shm_segment"]), SEGMENT_BYTES)
            settings["gpu_operations"] = "gloo"  # there are no tensors on GPUs, for which planes would prepare
            planes = Planes(
                config,
                settings,
                self.topology,
                rank,
                TorchStore(store),
                "plane/",
                facts["address"],
                arena=0,
                silence=config.operation_timeout,
            )
            self.backend = planes.open(0, range(size), cancelled)
        else:
            provider, address = settings["gloo_provider"] or "torch", facts["address"]
            self.backend = gloo_backend(
                provider,
                TorchStore(store),
                "plane/",
                rank,
                size,
                address,
                timeout,
                cancelled,
                secret,
                config.operation_timeout,
            )
        if isinstance(self.backend, ShmBackend):
            ranks_here = max(size, int(os.environ.get("LOCAL_WORLD_SIZE") or 0))
            enough = all(each["cores"] >= ranks_here for each in found)
            self.small = self.backend.small_collectives(may_spin=enough)
            self.calls = self._compared = self.backend.calls()
        elif isinstance(self.backend, HierarchicalBackend) and isinstance(self.backend.local, ShmBackend):
            host = self.topology.workers[rank].host
            first = next(worker.rank for worker in self.topology.workers if worker.host == host)
            self._compared = self.backend.local.calls(first)
        self._failures = None
        self._compares_first = False
        if names is None and self.calls is None and 1 < size <= MOST_WATCHED:
            self._compares_first = get_debug_level() == DebugLevel.DETAIL
            self._failures = Failures(TorchStore(store), rank, size, self.describe)
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

    def describe_late(self) -> str:
        """Name the ranks that this one waits for, and what each of them does instead, as far as that can be seen."""
        return "; ".join(self._describe_late(rank) for rank in self.late())

    def _describe_late(self, rank: int) -> str:
        described, state = self.describe([rank]), self.peers.state(rank)
        assert self.calls is not None
        call, is_current, begun = self.calls.latest(rank)
        ago = f"{time.monotonic() - begun:.1f} s ago"
        if call is None:
            last = "has not called this group since its first operation"
        elif is_current:
            last = f"called {call} {ago}, and is still at it"
        else:
            last = f"last called {call} in this group, {ago}"
        return f"{described}, whose process {state} and {last}," if state else f"{described}, which {last},"

    def begin(self, call: Call, now: float, start: Callable[[Backend], Work]) -> Work:
        """Record a call of this rank, and begin it.

        Args:
            now: time on the monotonic clock.
            start: makes the call's first step.
        """
        if self._compared is not None:
            self._compared.begin(call, now)
        if self._failures is not None:
            self._failures.begin(call)
        if self._compares_first:
            return Compared(self.backend, self._rank, len(self._names), call, start)
        return start(self.backend)

    def check_calls(self) -> None:
        """Check that all ranks make the same calls, as far as ranks share memory.

        Raises:
            BackendError: they do not; it names two calls that differ.
        """
        if self._compared is not None and (difference := self._compared.mismatch()):
            raise BackendError(f"{difference}; {ALL_ALIKE}")

    def check_peers(self) -> None:
        """Check that no process of the group has ended, and that all ranks make the same calls.

        Raises:
            BackendError: some process has ended, or ranks called different collectives; it names them.
        """
        self.check_calls()
        ended = self.peers.ended()
        if ended:
            raise BackendError(f"{self.describe(ended)} has ended")

    def explain(self, own: str) -> str:
        """Return the reason of a failure, as far as all ranks know. The first rank to fail makes the others fail, which
        see only that.

        Args:
            own: the reason, as far as this rank knows.
        """
        if self._compared is not None and (difference := self._compared.earlier_mismatch()):
            own = f"{difference}; {ALL_ALIKE}"
        return own if self._failures is None else self._failures.explain(own, self.peers.ended())

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
        **process_facts(config),
        "address": config.address or _own_address(),
        "number": own_number(own_rank),
        "cores": usable_cores(),
    }


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
    published: Published,
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
            raise _not_there(published, missing, timeout) from None
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
            raise _not_there(published, [0], timeout) from None
        told = json.loads(value)
        if "missing" in told:
            raise _not_there(published, told["missing"], timeout)
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


def _not_there(published: Published, missing: Sequence[int], timeout: float) -> BackendError:
    ranks = published.describe(missing, with_state=True)
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
