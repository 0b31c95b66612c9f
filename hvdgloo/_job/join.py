"""Joining a job: from its settings to a Context whose engine runs.

It takes four requests to the rendezvous server, whatever the job's size: a hello, registering (which returns the whole
topology), and publishing and reading where ranks connect. An epoch's topology is requested once: ``init()`` after
``shutdown()`` meets the same ranks again under a new generation number.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from hvdgloo._job.context import Context
from hvdgloo._job.control_plane import World
from hvdgloo._job.participant import Participant, check_addresses
from hvdgloo._job.single_rank import open_single_rank
from hvdgloo._observe.counters import Counters
from hvdgloo.config import Config
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.rendezvous import Registration
from hvdgloo.topology import Topology


def connected(config: Config, counters: Counters | None = None) -> Participant | None:
    """Return the way into the job that ``config`` describes; None for a job of a single process, if it describes none.

    Args:
        counters: as for ``join``.

    Raises:
        ConfigError, RendezvousError: see ``Participant``.
    """
    return None if config.rendezvous is None else Participant(config, counters)


def join(
    config: Config,
    participant: Participant | None,
    ranks: Sequence[int] | None = None,
    process_sets: Sequence[Sequence[int]] = (),
    counters: Counters | None = None,
) -> Context:
    """Join a job of fixed size, or form one of a single process.

    Args:
        participant: what ``connected`` has returned; left at the end of the Context, or of an attempt that fails.
        ranks: ranks of the job that form a world of their own, in which they are renumbered in ascending order;
            None for all. This process is one of them.
        process_sets: the ranks of the sets that will be added at once, which must be the same on all ranks.
        counters: of this process, in a job of its own; else ``participant`` has them.

    Raises:
        InvalidArgumentError: (a ValueError) ranks that do not exist or do not include this one; process sets that
            differ from rank 0's.
        ConfigError: a setting is missing or cannot be used.
        RendezvousError: the rendezvous server cannot be reached, refused, or other workers did not come.
        ConnectError: ranks cannot be connected with each other.
        MissingDependencyError: several hosts need Gloo, which torch and pygloo provide.
    """
    if participant is None:
        _check_ranks(ranks, 0, 1)
        engine = open_single_rank(config, counters=counters)
        return Context(config, engine.topology, 0, engine)
    try:
        return _connect(participant, ranks, process_sets)
    except BaseException:
        participant.client.close()
        raise


_registrations: dict[tuple[str, int], Registration] = {}
"""The registrations of this process, by server and epoch."""

_generations: Counter[tuple[str, int, str]] = Counter()
"""The number of times that this process has joined each world of each."""


def _connect(participant: Participant, ranks: Sequence[int] | None, process_sets: Sequence[Sequence[int]]) -> Context:
    config, client = participant.config, participant.client
    assert config.rendezvous is not None
    job = (config.rendezvous, config.epoch)
    registration = _registrations.get(job)
    rank = config.rank if registration is None else registration.rank
    # Without a launcher any worker may turn out to be rank 0, which is the one that listens. Which rank will be the
    # first of a world of some ranks is known only after registration.
    may_be_first = rank in (None, 0) and ranks is None
    listener = participant.listen() if may_be_first else None
    try:
        if registration is None:
            port = listener.getsockname()[1] if listener is not None else 0
            info = participant.info(config.rank, port)
            registration = client.register(config.epoch, info, timeout=config.start_timeout)
            check_addresses(registration.topology, participant.reached_from)
            _registrations[job] = registration
        rank, topology, name = _world(registration, ranks)
        which = (*job, name)
        generation = _generations[which]
        _generations[which] += 1
        first = topology.workers[0]
        is_known = first.port and not name and generation == 0
        if rank == 0 and listener is None:
            listener = participant.listen()
        key = f"{config.epoch}.{generation}{name}"
        endpoint = (first.address, first.port) if is_known else None
        engine, decided = participant.open(World(rank, topology, key, generation, endpoint), listener, process_sets)
    finally:
        if listener is not None:
            listener.close()
    clock_offset = decided["clock_offset"]
    reporting = participant.report(engine, clock_offset)
    return Context(
        config,
        topology,
        rank,
        engine,
        client,
        clock_offset,
        registration.rank,
        decided["world"],
        reporting=reporting,
    )


def _world(registration: Registration, ranks: Sequence[int] | None) -> tuple[int, Topology, str]:
    """Return this process's rank in a world, the world's topology, and a text that distinguishes worlds."""
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
