"""A process that takes part in a job: its rendezvous server, its own address, and the worlds that it forms."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvdgloo._backends.select import Planes, idle_provider
from hvdgloo._engine.engine import Engine
from hvdgloo._job.control_plane import ControlPlane, World, tree_position_of
from hvdgloo._job.reporting import Reporting
from hvdgloo._job.settings import engine_settings
from hvdgloo._net.event_loop import WakeUp
from hvdgloo._net.handshake import listen
from hvdgloo._net.tls import Tls
from hvdgloo._observe.counters import Counters
from hvdgloo._platform.nics import tell_nccl
from hvdgloo._platform.spelling import followed_by
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, InvalidArgumentError, RendezvousError
from hvdgloo.rendezvous import RendezvousClient, WorkerInfo, host_identity
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.topology import Topology

if TYPE_CHECKING:
    from hvdgloo._observe.reporter import Reporter

logger = logging.getLogger(__name__)

_SAY_SO_SECONDS = 3.0
"""Seconds without a server after which a line is logged: a wrong address is the likeliest mistake in a manual setup."""


class Participant:
    """A process that may join a job, connected with its rendezvous server.

    Args:
        config: of a job with a server.
        counters: of this process, into which its engines write; None if nothing is to be counted.

    Attributes:
        address: at which other hosts reach this one.
        reached_from: this host's address in the connection to the server.

    Raises:
        ConfigError: there is no secret; the address or the files for TLS cannot be used; the job is to be elastic, and
            the server's is not.
        RendezvousError: the server cannot be reached.
    """

    def __init__(self, config: Config, counters: Counters | None = None) -> None:
        assert config.rendezvous is not None
        self.counters = counters
        if config.secret is None:
            raise ConfigError(
                f"HVDGLOO_RENDEZVOUS={config.rendezvous} is set, but neither HVDGLOO_SECRET nor HVDGLOO_SECRET_FILE; "
                "hvdgloo-rendezvous prints where its secret file is"
            )
        self.config = config
        self.secret = config.secret
        self.tls = None if config.tls_files is None else Tls(*config.tls_files)
        self.client = RendezvousClient(
            config.rendezvous,
            config.secret,
            connect_timeout=config.connect_timeout,
            secret_source=config.secret_source,
            tls=self.tls,
        )
        try:
            self.reached_from = self._reach()
            if config.elastic and not self.client.is_elastic(timeout=config.connect_timeout):
                raise ConfigError(
                    f"HVDGLOO_ELASTIC=1 is set, but the rendezvous server {config.rendezvous} was started for a fixed "
                    "number of workers: start it with --min-np, or unset HVDGLOO_ELASTIC"
                )
            # Without a launcher only the server knows.
            self.config = replace(config, elastic=self.client.is_elastic(timeout=config.connect_timeout))
            self.address = config.address or self.reached_from
            if not config.job_id:
                tell_nccl(self.address, os.environ, chosen=config.address is not None)
        except BaseException:
            self.client.close()
            raise

    def _reach(self) -> str:
        """Connect to the server, which may not have started yet; returns this host's address in that connection."""
        patience = min(_SAY_SO_SECONDS, self.config.start_timeout)
        try:
            return self.client.local_address(timeout=patience)
        except RendezvousError as error:
            left = self.config.start_timeout - patience
            if left <= 0:
                raise
            logger.warning("%s", followed_by(error, f"trying for another {left:g} s (HVDGLOO_START_TIMEOUT)"))
            return self.client.local_address(timeout=left)

    def listen(self) -> socket.socket:
        """Listen for other ranks, in case this one becomes rank 0.

        Raises:
            ConnectError: the address is not this host's, or every port is taken.
            ConfigError: there is no certificate for TLS.
        """
        if self.tls is not None:
            self.tls.check_listener()
        return listen(self.address, self.config.port_range)

    def info(self, rank: int | None, port: int) -> WorkerInfo:
        """Return this process's description of itself.

        Args:
            rank: its rank so far, if it has one.
            port: at which it listens; 0 if it does not.
        """
        return WorkerInfo(
            rank=rank,
            index=self.config.index,
            host_name=host_name(self.config.hostname),
            host_identity=host_identity(),
            address=self.address,
            port=port,
            pid=os.getpid(),
            parent=os.getppid(),
            # In a tree, ranks of one host meet at an abstract socket, which only Linux has.
            control_fanin=self.config.control_fanin if sys.platform == "linux" else 0,
            control_tree_ranks=self.config.control_tree_ranks,
        )

    def open(
        self,
        world: World,
        listener: socket.socket | None,
        sets: Sequence[Sequence[int]],
        *,
        told: Callable[[], dict[str, Any]] = dict,
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[Engine, dict[str, Any]]:
        """Connect with a world's other ranks, which do the same.

        Args:
            listener: for rank 0; others may have one, which is not used.
            sets: the process sets that will be added at once, the same on all ranks.
            told: called on rank 0; returns further values for the others.
            cancelled: polled; returns whether to give up.

        Returns:
            the running engine, and what rank 0 has decided.

        Raises:
            ConnectError, RendezvousError: the ranks cannot be connected with each other.
            BackendError: it was cancelled.
            InvalidArgumentError: the process sets differ from rank 0's.
            MissingDependencyError: Gloo is needed, and the package that carries it is not installed.
        """
        config, client, rank, topology = self.config, self.client, world.rank, world.topology
        place = tree_position_of(rank, topology)
        process_sets = [list(members) for members in sets]
        control_plane = ControlPlane(
            config, self.secret, self.tls, client, world, self.address, told() if rank == 0 else None, cancelled
        )
        links, decided = control_plane.connect(place, listener if rank == 0 else None, process_sets)
        store = client.store(f"gloo{world.scope}", timeout=config.connect_timeout)
        planes = Planes(config, decided, topology, rank, store, f"{world.key}/", self.address)
        try:
            backend = planes.open(0, range(topology.size), cancelled)
        except BaseException:
            for link in links.values():
                link.sock.close()
            raise
        if rank == 0 and (idle := idle_provider(config.gloo_provider)):
            logger.warning("%s", idle)
        settings = engine_settings(config, decided, topology.local_size(rank))
        engine = Engine(rank, topology, links, backend, settings, planes.open, planes.open_device, place, self.counters)
        engine.start()
        if decided["process_sets"] != process_sets:
            engine.close()  # not earlier: the others wait for this rank until it is connected
            raise InvalidArgumentError(
                f"init(process_sets=...) was called with the sets {process_sets} on {topology.describe(rank)}, and "
                f"with {decided['process_sets']} on {topology.describe(0)}; give all ranks the same list"
            )
        return engine, decided

    def report(self, engine: Engine, clock_offset: float) -> Reporting | None:
        """Report on an engine's rank from now on, if an observer could look at it; see ``observing``."""
        config, counters, client = self.config, self.counters, self.client
        if counters is None or (config.job_id and not config.observer):
            return None
        owned = counters

        def make(wake_up: WakeUp) -> Reporter:
            from hvdgloo._job.observing import reporter_of  # which jobs that are not observed hardly need

            return reporter_of(config, engine, owned, client, clock_offset, wake_up)

        return Reporting(
            make,
            config.observe_interval,
            lambda: bool(config.observer) and os.path.exists(config.observer),
            at_once=bool(config.observer),
        )


def check_addresses(topology: Topology, reached_from: str) -> None:
    """Refuse addresses that ranks on other hosts cannot use, before any rank waits for a connection that never comes.

    Args:
        reached_from: this host's address in the connection to the rendezvous server. If even that is a loopback
            address, and so are all ranks' addresses, the "hosts" are containers that share one network.

    Raises:
        ConfigError: a rank has a loopback address, or two ranks have addresses of different families; it names them.
    """
    if len(topology.hosts) == 1:
        return
    addresses = [ipaddress.ip_address(worker.address) for worker in topology.workers]
    loopback = [rank for rank, address in enumerate(addresses) if address.is_loopback]
    if loopback and (len(loopback) < len(addresses) or not ipaddress.ip_address(reached_from).is_loopback):
        rank = loopback[0]
        raise ConfigError(
            f"{topology.describe(rank)} can be reached at {addresses[rank]} only by ranks on its own host, and there "
            f"are {len(topology.hosts)} hosts. Set HVDGLOO_ADDRESS there to an address that the others reach, or let "
            "HVDGLOO_RENDEZVOUS name the server by such an address on its own host, too"
        )
    other = next((rank for rank, address in enumerate(addresses) if address.version != addresses[0].version), None)
    if other is not None:
        raise ConfigError(
            f"{topology.describe(0)} has the address {addresses[0]} and {topology.describe(other)} has "
            f"{addresses[other]}, but all ranks of a job use either IPv4 or IPv6. Set HVDGLOO_ADDRESS, or name the "
            "rendezvous server by an address of one family everywhere"
        )
