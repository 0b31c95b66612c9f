"""Many ranks in one process: a thread and a Context of its own for each, over any backend.

The control plane is the real one (real sockets, the real handshake for Gloo), so what a test sees here is what a job
of processes does, save for what needs a process to die.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hvdgloo._backends.base import Backend, Plane
from hvdgloo._backends.local import LocalGroup
from hvdgloo._backends.select import Planes, gloo_backend, gloo_provider, plane_settings
from hvdgloo._backends.shm.backend import ShmBackend
from hvdgloo._engine.engine import Engine
from hvdgloo._engine.tree_position import position_of
from hvdgloo._job.context import Context
from hvdgloo._job.settings import engine_settings
from hvdgloo._net.handshake import Handshake, Link, listen
from hvdgloo._observe.counters import Counters
from hvdgloo.config import Config
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.topology import Topology
from tests.support.links import link_pair
from tests.support.topologies import on_hosts

T = TypeVar("T")

SECRET = bytes(range(32))
DEADLINE = 20.0


IN_PROCESS = ("local", "inline", "tree")
"""Worlds whose data moves between threads, with nothing of the system's."""


class RankError(AssertionError):
    """A rank's function failed; the cause is what it raised."""


class World:
    """``size`` ranks.

    Args:
        backend: "local", "gloo" (torch's, or pygloo's where there is no torch), or "inline": local, and tiny tensors
            travel with the agreement as they do by default; "shm",
            and "shm-pipes" as on processors that reorder stores; "hierarchical" what a job gets that has two ranks on
            each host, whatever the tensor's size; "tree" as "inline", but ranks speak to rank 0 by way of leaders, as
            if they were on several hosts.
        wrap: applied to each rank's backend, to inject faults.
        open_device: from a rank and what ``Engine`` asks for, the planes of tensors that claim to be a GPU's.
        spin_time: see ``EngineSettings``.
        slots: for "tree", the number of ranks on each host.
        settings: fields of Config.
    """

    def __init__(
        self,
        size: int,
        backend: str = "local",
        *,
        wrap: Callable[[int, Backend], Backend] | None = None,
        open_device: Callable[..., Sequence[Plane]] | None = None,
        spin_time: float = 0.0,
        slots: Sequence[int] | None = None,
        **settings: Any,
    ) -> None:
        self.size = size
        self.backend = backend
        defaults = {"operation_timeout": 10.0, "connect_timeout": 10.0}
        if backend not in ("inline", "tree"):
            defaults["inline_threshold"] = 0  # tests are full of tiny tensors, which would never see the data plane
        if backend == "tree":
            defaults["control_fanin"] = 1
        config = Config(secret=SECRET, **{**defaults, **settings})
        topology = Topology.local(size, pid=os.getpid())
        self._spoilt = False
        self._lock = threading.Lock()
        self._groups: dict[int, LocalGroup] = {}
        self._store = MemoryStore()
        self._planes = [] if backend != "hierarchical" else [self._on_hosts(rank, config) for rank in range(size)]
        hosts = tuple(slots or _hosts_of(size)) if backend == "tree" else None
        self.seats = None if hosts is None else [position_of(rank, hosts, config.control_fanin) for rank in range(size)]
        links, backends = (self._local if backend in IN_PROCESS else self._met)(topology, config)
        if self._planes:
            assert {each.name for each in backends} == {"hierarchical" if size > 2 else "shm" if size > 1 else "local"}
        if wrap is not None:
            backends = [wrap(rank, b) for rank, b in enumerate(backends)]
        self._contexts: list[Context] = []
        for rank in range(size):
            engine = Engine(
                rank,
                topology,
                links[rank],
                backends[rank],
                replace(engine_settings(config), spin_time=spin_time),
                partial(self._open_set, rank, config),
                None if open_device is None else partial(open_device, rank),
                None if self.seats is None else self.seats[rank],
                Counters(),
            )
            engine.start()
            self._contexts.append(Context(config, topology, rank, engine))

    def run(
        self, function: Callable[[Any], T], made: Callable[[Context], Any] | None = None, deadline: float = DEADLINE
    ) -> list[T]:
        """Call ``function(context)`` on every rank at once, or ``function(made(context))``; results by rank.

        Raises:
            RankError: some rank failed, or has not ended after ``deadline`` seconds.
        """
        results: dict[int, T] = {}
        failures: list[tuple[int, BaseException]] = []

        def body(context: Context) -> None:
            try:
                results[context.rank] = function(context if made is None else made(context))
            except BaseException as error:
                failures.append((context.rank, error))

        threads = [
            threading.Thread(target=body, args=(context,), name=f"rank-{context.rank}", daemon=True)
            for context in self._contexts
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + deadline
        for thread in threads:
            while thread.is_alive() and not failures and time.monotonic() < end:
                thread.join(0.02)
        self._spoilt |= len(results) < self.size
        if failures:
            rank, error = failures[0]
            raise RankError(f"rank {rank}: {type(error).__name__}: {error}") from error
        if any(thread.is_alive() for thread in threads):
            late = [thread.name for thread in threads if thread.is_alive()]
            raise RankError(f"{', '.join(late)} did not end within {deadline:g} s")
        return [results[rank] for rank in range(self.size)]

    @property
    def contexts(self) -> list[Context]:
        """Each rank's, for what is not done by all at once. A test that takes them may leave anything behind."""
        self._spoilt = True
        return self._contexts

    @property
    def is_as_new(self) -> bool:
        """True if everything that was run has succeeded, no rank has ended, nothing is in flight, and no set was
        added."""
        return not self._spoilt and all(
            not context.closed
            and context.engine.error is None
            and list(context.engine.process_sets) == [0]
            and not context.engine._member.has_pending
            for context in self._contexts
        )

    def close(self) -> None:
        """Shut all ranks down."""
        with ThreadPoolExecutor(self.size) as pool:
            list(pool.map(lambda context: context.close(), self._contexts))

    def __enter__(self) -> World:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _open_set(
        self, rank: int, config: Config, number: int, ranks: tuple[int, ...], cancelled: Callable[[], bool]
    ) -> Backend:
        if self._planes:
            return self._planes[rank].open(number, ranks, cancelled)
        if self.backend not in IN_PROCESS and (self.backend == "gloo" or len(ranks) > 1):
            return self._connect_backend(f"set{number}/", ranks.index(rank), len(ranks), config, cancelled)
        with self._lock:
            group = self._groups.setdefault(number, LocalGroup(len(ranks), config.operation_timeout))
        return group.backend(ranks.index(rank))

    def _local(self, topology: Topology, config: Config) -> tuple[list[dict[int, Link]], Sequence[Backend]]:
        links: list[dict[int, Link]] = [{} for _ in range(topology.size)]
        for rank in range(1, topology.size):
            parent = 0 if self.seats is None else self.seats[rank].parent
            links[parent][rank], links[rank][parent] = link_pair()
        group = LocalGroup(topology.size, config.operation_timeout)
        return links, [group.backend(rank) for rank in range(topology.size)]

    def _connect_backend(
        self, prefix: str, place: int, size: int, config: Config, cancelled: Callable[[], bool] | None = None
    ) -> Backend:
        if self.backend == "gloo":
            provider = gloo_provider(config.gloo_provider)
            timeout = config.connect_timeout
            return gloo_backend(provider, self._store, prefix, place, size, "127.0.0.1", timeout, cancelled)
        if size == 1:
            return LocalGroup(1).backend(0)
        return ShmBackend(
            self._store,
            prefix,
            place,
            size,
            SECRET,
            lambda rank: f"rank {rank}",
            connect_timeout=config.connect_timeout,
            limit=config.shm_segment,
            pipes=self.backend == "shm-pipes",
            cancelled=cancelled,
        )

    def _on_hosts(self, rank: int, config: Config) -> Planes:
        topology = on_hosts(*[2] * (self.size // 2), *[1] * (self.size % 2))
        config = replace(config, hierarchical_threshold=1, hierarchical_distribution_threshold=1)
        return Planes(config, plane_settings(config), topology, rank, self._store, "test/", "127.0.0.1")

    def _met(self, topology: Topology, config: Config) -> tuple[list[dict[int, Link]], Sequence[Backend]]:
        listener = listen("127.0.0.1", None)
        port, size = listener.getsockname()[1], topology.size

        def connect(rank: int) -> tuple[dict[int, Link], Backend]:
            handshake = Handshake(SECRET, 0, 0)
            if rank == 0:
                links = handshake.accept_all(listener, range(1, size), {}, config.connect_timeout, topology.describe)
            else:
                link, _ = handshake.connect("127.0.0.1", port, rank, config.connect_timeout, topology.describe)
                links = {0: link}
            if self._planes:
                return links, self._planes[rank].open(0, range(topology.size))
            return links, self._connect_backend("test/", rank, topology.size, config)

        with listener, ThreadPoolExecutor(topology.size) as pool:
            pairs = list(pool.map(connect, range(topology.size)))
        return [links for links, _ in pairs], [backend for _, backend in pairs]


def _hosts_of(size: int) -> list[int]:
    """Ranks on hosts of one and of two in turn."""
    slots: list[int] = []
    while (left := size - sum(slots)) > 0:
        slots.append(min(left, 1 + len(slots) % 2))
    return slots


MakeWorld = Callable[..., World]
"""The type of the fixtures ``world`` and ``ranks``."""


@contextmanager
def closed_later(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes the same as ``make``; what it has made is closed in the end."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(closing(make(*args, **kwargs)))
