"""A job, described: frozen values that command line and ``hvdgloo.run.run`` build and ``launch`` carries out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hvdgloo import topology
from hvdgloo.errors import ConfigError
from hvdgloo.runner.nics import parse_nics

GRACE_AFTER_FAILURE = 3.0
GRACE_AFTER_SIGNAL = 30.0
HEARTBEAT_TIMEOUT = 30.0


@dataclass(frozen=True)
class Host:
    """A host as the user gave it, and how many workers it may run. ``user`` is empty if none was given."""

    name: str
    slots: int
    user: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class Reach:
    """How other hosts than this one are reached.

    Attributes:
        python: the interpreter there.
        connect_timeout: seconds that one attempt to connect may take.
        wait_for_hosts: try hosts that are not up again and again, until the start timeout.
        ssh_port, ssh_identity_file, ssh_args: for the system's ssh; what is not given is ssh's own configuration's.
    """

    python: str = sys.executable
    connect_timeout: float = 30.0
    wait_for_hosts: bool = False
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    """How hosts reach each other.

    Attributes:
        nics: the user's words on which addresses to use, in the form of ``--nics``.
        port_range: first and last port for listeners of ours.
        connect_timeout: seconds that connecting two processes may take; probes take a part of it.
    """

    nics: tuple[str, ...] = ()
    port_range: tuple[int, int] | None = None
    connect_timeout: float = 30.0


@dataclass(frozen=True)
class Slot:
    """One worker's place. ``host`` is an index into the hosts that take part; the rest is as in ``hvd.*``."""

    rank: int
    size: int
    host: int
    hostname: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class LaunchSpec:
    """All that is asked of one job.

    Attributes:
        command: program and arguments of every worker, ready to be executed; empty for a ``function``.
        hosts: in order; ranks fill them in this order.
        np: number of workers, at most the hosts' slots.
        cwd: working directory of the workers.
        environ: what workers find in their environment besides what the launcher adds.
        function: sealed and pickled, for ``hvdgloo.run.run``; ``command`` then runs ``hvdgloo.runner.task``.
        secret: the job's secret.
        start_timeout: seconds for the agents, and then for the workers, to be there.
        grace_period: seconds between asking workers to end and killing them; None means 3 after a failure and 30 after
            a signal.
        heartbeat_timeout: seconds of silence between launcher and agent after which either is lost to the other.
        output_directory: receives ``rank.<rank>/stdout`` and ``stderr``, byte for byte.
        timestamps: precede every line with the time.
        stdin_rank: the rank that is given the launcher's standard input.
        verbose: say what is being done.
        reach: how other hosts are reached.
        network: how hosts reach each other.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    np: int
    cwd: str
    environ: Mapping[str, str] = field(repr=False)
    secret: bytes = field(repr=False)
    function: bytes | None = field(default=None, repr=False)
    start_timeout: float = 120.0
    grace_period: float | None = None
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    output_directory: str | None = None
    timestamps: bool = False
    stdin_rank: int | None = None
    verbose: bool = False
    reach: Reach = field(default_factory=Reach)
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        if self.stdin_rank is not None and not 0 <= self.stdin_rank < self.np:
            raise ConfigError(f"--stdin {self.stdin_rank}: there are only ranks 0 to {self.np - 1}")
        parse_nics(self.network.nics, [host.name for host in self.hosts])  # it complains before anything starts

    @property
    def grace_after_failure(self) -> float:
        return GRACE_AFTER_FAILURE if self.grace_period is None else self.grace_period

    @property
    def grace_after_signal(self) -> float:
        return GRACE_AFTER_SIGNAL if self.grace_period is None else self.grace_period


def assign(hosts: Sequence[Host], np: int) -> tuple[Slot, ...]:
    """Give ``np`` ranks to hosts in order, each filled before the next.

    Returns:
        the slots in order of ranks. Hosts that no rank falls on take no part: indices run over the others.

    Raises:
        ConfigError: more ranks than slots; the text has both numbers.
    """
    try:
        places = topology.fill([host.name for host in hosts], [host.slots for host in hosts], np)
    except ValueError as error:
        raise ConfigError(f"{error}; give more slots (-H {hosts[0].name}:{np}) or a smaller -np") from None
    local_sizes = [0] * len(hosts)
    for host, _ in places:
        local_sizes[host] += 1
    compact = [used - 1 for used in accumulate(int(size > 0) for size in local_sizes)]
    return tuple(
        Slot(
            rank=rank,
            size=np,
            host=compact[host],
            hostname=hosts[host].name,
            local_rank=local,
            local_size=local_sizes[host],
            cross_rank=sum(size > local for size in local_sizes[:host]),
            cross_size=sum(size > local for size in local_sizes),
        )
        for rank, (host, local) in enumerate(places)
    )
