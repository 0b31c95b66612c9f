"""The processes of a group's ranks: which they are, and whether those on this host have ended."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import time
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from hvdgloo._net.descriptors import close_keeping_numbers
from hvdgloo.config import Config
from hvdgloo.errors import BackendError
from hvdgloo.rendezvous import host_identity
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.topology import Topology
from hvdgloo.torch.distributed._store import TorchStore

logger = logging.getLogger(__name__)

MOST_WATCHED = 128
"""The greatest group whose absent ranks are looked for: each rank asks the store for each other rank's process."""

ABSENT_LOOK = 0.25
"""Seconds between looks for ranks that have ended before they had anything to do with this one."""

_STATES = {"T": "is stopped (by SIGSTOP, Ctrl-Z or a debugger)", "t": "is stopped (by a debugger)"}


def process_facts(config: Config) -> dict[str, Any]:
    """Return what identifies this process to the other ranks."""
    return {
        "identity": host_identity(),
        "name": host_name(config.hostname),
        "pid": os.getpid(),
        "pid namespace": _pid_namespace(),
    }


def publish_process(store: Store, rank: int) -> None:
    """Tell the other ranks of a group which process is this rank, for ``Published``."""
    TorchStore(store).set(f"process{rank}", json.dumps(process_facts(Config.from_env())).encode())


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class _Descriptors:
    """A descriptor for each of some processes of this host, which shows when the process ends (pidfd_open(2))."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._missing: list[int] = []

    def observe(self, rank: int, pid: int) -> None:
        """Observe a rank's process from now on, if this system has such descriptors."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._missing.append(rank)
        except (AttributeError, OSError):
            pass
        else:
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        return [*self._missing, *(self._ranks[descriptor] for descriptor, _ in self._poll.poll(0))]

    def after_fork_in_child(self) -> None:
        """Let a forked child not keep the descriptors."""
        close_keeping_numbers(list(self._ranks))

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._ranks:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        self._ranks = {}


class Peers:
    """The processes of a connected group that can be seen to end: this host's.

    Args:
        topology: of the group.
        rank: within the group.
        namespaces: each rank's PID namespace; numbers of other namespaces mean other processes.
    """

    def __init__(self, topology: Topology, rank: int, namespaces: Sequence[str]) -> None:
        self._descriptors = _Descriptors()
        own = topology.workers[rank]
        self._pids = {
            worker.rank: worker.pid
            for worker in topology.workers
            if worker.host == own.host and worker.rank != rank and namespaces[worker.rank] == namespaces[rank]
        }
        for peer, pid in self._pids.items():
            self._descriptors.observe(peer, pid)

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        return self._descriptors.ended()

    def state(self, rank: int) -> str:
        """Return what the process of a rank does, for messages; empty if that cannot be seen from here."""
        return state_of(self._pids[rank]) if rank in self._pids else ""

    def after_fork_in_child(self) -> None:
        """Let a forked child not keep the descriptors."""
        self._descriptors.after_fork_in_child()

    def close(self) -> None:
        """Close the descriptors."""
        self._descriptors.close()


def state_of(pid: int) -> str:
    """Return what a process of this host does, for messages; empty if that cannot be seen."""
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0].decode()
        return _STATES.get(state, "is running")
    return ""


class Published:
    """The facts that ranks of a group have published about their processes, whether or not they are connected.

    Args:
        store: where each rank that was made a member has set ``process<number>``.
        names: numbers of some ranks there, and in messages.
    """

    def __init__(self, store: TorchStore, names: Sequence[int]) -> None:
        self._store, self._names = store, names
        self._processes: dict[int, dict[str, Any]] = {}
        self._descriptors = _Descriptors()
        self._own = (host_identity(), _pid_namespace())

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Return the given ranks whose processes have ended, as far as that can be seen from this host."""
        for rank in ranks:
            self._process(rank)
        ended = self._descriptors.ended()
        return [rank for rank in ranks if rank in ended]

    def describe(self, ranks: Sequence[int], *, with_state: bool = False) -> str:
        """Name ranks, with host and process as far as they are known."""
        return ", ".join(self._describe(rank, with_state) for rank in ranks)

    def after_fork_in_child(self) -> None:
        """Let a forked child not keep the descriptors."""
        self._descriptors.after_fork_in_child()

    def close(self) -> None:
        """Close the descriptors of other processes."""
        self._descriptors.close()

    def _process(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank has published of its process, if it has; the store is asked until then."""
        key = f"process{self._names[rank]}"
        if rank not in self._processes and self._store.has(key):
            process = self._processes[rank] = json.loads(self._store.get_many([key], timeout=0)[0])
            if self._is_visible(process):
                self._descriptors.observe(rank, process["pid"])
        return self._processes.get(rank)

    def _is_visible(self, process: dict[str, Any]) -> bool:
        return (process["identity"], process["pid namespace"]) == self._own

    def _describe(self, rank: int, with_state: bool) -> str:
        process = self._process(rank)
        if process is None:
            return f"rank {self._names[rank]}"
        state = state_of(process["pid"]) if with_state and self._is_visible(process) else ""
        place = f"host {process['name']}, pid {process['pid']}"
        return f"rank {self._names[rank]} ({place}, which {state})" if state else f"rank {self._names[rank]} ({place})"


class Absent:
    """The ranks that have not called a group's first operation, for which this rank waits.

    Args:
        store: where ranks that call it set ``rank<number>``, and rank 0 ``ranks``.
        published: by the group's ranks.
        rank, size: within the group.
        label: of the group, for messages.
        warning_after: seconds until the absent ranks are warned of; 0 for never.
    """

    def __init__(
        self, store: TorchStore, published: Published, rank: int, size: int, label: str, warning_after: float
    ) -> None:
        self._store, self._published, self._label = store, published, label
        self._begun = self._next_look = time.monotonic()
        self._warning_at = self._begun + warning_after if warning_after else math.inf
        self._others = [other for other in range(size) if other != rank]

    def look(self) -> None:
        """Look for ranks that can never come, and warn once of those that are late.

        Raises:
            BackendError: an absent rank's process on this host has ended.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + ABSENT_LOOK
        # In this order: a rank may have called the operation before it ended.
        ended = [rank for rank in self._published.ended(self._others) if not self._has_come(rank)]
        if ended:
            raise BackendError(
                f"{self._published.describe(ended)} ended without calling this group's first operation; all ranks of "
                "a group must make the same calls"
            )
        if now >= self._warning_at:
            self._warning_at = math.inf
            absent = [rank for rank in self._others if not self._has_come(rank)]
            if absent:
                logger.warning(
                    "the first operation of %s has waited for %s for %.0f s; ranks connect when all have called it",
                    self._label,
                    self._published.describe(absent),
                    now - self._begun,
                )

    def _has_come(self, rank: int) -> bool:
        return self._store.has(f"rank{rank}" if rank else "ranks")
