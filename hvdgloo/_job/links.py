"""Connecting the control plane: every rank with rank 0, or in a large job each with the leader that it reports to."""

from __future__ import annotations

import secrets
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hvdgloo._engine.seat import Seat, seat
from hvdgloo._job.settings import plan_settings
from hvdgloo._net import abstract
from hvdgloo._net.handshake import Handshake, Link, listen
from hvdgloo._net.tls import Tls
from hvdgloo.config import Config, format_endpoint, parse_endpoint
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous import RendezvousClient
from hvdgloo.topology import Topology

_FEWEST_HOSTS = 3
"""With two hosts, one connection between them would be all that a tree saves rank 0."""


def seat_of(rank: int, topology: Topology, config: Config) -> Seat | None:
    """A rank's place in the tree; None if the job is too small for one."""
    if config.control_fanin == 0 or topology.size < config.control_tree_ranks or len(topology.hosts) < _FEWEST_HOSTS:
        return None
    if sys.platform != "linux":  # elsewhere there are no abstract sockets
        return None
    return seat(rank, topology.slots, config.control_fanin)


@dataclass(frozen=True)
class Meeting:
    """What one rank knows before it is connected with others.

    Attributes:
        secret: of the job.
        tls: encrypts what goes from host to host, if given.
        key: tells apart the worlds that this job's processes form, one after another or at the same time.
        generation: see ``Handshake``.
        address: at which other hosts reach this one.
    """

    config: Config
    secret: bytes
    tls: Tls | None
    client: RendezvousClient
    key: str
    generation: int
    topology: Topology
    rank: int
    address: str

    def connect(
        self,
        place: Seat | None,
        listener: socket.socket | None,
        first: tuple[str, int] | None,
        process_sets: list[list[int]],
    ) -> tuple[dict[int, Link], dict[str, Any]]:
        """Connect with all whom this rank reports to, or who report to it.

        Args:
            place: this rank's in the tree, if there is one.
            listener: on rank 0, else None.
            first: where rank 0 listens, if that is known.
            process_sets: to be added at once.

        Returns:
            the connections by rank, and what rank 0 decides for all: the settings that ``engine_settings`` adopts,
            ``process_sets``, those of ``Planes``, the ``world``'s name, and ``clock_offset`` from this host's clock to
            rank 0's.
        """
        shape = [self.config.control_fanin, self.config.control_tree_ranks]
        shared = {
            **plan_settings(self.config),
            "process_sets": process_sets,
            "world": secrets.token_hex(16),
            "control_plane": shape,
        }
        if self.rank == 0:
            assert listener is not None
            if first is None:
                self._announce(0, listener)
        if place is not None:
            links, decided = self._take_seat(place, listener, first, shared)
        elif self.rank == 0:
            assert listener is not None
            decided = {**shared, "clock_offset": 0.0}
            links = self._accept(listener, range(1, self.topology.size), decided)
        else:
            link, decided = self._reach(0, first)
            links = {0: link}
        if decided["control_plane"] != shape:
            for link in links.values():
                link.sock.close()
            theirs = decided["control_plane"]
            raise ConfigError(
                f"HVDGLOO_CONTROL_FANIN={shape[0]} and HVDGLOO_CONTROL_TREE_RANKS={shape[1]} on "
                f"{self.topology.describe(self.rank)}, but {theirs[0]} and {theirs[1]} on {self.topology.describe(0)}; "
                "they must be the same on all hosts"
            )
        return links, decided

    def _take_seat(
        self, place: Seat, listener: socket.socket | None, first: tuple[str, int] | None, shared: dict[str, Any]
    ) -> tuple[dict[int, Link], dict[str, Any]]:
        """First with the one above, who knows what rank 0 has decided; then with those below, who want to know it."""
        links: dict[int, Link] = {}
        with ExitStack() as stack:
            here: abstract.OwnListener | None = None
            if place.members:
                here = stack.enter_context(abstract.OwnListener(self._handshake(self.rank).name_here(self.key)))
            if place.leaders and listener is None:
                if self.tls is not None:
                    self.tls.check_listener()
                listener = stack.enter_context(listen(self.address, self.config.port_range))
                self._announce(self.rank, listener)
            try:
                if place.parent < 0:
                    decided = {**shared, "clock_offset": 0.0}
                elif place.below:
                    links[place.parent], decided = self._reach(place.parent, first if place.parent == 0 else None)
                else:
                    links[place.parent], decided = self._reach_here(place.parent)
                if here is not None:
                    links.update(self._accept(here, sorted(place.members), decided, encrypted=False))
                if listener is not None:
                    links.update(self._accept(listener, sorted(place.leaders), decided))
            except BaseException:
                for link in links.values():
                    link.sock.close()
                raise
        return links, decided

    def _handshake(self, parent: int, *, encrypted: bool = True) -> Handshake:
        tls = self.tls if encrypted else None
        return Handshake(self.secret, self.config.epoch, self.generation, tls=tls, parent=parent)

    def _accept(
        self, listener: socket.socket, ranks: range | list[int], decided: dict[str, Any], *, encrypted: bool = True
    ) -> dict[int, Link]:
        handshake = self._handshake(self.rank, encrypted=encrypted)
        return handshake.accept_all(listener, ranks, decided, self.config.connect_timeout, self.topology.describe)

    def _reach(self, parent: int, endpoint: tuple[str, int] | None) -> tuple[Link, dict[str, Any]]:
        """Connect to another host."""
        timeout = self.config.start_timeout
        if endpoint is None:
            store = self.client.store("control", timeout=timeout)
            endpoint = parse_endpoint(store.get(self._key_of(parent), timeout=timeout).decode())
        handshake = self._handshake(parent)
        return handshake.connect(*endpoint, self.rank, self.config.connect_timeout, self.topology.describe)

    def _reach_here(self, parent: int) -> tuple[Link, dict[str, Any]]:
        """Connect to the leader of this host. What does not leave it is not encrypted."""
        handshake = self._handshake(parent, encrypted=False)
        name = handshake.name_here(self.key)
        return handshake.connect_here(name, self.rank, self.config.connect_timeout, self.topology.describe)

    def _announce(self, rank: int, listener: socket.socket) -> None:
        """Say where this rank listens this time: an epoch's ranks and hosts are fixed, but the port is not."""
        endpoint = format_endpoint(self.address, listener.getsockname()[1])
        store = self.client.store("control", timeout=self.config.start_timeout)
        store.set(self._key_of(rank), endpoint.encode())

    def _key_of(self, rank: int) -> str:
        return f"{self.key}.{rank}" if rank else self.key
