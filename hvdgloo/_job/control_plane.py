"""Connecting the control plane: every rank with rank 0, or in a large job each with the leader that it reports to."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hvdgloo._backends.base import get_all
from hvdgloo._engine.tree_position import TreePosition, position_of
from hvdgloo._job.settings import plan_settings
from hvdgloo._net import abstract
from hvdgloo._net.handshake import Cancelled, Handshake, Link, listen
from hvdgloo._net.tls import Tls
from hvdgloo.config import Config, format_endpoint, parse_endpoint
from hvdgloo.errors import ConnectError, RendezvousTimeoutError
from hvdgloo.rendezvous import RendezvousClient
from hvdgloo.topology import Topology

_FEWEST_HOSTS = 3
"""With two hosts, one connection between them would be all that a tree saves rank 0."""


def tree_position_of(rank: int, topology: Topology) -> TreePosition | None:
    """Return a rank's place in the tree; None if every rank is connected with rank 0.

    It depends on nothing but what all ranks are told alike, or they would wait for each other in different places.
    """
    if not topology.control_fanin or topology.size < topology.control_tree_ranks or len(topology.hosts) < _FEWEST_HOSTS:
        return None
    if any(count > 1 and not host.identity for host, count in zip(topology.hosts, topology.slots, strict=True)):
        return None  # ranks in several containers, or on machines of one name: they cannot meet at an abstract socket
    return position_of(rank, topology.slots, topology.control_fanin)


@dataclass(frozen=True)
class World:
    """Some or all of a job's ranks that are about to be connected with each other.

    Attributes:
        rank: this process's.
        topology: of the world's ranks.
        key: tells it apart from all worlds that this job's processes form, one after another or at the same time.
        generation: see ``Handshake``.
        first: where its rank 0 listens, if that is known.
        scope: what the names of its stores on the server end in.
    """

    rank: int
    topology: Topology
    key: str
    generation: int = 0
    first: tuple[str, int] | None = None
    scope: str = ""


class ControlPlane:
    """One rank's way into the control plane: it connects this rank with the ranks above and below it.

    Args:
        secret: of the job.
        tls: encrypts what goes from host to host, if given.
        world: which is formed.
        address: at which other hosts reach this one.
        told: on rank 0, the values that it sends to the others besides its settings.
        cancelled: polled during all waits; returns whether to give up, with a BackendError.
    """

    def __init__(
        self,
        config: Config,
        secret: bytes,
        tls: Tls | None,
        client: RendezvousClient,
        world: World,
        address: str,
        told: Mapping[str, Any] | None = None,
        cancelled: Cancelled | None = None,
    ) -> None:
        self.config, self.secret, self.tls, self.client = config, secret, tls, client
        self.world, self.rank, self.topology = world, world.rank, world.topology
        self.address, self.told, self.cancelled = address, told or {}, cancelled

    def connect(
        self, place: TreePosition | None, listener: socket.socket | None, process_sets: list[list[int]]
    ) -> tuple[dict[int, Link], dict[str, Any]]:
        """Connect with the rank that this one reports to, and with all that report to it.

        Args:
            place: this rank's in the tree, if there is one.
            listener: on rank 0, else None.
            process_sets: to be added at once.

        Returns:
            the connections by rank, and what rank 0 decides for all: the settings that ``engine_settings`` adopts,
            ``process_sets``, the settings of ``Planes``, what it was ``told``, the ``world``'s name, and
            ``clock_offset`` from this host's clock to rank 0's.
        """
        first = self.world.first
        shared = {
            **plan_settings(self.config),
            **self.told,
            "process_sets": process_sets,
            "world": secrets.token_hex(16),
        }
        # Ranks that registered together are all here. A world that is formed later is joined by each rank in its own
        # time.
        patience = self.config.connect_timeout if first is not None else self.config.start_timeout
        if self.rank == 0:
            assert listener is not None
            if first is None:
                self._announce(0, listener)
        if place is not None:
            links, decided = self._take_seat(place, listener, first, shared, patience)
        elif self.rank == 0:
            assert listener is not None
            decided = {**shared, "clock_offset": 0.0}
            links = self._accept(listener, range(1, self.topology.size), decided)
        else:
            link, decided = self._reach(0, first, patience)
            links = {0: link}
        return links, decided

    def _take_seat(
        self,
        place: TreePosition,
        listener: socket.socket | None,
        first: tuple[str, int] | None,
        shared: dict[str, Any],
        patience: float,
    ) -> tuple[dict[int, Link], dict[str, Any]]:
        """Connect with the rank above, which knows rank 0's decisions, and then with the ranks below."""
        links: dict[int, Link] = {}
        with ExitStack() as stack:
            here: abstract.OwnListener | None = None
            if place.members:
                here = stack.enter_context(abstract.OwnListener(self._handshake(self.rank).name_here(self.world.key)))
            if place.leaders and listener is None:
                if self.tls is not None:
                    self.tls.check_listener()
                listener = stack.enter_context(listen(self.address, self.config.port_range))
                self._announce(self.rank, listener)
            try:
                if place.parent < 0:
                    decided = {**shared, "clock_offset": 0.0}
                elif place.below:
                    links[place.parent], decided = self._reach(
                        place.parent, first if place.parent == 0 else None, patience
                    )
                else:
                    links[place.parent], decided = self._reach_here(place.parent, patience)
                members, leaders = sorted(place.members), sorted(place.leaders)
                if listener is not None:
                    links.update(self._accept(listener, leaders, decided, None if here is None else (here, members)))
                elif here is not None:
                    links.update(self._accept(here, members, decided, encrypted=False))
            except BaseException:
                for link in links.values():
                    link.sock.close()
                raise
        return links, decided

    def _handshake(self, parent: int, *, encrypted: bool = True) -> Handshake:
        tls = self.tls if encrypted else None
        return Handshake(self.secret, self.topology.epoch, self.world.generation, tls=tls, parent=parent)

    def _accept(
        self,
        listener: socket.socket,
        ranks: Collection[int],
        decided: dict[str, Any],
        here: tuple[socket.socket, Collection[int]] | None = None,
        *,
        encrypted: bool = True,
    ) -> dict[int, Link]:
        handshake = self._handshake(self.rank, encrypted=encrypted)
        timeout = self.config.connect_timeout
        return handshake.accept_all(listener, ranks, decided, timeout, self.topology.describe, self.cancelled, here)

    def _reach(self, parent: int, endpoint: tuple[str, int] | None, patience: float) -> tuple[Link, dict[str, Any]]:
        """Connect to another host.

        Args:
            patience: seconds for the parent to publish where it listens. A leader answers only when it has been
                answered itself, which may take as long again.
        """
        if endpoint is None:
            store = self.client.store(f"control{self.world.scope}", timeout=patience)
            try:
                (told,) = get_all(store, [self._key_of(parent)], patience, self.cancelled)
                endpoint = parse_endpoint(told.decode())
            except RendezvousTimeoutError as error:
                raise ConnectError(
                    f"{self.topology.describe(self.rank)} waited {patience:g} s for {self.topology.describe(parent)} "
                    "to say where it listens. It had registered, so either it died since (see its output), or it has "
                    "not called hvd.init()",
                    rank=parent,
                ) from error
        timeout = max(patience, self.config.connect_timeout) if parent else self.config.connect_timeout
        return self._handshake(parent).connect(*endpoint, self.rank, timeout, self.topology.describe, self.cancelled)

    def _reach_here(self, parent: int, patience: float) -> tuple[Link, dict[str, Any]]:
        """Connect to the leader of this host. What does not leave it is not encrypted."""
        handshake = self._handshake(parent, encrypted=False)
        timeout = max(patience, self.config.connect_timeout)
        return handshake.connect_here(
            handshake.name_here(self.world.key), self.rank, timeout, self.topology.describe, self.cancelled
        )

    def _announce(self, rank: int, listener: socket.socket) -> None:
        """Publish where this rank listens this time: an epoch's ranks and hosts are fixed, but the port is not."""
        endpoint = format_endpoint(self.address, listener.getsockname()[1])
        store = self.client.store(f"control{self.world.scope}", timeout=self.config.start_timeout)
        store.set(self._key_of(rank), endpoint.encode())

    def _key_of(self, rank: int) -> str:
        return f"{self.world.key}.{rank}" if rank else self.world.key
