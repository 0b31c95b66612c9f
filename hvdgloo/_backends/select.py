"""Choice of a process set's data plane: shared memory on one host, Gloo on several, both where hosts have several
ranks, and Gloo alone where memory cannot be shared."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdgloo._backends.base import FEW_RANKS, Backend, Plane, RendezvousStore, get_all, wait_for
from hvdgloo._backends.local import LocalGroup
from hvdgloo._platform.machine import has_package
from hvdgloo.config import GLOO_PROVIDERS, Config
from hvdgloo.errors import ConfigError, ConnectError, MissingDependencyError, RendezvousError
from hvdgloo.topology import Topology
from hvdgloo.types import Buffer, ReduceOp

if TYPE_CHECKING:
    from hvdgloo._backends.hierarchical import Layout

logger = logging.getLogger(__name__)

_YES, _NO = b"1", b"0"
_FAILED = b"!"
"""Begins the text of what has kept a host's leader from an answer."""

_LEADER_WAITS = 2
"""The number of times in a row that a leader may wait ``connect_timeout`` for the other hosts before it tells its own
ranks."""

_TELLING_SECONDS = 2.0
"""More than it takes to tell them."""

_HOW = "pip install 'hvdgloo[torch]', whatever framework trains, or with Python 3.10 'hvdgloo[pygloo]' on all hosts"
_INSTALL = {"torch": "pip install 'hvdgloo[torch]'", "pygloo": "pip install 'hvdgloo[pygloo]' (Python 3.10)"}


def plane_settings(config: Config) -> dict[str, Any]:
    """The settings that all ranks must have from rank 0, for ``Planes``."""
    return {
        "cpu_operations": config.cpu_operations,
        "gpu_operations": config.gpu_operations,
        "gloo_provider": gloo_provider(config.gloo_provider),
        "hierarchical_thresholds": (config.hierarchical_threshold, config.hierarchical_distribution_threshold),
        "shm_segment": config.shm_segment,
    }


class Planes:
    """Opens the data planes of one rank's process sets.

    Args:
        config: of this rank.
        decided: rank 0's ``plane_settings``.
        topology, rank: of the world that the sets are part of.
        store: of the rendezvous, for meeting the others.
        prefix: of this world's keys in it, never used before.
        address: this host's IP address that other hosts reach.
        arena: bytes of shared memory per rank in which tensors may live; None for as much as the machine has.
        silence: seconds after which a host that does not answer is lost; 0 where something else notices that.
    """

    def __init__(
        self,
        config: Config,
        decided: Mapping[str, Any],
        topology: Topology,
        rank: int,
        store: RendezvousStore,
        prefix: str,
        address: str,
        *,
        arena: int | None = None,
        silence: float = 0.0,
    ) -> None:
        self._silence = silence
        self._config, self._decided = config, decided
        self._topology, self._rank = topology, rank
        self._store, self._prefix, self._address = store, prefix, address
        self._arena = arena
        if sys.modules.get("torch") is not None and decided["gpu_operations"] != "gloo":
            from hvdgloo._backends import gpu

            gpu.before_threads()

    def open(self, number: int, members: Sequence[int], cancelled: Callable[[], bool] | None = None) -> Backend:
        """Connect this rank with a set's other members, which do the same.

        Args:
            number: of the set, never used before, the same on all ranks.
            members: ranks in ascending order.
            cancelled: polled to see whether to give up.

        Raises:
            ConfigError: shared memory was demanded, and cannot be had.
            ConnectError, RendezvousError: the members could not be connected.
            MissingDependencyError: Gloo is needed, and the package that carries it is not installed.
            BackendError: opening was cancelled.
        """
        prefix, place = f"{self._prefix}{number}/", members.index(self._rank)
        wanted = self._decided["cpu_operations"]
        reason = ""
        if wanted != "gloo":
            if len(members) == 1:
                return LocalGroup(1).backend(0)
            backend, reason = self._shared_memory(prefix, members, place, cancelled)
            if backend is not None:
                return backend
            if wanted == "shm":
                raise ConfigError(f"HVDGLOO_CPU_OPERATIONS=shm asks for shared memory, but {reason}")
        from hvdgloo._backends.hierarchical import layout_of

        self._require_gloo(members, reason)
        layout = layout_of([self._topology.workers[member].host for member in members], place)
        if wanted == "gloo" or layout is None or not self._decided["hierarchical_thresholds"][0]:
            return self._gloo(prefix, place, members, cancelled)
        return self._hierarchy(prefix, members, layout, cancelled)

    def open_device(
        self,
        number: int,
        members: Sequence[int],
        host: Backend,
        example: Buffer,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Sequence[Plane]:
        """The data planes of a set's CUDA tensors, which need torch; see ``cuda.open_planes``.

        Args:
            number, members, cancelled: as in ``open``.
            host: what that has returned.
            example: one of this rank's tensors.
        """
        from hvdgloo._backends import cuda

        return cuda.open_planes(
            host,
            example,
            store=self._store,
            prefix=f"{self._prefix}{number}/nccl/",
            ranks=members,
            rank=members.index(self._rank),
            local_rank=self._topology.workers[self._rank].local_rank,
            operations=self._decided["gpu_operations"],
            timeout=self._config.connect_timeout,
            cancelled=cancelled,
        )

    def _require_gloo(self, members: Sequence[int], reason: str) -> None:
        """Refuse to go on without the package that carries Gloo.

        Args:
            reason: why the members cannot share memory, if they were to.
        """
        provider, without = self._decided["gloo_provider"], ""
        if provider and has_package(provider):
            return
        if not share_a_host(self._topology, members):
            need = "ranks on several hosts need Gloo"
        elif reason:
            need = f"ranks that cannot share memory need Gloo ({reason})"
        else:
            need = "HVDGLOO_CPU_OPERATIONS=gloo (--cpu-operations gloo) asks for Gloo"
            without = "leave out --cpu-operations to share memory, or "
        if not provider:
            raise MissingDependencyError(
                f"{need}, and where rank 0 runs neither torch nor pygloo is installed; {without}{_HOW}"
            )
        raise MissingDependencyError(
            f"{need}, and {self._topology.describe(self._rank)} does not have {provider}, which rank 0 has chosen "
            f"to provide it (--gloo-provider); {without}{how_to_have(provider, self._config.gloo_provider)}"
        )

    def _gloo(self, prefix: str, place: int, members: Sequence[int], cancelled: Callable[[], bool] | None) -> Backend:
        size = len(members)
        provider, timeout = self._decided["gloo_provider"], self._config.connect_timeout
        secret = self._config.secret or b""
        try:
            return gloo_backend(
                provider, self._store, prefix, place, size, self._address, timeout, cancelled, secret, self._silence
            )
        except ConnectError as error:  # which numbers the members
            error.rank, error.missing = self._rank, tuple([members[place] for place in error.missing])
            raise

    def _hierarchy(
        self, prefix: str, members: Sequence[int], layout: Layout, cancelled: Callable[[], bool] | None
    ) -> Backend:
        """The plane of a set with several ranks on some of its hosts: Gloo alone if memory cannot be shared on all."""
        from hvdgloo._backends.hierarchical import HierarchicalBackend, Thresholds

        begin = sum(layout.sizes[: layout.host])
        here = members[begin : begin + layout.sizes[layout.host]]
        open_flat = partial(self._gloo, prefix, layout.rank, members)
        reason = ""
        with ExitStack() as undo:
            local: Backend | None = None
            cross: Backend | None = None
            if len(here) > 1:
                local, reason = self._shared_memory(f"{prefix}host{layout.host}/", here, layout.place, cancelled)
                if local is not None:
                    undo.callback(local.close)
            told = f"{prefix}host{layout.host}/all"
            possible = local is not None or len(here) == 1
            with self._failure_told(told, layout):
                if layout.place < layout.owners:
                    across = f"{prefix}across{layout.place}/"
                    first = itertools.accumulate(layout.sizes[:-1], initial=0)
                    there = [members[rank + layout.place] for rank in first]
                    cross = self._gloo(across, layout.host, there, cancelled)
                    undo.callback(cross.close)
                all_share = self._all_share(told, here[0], layout, cross, possible, cancelled)
            if all_share:
                few = open_flat(cancelled) if layout.size <= FEW_RANKS else None
                undo.pop_all()
                thresholds = Thresholds(*self._decided["hierarchical_thresholds"])
                return HierarchicalBackend(layout, local, cross, open_flat, thresholds, few=few)
        if layout.rank == 0:
            logger.warning("ranks of one host do not share memory everywhere: %s", reason or "see their output")
        return open_flat(cancelled)

    @contextmanager
    def _failure_told(self, key: str, layout: Layout) -> Iterator[None]:
        """On a host's leader, tell its other ranks of an error: they wait for the leader, and see nothing of it."""
        try:
            yield
        except Exception as error:
            if layout.place == 0 and layout.sizes[layout.host] > 1:
                with suppress(RendezvousError):  # then they are told by their own
                    self._store.set(key, _FAILED + str(error).encode())
            raise

    def _all_share(
        self,
        key: str,
        leader: int,
        layout: Layout,
        cross: Backend | None,
        possible: bool,
        cancelled: Callable[[], bool] | None,
    ) -> bool:
        """Return whether memory can be shared on all hosts: their leaders agree, and tell the others.

        Args:
            key: of this host, where its leader tells them.
            leader: the first of this host's ranks.
        """
        timeout = self._config.connect_timeout
        if layout.place:
            (answer,) = get_all(self._store, [key], _LEADER_WAITS * timeout + _TELLING_SECONDS, cancelled)
            if answer.startswith(_FAILED):
                reason = answer[len(_FAILED) :].decode(errors="replace")
                raise ConnectError(
                    f"{self._topology.describe(leader)} could not be connected with the other hosts: {reason}",
                    rank=leader,
                )
            return answer == _YES
        assert cross is not None
        agreed = np.array([possible], np.int32)
        work = cross.allreduce(Buffer.of_array(agreed), ReduceOp.MIN)
        wait_for(work, timeout, "the ranks did not agree on their data plane")
        if layout.sizes[layout.host] > 1:
            self._store.set(key, _YES if agreed[0] else _NO)
        return bool(agreed[0])

    def _shared_memory(
        self, prefix: str, members: Sequence[int], place: int, cancelled: Callable[[], bool] | None
    ) -> tuple[Backend | None, str]:
        """The plane, or why there is none."""
        if not share_a_host(self._topology, members):
            return None, "the ranks are on several hosts"
        assert self._config.secret is not None

        from hvdgloo._backends.shm.backend import ShmBackend, Unsupported

        try:
            backend = ShmBackend(
                self._store,
                prefix,
                place,
                len(members),
                self._config.secret,
                lambda member: self._topology.describe(members[member]),
                connect_timeout=self._config.connect_timeout,
                limit=int(self._decided["shm_segment"]),
                arena=self._arena,
                cancelled=cancelled,
            )
        except ConnectError as error:  # which numbers the members
            error.rank = None if error.rank is None else members[error.rank]
            error.missing = tuple(members[member] for member in error.missing)
            raise
        except Unsupported as error:
            if place == 0 and self._decided["cpu_operations"] == "auto":
                logger.warning("no shared memory between ranks %s, but Gloo: %s", _ranges(members), error)
            return None, str(error)
        if place == 0:
            logger.info("shared memory between ranks %s", _ranges(members))
        return backend, ""


def share_a_host(topology: Topology, members: Sequence[int]) -> bool:
    """True if all members say that they can share memory; a host may have been listed under several names."""
    identities = {topology.hosts[topology.workers[member].host].identity for member in members}
    return len(identities) == 1 and "" not in identities


def gloo_provider(setting: str) -> str:
    """The package that Gloo is taken from; empty if none is installed."""
    if setting != "auto":
        return setting
    return next((package for package in GLOO_PROVIDERS if has_package(package)), "")


def how_to_have(provider: str, setting: str) -> str:
    """Return the advice for a rank where the package that is to carry Gloo is missing; the other one may be there.

    Args:
        setting: this rank's own.
    """
    other = gloo_provider("auto")
    if not other:
        return _INSTALL[provider]
    if setting == provider:
        return f"leave out --gloo-provider (HVDGLOO_GLOO_PROVIDER), as {other} is installed, or {_INSTALL[provider]}"
    return f"run with --gloo-provider {other}, if all hosts have it as this one has, or {_INSTALL[provider]}"


def idle_provider(setting: str) -> str:
    """Return a warning for a rank that has all its planes but lacks the package that the user chose for Gloo; else
    empty."""
    if setting == "auto" or has_package(setting):
        return ""
    return (
        f"HVDGLOO_GLOO_PROVIDER={setting} (--gloo-provider) has no effect here: the ranks of one host share memory and "
        f"need no Gloo. {setting} is not installed; on several hosts this would be an error"
    )


def gloo_backend(
    provider: str,
    store: RendezvousStore,
    prefix: str,
    rank: int,
    size: int,
    address: str,
    connect_timeout: float,
    cancelled: Callable[[], bool] | None = None,
    secret: bytes = b"",
    silence: float = 0.0,
) -> Backend:
    """The data plane between hosts; see ``GlooBackend``.

    Args:
        provider: the package that carries Gloo, which is installed: "torch" or "pygloo".
        silence: see ``GlooBackend``; pygloo has nothing of the kind.
    """
    if provider == "pygloo":
        from hvdgloo._backends.pygloo import PyglooBackend

        return PyglooBackend(store, prefix, rank, size, address, connect_timeout, cancelled)

    from hvdgloo._backends.gloo import GlooBackend

    return GlooBackend(store, prefix, rank, size, address, connect_timeout, cancelled, secret, silence)


def _ranges(members: Sequence[int]) -> str:
    """Ascending ranks for messages: the whole range if nothing is left out."""
    if list(members) == list(range(members[0], members[-1] + 1)) and len(members) > 1:
        return f"{members[0]} to {members[-1]}"
    return ", ".join(map(str, members))
