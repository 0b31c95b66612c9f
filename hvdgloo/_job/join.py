"""Joining a job: from its settings to a Context whose engine runs.

It takes four requests to the rendezvous server, whatever the job's size: a hello, registering (which returns the whole
topology), and publishing and reading where ranks connect. An epoch's topology is requested once: ``init()`` after
``shutdown()`` meets the same ranks again under a new generation number.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence

from hvdgloo._backends.local import LocalGroup
from hvdgloo._backends.select import Planes, idle_provider, plane_settings
from hvdgloo._engine.engine import Engine
from hvdgloo._job.context import Context
from hvdgloo._job.links import Meeting, seat_of
from hvdgloo._job.settings import engine_settings
from hvdgloo._net.handshake import listen
from hvdgloo._net.tls import Tls
from hvdgloo._platform.nics import tell_nccl
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, InvalidArgumentError, RendezvousError
from hvdgloo.rendezvous import MemoryStore, Registration, RendezvousClient, WorkerInfo, host_identity
from hvdgloo.topology import Topology

logger = logging.getLogger(__name__)


def join(config: Config, ranks: Sequence[int] | None = None, process_sets: Sequence[Sequence[int]] = ()) -> Context:
    """Join the job that ``config`` describes, or form a job of a single process if it describes none.

    Args:
        ranks: those of the job's ranks that form a world of their own, in which they are renumbered in ascending order;
            None for all. This process is one of them.
        process_sets: the ranks of the sets that will be added at once, which must be the same on all ranks.

    Raises:
        InvalidArgumentError: (a ValueError) ranks that do not exist or do not include this one; process sets that
            differ from rank 0's.
        ConfigError: a setting is missing or cannot be used.
        RendezvousError: the rendezvous server cannot be reached, refused, or other workers did not come.
        ConnectError: ranks cannot be connected with each other.
        MissingDependencyError: several hosts need Gloo, which torch and pygloo provide.
    """
    if config.rendezvous is None:
        topology = Topology.local(1, pid=os.getpid(), name=config.hostname or socket.gethostname())
        _check_ranks(ranks, 0, 1)
        alone = LocalGroup(1).backend(0)
        planes = Planes(config, plane_settings(config), topology, 0, MemoryStore(), "", "127.0.0.1")
        settings = engine_settings(config)
        engine = Engine(0, topology, {}, alone, settings, lambda number, ranks, cancelled: alone, planes.open_device)
        engine.start()
        return Context(config, topology, 0, engine)
    if config.secret is None:
        raise ConfigError(
            f"HVDGLOO_RENDEZVOUS={config.rendezvous} is set, but neither HVDGLOO_SECRET nor HVDGLOO_SECRET_FILE; "
            "hvdgloo-rendezvous prints where its secret file is"
        )
    tls = None if config.tls_files is None else Tls(*config.tls_files)
    client = RendezvousClient(
        config.rendezvous,
        config.secret,
        connect_timeout=config.connect_timeout,
        secret_source=config.secret_source,
        tls=tls,
    )
    try:
        return _connect(config, config.secret, client, ranks, process_sets, tls)
    except BaseException:
        client.close()
        raise


_SAY_SO_SECONDS = 3.0
"""After this many seconds without a server, a line says so: a wrong address is the likeliest mistake in a manual setup.
"""

_registrations: dict[tuple[str, int], Registration] = {}
"""What this process learned from each server about each epoch."""

_generations: Counter[tuple[str, int, str]] = Counter()
"""How often this process has joined each world of each."""


def _connect(
    config: Config,
    secret: bytes,
    client: RendezvousClient,
    ranks: Sequence[int] | None,
    process_sets: Sequence[Sequence[int]],
    tls: Tls | None,
) -> Context:
    assert config.rendezvous is not None
    sets = [list(members) for members in process_sets]
    reached_from = _reach(client, config)
    address = config.address or reached_from
    if not config.job_id:
        tell_nccl(address, os.environ, chosen=config.address is not None)
    job = (config.rendezvous, config.epoch)
    registration = _registrations.get(job)
    rank = config.rank if registration is None else registration.rank
    # Without a launcher any worker may turn out to be rank 0, which is the one that listens. Which rank will be the
    # first of a world of some ranks is known only after registration.
    may_be_first = rank in (None, 0) and ranks is None
    if may_be_first and tls is not None:
        tls.check_listener()
    listener = listen(address, config.port_range) if may_be_first else None
    try:
        port = listener.getsockname()[1] if listener is not None else 0
        if registration is None:
            info = WorkerInfo(
                rank=config.rank,
                index=config.index,
                host_name=config.hostname or socket.gethostname(),
                host_identity=host_identity(),
                address=address,
                port=port,
                pid=os.getpid(),
                # In a tree, ranks of one host meet at an abstract socket, which only Linux has.
                control_fanin=config.control_fanin if sys.platform == "linux" else 0,
                control_tree_ranks=config.control_tree_ranks,
            )
            registration = client.register(config.epoch, info, timeout=config.start_timeout)
            check_addresses(registration.topology, reached_from)
            _registrations[job] = registration
        rank, topology, world = _world(registration, ranks)
        which = (*job, world)
        generation = _generations[which]
        _generations[which] += 1
        first = topology.workers[0]
        is_known = first.port and not world and generation == 0
        if rank == 0 and listener is None:
            listener = listen(address, config.port_range)
        key = f"{config.epoch}.{generation}{world}"
        place = seat_of(rank, topology)
        meeting = Meeting(config, secret, tls, client, key, generation, topology, rank, address)
        links, decided = meeting.connect(
            place,
            listener if rank == 0 else None,
            (first.address, first.port) if is_known else None,
            sets,
        )
    finally:
        if listener is not None:
            listener.close()

    store = client.store("gloo", timeout=config.connect_timeout)
    planes = Planes(config, decided, topology, rank, store, f"{config.epoch}.{generation}{world}/", address)
    try:
        backend = planes.open(0, range(topology.size))
    except BaseException:
        for link in links.values():
            link.sock.close()
        raise
    if rank == 0 and (idle := idle_provider(config.gloo_provider)):
        logger.warning("%s", idle)
    engine = Engine(
        rank,
        topology,
        links,
        backend,
        engine_settings(config, decided, topology.local_size(rank)),
        planes.open,
        planes.open_device,
        place,
    )
    engine.start()
    if decided["process_sets"] != sets:
        engine.close()  # not earlier: the others wait for this rank until it is connected
        raise InvalidArgumentError(
            f"init(process_sets=...) was called with the sets {sets} on {topology.describe(rank)}, and with "
            f"{decided['process_sets']} on {topology.describe(0)}; give all ranks the same list"
        )
    return Context(config, topology, rank, engine, client, decided["clock_offset"], registration.rank, decided["world"])


def _world(registration: Registration, ranks: Sequence[int] | None) -> tuple[int, Topology, str]:
    """This process's rank among those that form a world, their topology, and a text that distinguishes worlds."""
    size = registration.topology.size
    _check_ranks(ranks, registration.rank, size)
    chosen = range(size) if ranks is None else sorted(ranks)
    if len(chosen) == size:
        return registration.rank, registration.topology, ""
    digest = hashlib.sha256(repr(list(chosen)).encode()).hexdigest()[:16]
    return chosen.index(registration.rank), registration.topology.restricted(chosen), f".{digest}"


def _check_ranks(ranks: Sequence[int] | None, rank: int, size: int) -> None:
    if ranks is None:
        return
    if len(set(ranks)) != len(ranks) or not all(0 <= member < size for member in ranks):
        raise InvalidArgumentError(f"comm={list(ranks)}: ranks are 0 to {size - 1}, each at most once")
    if rank not in ranks:
        raise InvalidArgumentError(
            f"comm={list(ranks)} leaves out this process, which is rank {rank}; each process names the world that it "
            "is in"
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


def _reach(client: RendezvousClient, config: Config) -> str:
    """Connect to the server, which may not have started yet; returns this host's address in that connection."""
    patience = min(_SAY_SO_SECONDS, config.start_timeout)
    try:
        return client.local_address(timeout=patience)
    except RendezvousError as error:
        left = config.start_timeout - patience
        if left <= 0:
            raise
        logger.warning("%s. Trying for another %g s (HVDGLOO_START_TIMEOUT)", error, left)
        return client.local_address(timeout=left)
