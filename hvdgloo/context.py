"""One rank's membership in a job: settings, topology and engine, opened and closed together.

Front-ends work in the Context that ``current()`` returns, the process's only one; tests and embedders construct their
own, which is what allows many ranks in one process.

Opening takes four requests to the rendezvous server whatever the job's size: a hello, registering (which answers with
the whole topology), and publishing and reading where the others meet. An epoch's topology is asked for once: ``init()``
after ``shutdown()`` meets the same ranks again under a new generation number.
"""

from __future__ import annotations

import atexit
import hashlib
import ipaddress
import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdgloo import aftermath
from hvdgloo.backends.local import LocalGroup
from hvdgloo.config import Config, format_endpoint, parse_endpoint, unknown_variables
from hvdgloo.engine.connect import Handshake, listen
from hvdgloo.engine.engine import Engine, EngineSettings
from hvdgloo.errors import (
    ConfigError,
    InvalidArgumentError,
    NotInitializedError,
    RendezvousError,
)
from hvdgloo.machine import usable_cores
from hvdgloo.planes import Planes, idle_provider, plane_settings
from hvdgloo.rendezvous import MemoryStore, Registration, RendezvousClient, WorkerInfo, host_identity
from hvdgloo.topology import Topology

logger = logging.getLogger(__name__)

_SPIN_SECONDS = 100e-6
"""How long a blocking call looks for the others' answers before it goes to sleep, where every rank has a core: ranks
that call at the same time answer each other within that."""

_TRACE = 5
_LEVELS = {"TRACE": _TRACE, "FATAL": logging.CRITICAL}


class Context:
    """One rank of a job.

    Args:
        config: its settings.
        topology: of the whole job.
        rank: this rank.
        engine: started; the Context owns it from now on.
        clock_offset: seconds that rank 0's clock is ahead of this host's.
        job_rank: this rank among all of the job's, if the Context is a world of some of them.
        client: of the rendezvous server, likewise. It stays connected while the rank is part of the job: the server
            shows who is.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        rank: int,
        engine: Engine,
        client: RendezvousClient | None = None,
        clock_offset: float = 0.0,
        job_rank: int | None = None,
    ) -> None:
        self._client = client
        self.job_rank = rank if job_rank is None else job_rank
        self.clock_offset = clock_offset
        self.config = config
        self.topology = topology
        self.rank = rank
        self.engine = engine
        self.closed = False

    @property
    def secret(self) -> bytes | None:
        """The job's secret; None in a job of a single process, which has none."""
        return self.config.secret

    @property
    def size(self) -> int:
        return self.topology.size

    @property
    def local_rank(self) -> int:
        return self.topology.workers[self.rank].local_rank

    @property
    def local_size(self) -> int:
        return self.topology.local_size(self.rank)

    @property
    def cross_rank(self) -> int:
        return self.topology.cross_rank(self.rank)

    @property
    def cross_size(self) -> int:
        return self.topology.cross_size(self.rank)

    @property
    def is_homogeneous(self) -> bool:
        return self.topology.is_homogeneous

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Trace collectives; on rank 0, or if ``path`` has ``{rank}`` in it, on every rank; see ``Engine``.

        Ranks are those of the whole job, also in a world of some of them: two worlds must not write into one file.
        """
        if "{rank}" in path or self.job_rank == 0:
            own = path.replace("{rank}", str(self.job_rank))
            self.engine.start_timeline(own, clock_offset=self.clock_offset, mark_cycles=mark_cycles)

    def close(self, reason: str = "") -> None:
        """End this rank's part of the job; see ``Engine.close``."""
        self.closed = True
        self.engine.close(reason)
        if self._client is not None:
            self._client.close()

    @classmethod
    def open(
        cls, config: Config, ranks: Sequence[int] | None = None, process_sets: Sequence[Sequence[int]] = ()
    ) -> Context:
        """Join the job that ``config`` describes, or be one of a single process if it describes none.

        Args:
            ranks: of the job that form a world of their own, in which they are numbered anew in ascending order; None
                for all. This process is one of them.
            process_sets: the ranks of the sets that will be added at once, which must be the same on all ranks.

        Raises:
            InvalidArgumentError: (a ValueError) ranks that do not exist or without this one; process sets that are not
                those of rank 0.
            ConfigError: a setting is missing or cannot be used.
            RendezvousError: the rendezvous server cannot be reached, refused, or other workers did not come.
            ConnectError: ranks cannot be connected with each other.
            MissingDependencyError: several hosts need Gloo, which torch or pygloo carries.
        """
        if config.rendezvous is None:
            topology = Topology.local(1, pid=os.getpid(), name=config.hostname or socket.gethostname())
            _check_ranks(ranks, 0, 1)
            alone = LocalGroup(1).backend(0)
            planes = Planes(config, plane_settings(config), topology, 0, MemoryStore(), "", "127.0.0.1")
            settings = engine_settings(config)
            engine = Engine(
                0, topology, {}, alone, settings, lambda number, ranks, cancelled: alone, planes.open_device
            )
            engine.start()
            return cls(config, topology, 0, engine)
        if config.secret is None:
            raise ConfigError(
                f"HVDGLOO_RENDEZVOUS={config.rendezvous} is set, but neither HVDGLOO_SECRET nor HVDGLOO_SECRET_FILE; "
                "the server says where its secret file is"
            )
        client = RendezvousClient(
            config.rendezvous,
            config.secret,
            connect_timeout=config.connect_timeout,
            secret_source=config.secret_source,
        )
        try:
            return _join(cls, config, config.secret, client, ranks, process_sets)
        except BaseException:
            client.close()
            raise


_SAY_SO_SECONDS = 3.0
"""After this time without a server there is a line about it: a wrong address is the likeliest mistake by hand."""

_registrations: dict[tuple[str, int], Registration] = {}
"""What this process learnt from each server and epoch."""

_generations: Counter[tuple[str, int, str]] = Counter()
"""How often it has joined each of their worlds."""


def _join(
    cls: type[Context],
    config: Config,
    secret: bytes,
    client: RendezvousClient,
    ranks: Sequence[int] | None,
    process_sets: Sequence[Sequence[int]],
) -> Context:
    assert config.rendezvous is not None
    sets = [list(members) for members in process_sets]
    reached_from = _reach(client, config)
    address = config.address or reached_from
    job = (config.rendezvous, config.epoch)
    registration = _registrations.get(job)
    rank = config.rank if registration is None else registration.rank
    # Without a launcher any worker may turn out to be rank 0, which is the one that listens. Who will be the first of
    # a world of some ranks is known after registration only.
    may_be_first = rank in (None, 0) and ranks is None
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
            )
            registration = client.register(config.epoch, info, timeout=config.start_timeout)
            check_addresses(registration.topology, reached_from)
            _registrations[job] = registration
        rank, topology, world = _world(registration, ranks)
        which = (*job, world)
        generation = _generations[which]
        _generations[which] += 1
        first = topology.workers[0]
        if first.port and not world and generation == 0:
            endpoint = first.address, first.port
        else:
            if rank == 0 and listener is None:
                listener = listen(address, config.port_range)
            endpoint = _meet(
                client, f"{config.epoch}.{generation}{world}", config, address, listener if rank == 0 else None
            )
        handshake = Handshake(secret, config.epoch, generation)
        links, decided = _control_links(handshake, rank, topology, listener, endpoint, config, sets)
    finally:
        if listener is not None:
            listener.close()

    store = client.store("gloo", timeout=config.connect_timeout)
    planes = Planes(config, decided, topology, rank, store, f"{config.epoch}.{generation}{world}/", address)
    try:
        backend = planes.open(0, range(topology.size))
    except BaseException:
        for sock in links.values():
            sock.close()
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
    )
    engine.start()
    if decided["process_sets"] != sets:
        engine.close()  # not before: the others wait for this rank until it is connected
        raise InvalidArgumentError(
            f"init(process_sets=...) was called with the sets {sets} on {topology.describe(rank)}, and with "
            f"{decided['process_sets']} on {topology.describe(0)}; give all ranks the same list"
        )
    return cls(config, topology, rank, engine, client, decided["clock_offset"], registration.rank)


def _world(registration: Registration, ranks: Sequence[int] | None) -> tuple[int, Topology, str]:
    """This process's rank among those that form a world, their topology, and a text that tells worlds apart."""
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
    """Refuse addresses that ranks on other hosts cannot use, before anybody waits for a connection that never comes.

    Args:
        reached_from: this host's address in the connection to the rendezvous server. If even that is a loopback one,
            as all ranks' addresses are, then the "hosts" are containers that share one network.

    Raises:
        ConfigError: naming a rank with a loopback address, or two ranks with addresses of different families.
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
    """Connect to the server, which may not be there yet; this host's address in that connection."""
    patience = min(_SAY_SO_SECONDS, config.start_timeout)
    try:
        return client.local_address(timeout=patience)
    except RendezvousError as error:
        left = config.start_timeout - patience
        if left <= 0:
            raise
        logger.warning("%s. Trying for another %g s (HVDGLOO_START_TIMEOUT)", error, left)
        return client.local_address(timeout=left)


def _meet(
    client: RendezvousClient, key: str, config: Config, address: str, listener: socket.socket | None
) -> tuple[str, int]:
    """Where rank 0 listens this time: ranks and hosts of an epoch are settled, its port is not.

    Args:
        listener: on rank 0, else None.
    """
    store = client.store("control", timeout=config.start_timeout)
    if listener is None:
        return parse_endpoint(store.get(key, timeout=config.start_timeout).decode())
    endpoint = address, listener.getsockname()[1]
    store.set(key, format_endpoint(*endpoint).encode())
    return endpoint


def _control_links(
    handshake: Handshake,
    rank: int,
    topology: Topology,
    listener: socket.socket | None,
    endpoint: tuple[str, int],
    config: Config,
    process_sets: list[list[int]],
) -> tuple[dict[int, socket.socket], dict[str, Any]]:
    """Connect the control plane.

    Returns:
        the connections, and what rank 0 decides for all: the settings that ``engine_settings`` takes over,
        ``process_sets`` to be added at once, those of ``Planes``, and ``clock_offset`` from this host's clock to rank
        0's.
    """
    shared = {**_plan_settings(config), "process_sets": process_sets}
    if rank == 0:
        assert listener is not None
        links = handshake.accept_all(listener, topology.size, shared, config.connect_timeout, topology.describe)
        return links, {**shared, "clock_offset": 0.0}
    sock, decided = handshake.connect(*endpoint, rank, config.connect_timeout, topology.describe)
    return {0: sock}, decided


def _plan_settings(config: Config) -> dict[str, Any]:
    """The settings that all ranks must have from rank 0."""
    return {
        "fusion_threshold": config.fusion_threshold,
        "separate_groups": config.disable_group_fusion,
        "deterministic": config.deterministic,
        **plane_settings(config),
    }


def engine_settings(
    config: Config, decided: Mapping[str, Any] | None = None, local_size: int | None = None
) -> EngineSettings:
    """The engine's part of the settings, with rank 0's word on those that shape plans.

    Args:
        local_size: ranks on this host. Each has a core of its own to spin on for an answer, or none does.
    """
    shutdown_time = config.stall_shutdown_time
    if 0 < shutdown_time < config.stall_warning_time:
        logger.warning(
            "HVDGLOO_STALL_SHUTDOWN_TIME_SECONDS=%g is less than the warning time (%g s) and is ignored",
            shutdown_time,
            config.stall_warning_time,
        )
        shutdown_time = 0.0
    shared = _plan_settings(config)
    shared.update({name: value for name, value in (decided or {}).items() if name in shared})
    return EngineSettings(
        fusion_threshold=int(shared["fusion_threshold"]),
        inline_threshold=config.inline_threshold,
        separate_groups=bool(shared["separate_groups"]),
        deterministic=bool(shared["deterministic"]),
        operation_timeout=config.operation_timeout,
        cache_capacity=config.cache_capacity,
        cycle_time=config.cycle_time / 1000,
        stall_check=not config.stall_check_disable,
        stall_warning_time=config.stall_warning_time,
        stall_shutdown_time=shutdown_time,
        spin_time=_SPIN_SECONDS if local_size is not None and 1 < local_size <= usable_cores() else 0.0,
    )


_current: Context | None = None
_lock = threading.Lock()


def init(
    ranks: Sequence[int] | None = None,
    process_sets: Sequence[Sequence[int]] = (),
    prepare: Callable[[Context], None] = lambda _: None,
) -> Context:
    """Join the job, as the environment describes it; a program that no launcher started is a job of its own.

    Args:
        ranks, process_sets: see ``Context.open``.
        prepare: called with a new Context before anybody else gets it.

    Returns:
        the Context; the same one while initialized.

    Raises:
        whatever ``Context.open`` and ``prepare`` raise.
    """
    global _current, _owner
    with _lock:
        if _current is None:
            _owner = os.getpid()
            config = Config.from_env()
            configure_logging(config, config.rank)
            aftermath.install(config.rank)
            context = Context.open(config, ranks, process_sets)
            configure_logging(config, context.rank)
            if context.local_rank == 0:
                for line in unknown_variables():
                    logger.warning("%s", line)
            aftermath.install(context.rank)
            _pin(context)
            try:
                if config.timeline and config.timeline.upper() != "DYNAMIC":
                    context.start_timeline(config.timeline, config.timeline_mark_cycles)
                prepare(context)
            except BaseException:
                context.close()
                raise
            _current = context
        return _current


def _pin(context: Context) -> None:
    """Keep the communication threads on the core that the user gave."""
    if not context.config.thread_affinity:
        return
    cores = context.config.thread_affinity.split(",")
    try:
        context.engine.pin(int(cores[context.local_rank]))
    except IndexError:
        logger.warning("HVDGLOO_THREAD_AFFINITY has no core for local rank %d; it runs on any", context.local_rank)
    except OSError as error:
        logger.warning("HVDGLOO_THREAD_AFFINITY: core %s cannot be used: %s", cores[context.local_rank], error)


def shutdown(reason: str = "") -> None:
    """End this rank's part of the job, and so everybody's collectives. Does nothing when not initialized.

    Args:
        reason: what to tell the other ranks, if this one ends with an error.
    """
    global _current
    with _lock:
        if _current is not None:
            context, _current = _current, None
            context.close(reason)


def is_initialized() -> bool:
    """True between ``init()`` and ``shutdown()`` on this rank."""
    return _current is not None


def current() -> Context:
    """The process's Context.

    Raises:
        NotInitializedError: (a ValueError) ``init()`` has not been called.
    """
    context = _current
    if context is None:
        aftermath.install()  # as init() would have done: what is wrong is in the program, and not as deep as here
        raise NotInitializedError
    return context


class _Handler(logging.StreamHandler):  # type: ignore[type-arg] # which Python has from 3.11 on
    """Ours, so that it can be found again; writes to whatever sys.stderr is at the time."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """Show it, unless the root logger does so already: its handlers may come and go at any time."""
        if not _root_shows(record):
            super().emit(record)


def _root_shows(record: logging.LogRecord) -> bool:
    """Whether the root logger writes hvdgloo's record to the terminal, as it does after ``logging.basicConfig()``."""
    if not logging.getLogger("hvdgloo").propagate:
        return False
    return any(
        isinstance(handler, logging.StreamHandler)
        and handler.stream in (sys.stderr, sys.stdout)
        and record.levelno >= handler.level
        for handler in logging.getLogger().handlers
    )


def configure_logging(config: Config, rank: int | None) -> None:
    """Show hvdgloo's messages on stderr as ``[time: LEVEL file:line] [rank]: text``.

    A program that has attached handlers of its own to the ``hvdgloo`` logger keeps them, and gets no other. Where the
    root logger writes to the terminal (``logging.basicConfig()``, which importing MXNet calls), it shows them instead.
    """
    logging.addLevelName(_TRACE, "TRACE")
    log = logging.getLogger("hvdgloo")
    others = [handler for handler in log.handlers if not isinstance(handler, _Handler)]
    log.setLevel(_LEVELS.get(config.log_level, config.log_level))
    for handler in [handler for handler in log.handlers if isinstance(handler, _Handler)]:
        log.removeHandler(handler)
    if others:
        return
    handler = _Handler()
    time = "" if config.log_hide_time else "%(asctime)s.%(msecs)03d: "
    place = "" if rank is None else f" [{rank}]"
    handler.setFormatter(
        logging.Formatter(f"[{time}%(levelname)s %(filename)s:%(lineno)d]{place}: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    log.addHandler(handler)


_owner = 0
"""The process that called ``init()``: a child that it forks inherits the Context, and must not shut the job down."""


def _at_exit() -> None:
    if os.getpid() == _owner:
        shutdown(aftermath.uncaught())


def shut_down_first_at_exit() -> None:
    """Shut down before whatever was imported so far does so, which may wait for what waits for the other ranks."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


shut_down_first_at_exit()
