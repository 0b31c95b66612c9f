"""The description of a job: frozen values that the command line and ``hvdgloo.run.run`` build and ``launch`` carries
out."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from hvdgloo import topology
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError
from hvdgloo.runner.network.interfaces import NicSettings, parse_nics

if TYPE_CHECKING:  # a job of a fixed size needs none of it
    from hvdgloo.rendezvous._elastic.events import Rules

GRACE_AFTER_FAILURE = 3.0
GRACE_AFTER_SIGNAL = 30.0
HEARTBEAT_TIMEOUT = 5.0
PROGRAM_S_TIMEOUT = 60.0
"""Seconds of silence that agents tolerate if the launcher is part of the user's own program, where one long call
(sorting a list, for example) may keep the launcher's threads from running."""

_NO_PREFIX = "--no-prefix is for the output of a single rank; show only one, with --log-ranks 0"


@dataclass(frozen=True)
class HostProfile:
    """The environment of an agent that connected by itself. Several such agents may share a machine.

    Attributes:
        hostname: the machine's name, as it is shown.
        machine: equal for agents whose workers form one host of the job.
        cwd: working directory of its workers.
        command: what runs a function there.
        path: its PYTHONPATH, which precedes the launcher's.
        kept: names of variables that keep their values there, whatever the launcher sends.
        limits: names of the variables set there that limit threads. If there are any, the launcher adds none.
        key: identifies its connection.
    """

    hostname: str
    machine: str
    cwd: str
    command: tuple[str, ...] = field(repr=False)
    path: str = field(default="", repr=False)
    kept: frozenset[str] = field(default=frozenset(), repr=False)
    limits: frozenset[str] = field(default=frozenset(), repr=False)
    key: int = 0


@dataclass(frozen=True)
class HostEntry:
    """A host as the user gave it, and the number of workers that it may run.

    Attributes:
        slots: None if the host itself decides: one for each of its GPUs, otherwise one.
        user: to log in as; empty if none was given.
        profile: set for an agent that connected by itself. Agents of one machine are adjacent.
    """

    name: str
    slots: int | None = None
    user: str = ""
    profile: HostProfile | None = None

    @property
    def machine(self) -> str:
        """Key that is equal for entries whose workers form one host of the job."""
        return self.name if self.profile is None else self.profile.machine

    @property
    def hostname(self) -> str:
        """Name of the host of the job that this entry belongs to."""
        return self.name if self.profile is None else self.profile.hostname

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class Reach:
    """The way to other hosts.

    Attributes:
        python: the interpreter on them.
        connect_timeout: seconds that one attempt to connect may take.
        silence: seconds without a sign of life after which an established connection counts as lost.
        wait_for_hosts: keep trying hosts that are not up, until the start timeout; None lets the transport decide.
        ssh_port, ssh_identity_file, ssh_args: for the system's ssh; whatever is not given is left to ssh's own
            configuration.
        agent_command: the words of a template; empty for ssh.
        slurm_job: the job whose allocation has the nodes ``slurm_nodes``, which srun reaches.
    """

    python: str = sys.executable
    connect_timeout: float = 30.0
    silence: float = HEARTBEAT_TIMEOUT
    wait_for_hosts: bool | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_args: tuple[str, ...] = ()
    agent_command: tuple[str, ...] = ()
    slurm_job: str = ""
    slurm_nodes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Times:
    """The time limits of a job, in seconds.

    Attributes:
        start_timeout: for the agents, and then the workers, to be up; None for the setting.
        grace_period: between terminating workers and killing them; None means 3 after a failure and 30 after a signal.
        heartbeat_timeout: of silence between launcher and agent after which each considers the other lost; None for
            values that suit a launcher inside the user's program.
        end_timeout: for an agent to say goodbye, after everything was killed, before it is killed itself.
    """

    start_timeout: float | None = None
    grace_period: float | None = None
    heartbeat_timeout: float | None = None
    end_timeout: float = 15.0

    @property
    def grace_after_failure(self) -> float:
        return GRACE_AFTER_FAILURE if self.grace_period is None else self.grace_period

    @property
    def grace_after_signal(self) -> float:
        return GRACE_AFTER_SIGNAL if self.grace_period is None else self.grace_period

    @property
    def host_timeout(self) -> float:
        """Seconds of silence after which the launcher considers an agent lost."""
        return HEARTBEAT_TIMEOUT if self.heartbeat_timeout is None else self.heartbeat_timeout

    @property
    def launcher_timeout(self) -> float:
        """Seconds of silence after which an agent on another host considers the launcher lost."""
        return PROGRAM_S_TIMEOUT if self.heartbeat_timeout is None else self.heartbeat_timeout


@dataclass(frozen=True)
class Output:
    """The output of the workers, and of the launcher about them.

    Attributes:
        directory: receives ``rank.<rank>/stdout`` and ``stderr``, byte for byte.
        timestamps: precede every line with the time.
        log_ranks: the ranks whose output is shown; None for all.
        prefix: begin every line that is shown with its rank and stream.
        verbose: report every step of the launch.
        backlog: bytes of unwritten output beyond which workers have to wait for the reader.
    """

    directory: str | None = None
    timestamps: bool = False
    log_ranks: frozenset[int] | None = None
    prefix: bool = True
    verbose: bool = False
    backlog: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.directory is not None:  # the program may change its working directory
            object.__setattr__(self, "directory", os.path.abspath(self.directory))


class Discovery(Protocol):
    """A source of the hosts of an elastic job."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int | None]:
        """Return hosts (``h1``, ``user@h1``) and their slots, in the order in which they are to be filled.

        None for slots lets the host decide: one for each of its GPUs, otherwise one.
        """
        ...


@dataclass(frozen=True)
class ElasticSpec:
    """The options of an elastic job.

    Attributes:
        rules: sizes, limits and times.
        discovery: lists the hosts. For hosts that the user has named, the list never changes.
        interval: seconds between two calls of it.
        entry: converts a host's name to its entry; None to parse the name as the user would write it.
    """

    rules: Rules
    discovery: Discovery
    interval: float = 1.0
    entry: Callable[[str], HostEntry] | None = None


@dataclass(frozen=True)
class Views:
    """The observers of a job: page, report and progress line.

    Attributes:
        title: the command as the user typed it, with secrets masked (see ``masking``).
        page: address and port of the page that browsers show while the job runs, port 0 for any; None for no page.
        control: viewers of the page may have steps traced.
        report: file for the report after the job's end; None for none.
        progress: show a progress line on the launcher's terminal.
        show_link: shows the page's address, which grants access, to the user; None to print it.
    """

    title: str = ""
    page: tuple[str, int] | None = None
    control: bool = False
    report: str | None = None
    progress: bool = True
    show_link: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Slot:
    """The place of one worker.

    Attributes:
        host: index of the entry, among those that take part; each has an agent.
        node: number of the worker's host in the job; such a host may have several agents.
        nodes: the number of such hosts.
        hostname: the name of that host.
        agent: the name of the entry, which messages use.

    The other attributes have the same meaning as in ``hvd.*``.
    """

    rank: int
    size: int
    host: int
    node: int
    nodes: int
    hostname: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    agent: str


@dataclass(frozen=True)
class LaunchSpec:
    """The complete description of one job.

    Attributes:
        command: program and arguments of every worker on this host, ready to be executed.
        hosts: in order; ranks fill them in this order. Empty if only a discovery knows them.
        np: number of workers, at most the hosts' slots; None for all slots.
        cwd: working directory of the workers.
        environ: the workers' environment, except for what the launcher adds. Its settings apply to the launcher, too.
        exported: names of variables that are always passed to other hosts.
        export_all: other hosts get all other variables, too, except those that are specific to a host.
        remote_command: the command of workers on other hosts; None for ``command``.
        function: sealed and pickled, for ``hvdgloo.run.run``; ``command`` then runs ``worker.function_task``.
        secret: the job's secret.
        stdin_rank: the rank that receives the launcher's standard input.
        reach: the way to other hosts.
        network_interfaces: which addresses hosts use among each other, in the form of ``--nics``.
        times: time limits.
        output: the output of the workers, and of the launcher about them.
        elastic: how the number of workers may change; None if it is fixed.
        max_restarts: how often all workers of a job of a fixed size are restarted after a failure.
        views: the observers of the job.
    """

    command: tuple[str, ...]
    hosts: tuple[HostEntry, ...]
    np: int | None
    cwd: str
    environ: Mapping[str, str] = field(repr=False)
    secret: bytes = field(repr=False)
    function: bytes | None = field(default=None, repr=False)
    stdin_rank: int | None = None
    reach: Reach = field(default_factory=Reach)
    exported: frozenset[str] = frozenset()
    export_all: bool = True
    remote_command: tuple[str, ...] | None = None
    network_interfaces: tuple[str, ...] = ()
    times: Times = Times()
    output: Output = Output()
    elastic: ElasticSpec | None = None
    max_restarts: int = 0
    views: Views = Views()

    def __post_init__(self) -> None:
        """Refuse unusable values before anything is started.

        Raises:
            ConfigError: a value cannot be used; the text names the option.
        """
        _ = self.config
        identity = self.reach.ssh_identity_file
        if identity is not None and not os.path.exists(os.path.expanduser(identity)):
            raise ConfigError(f"--ssh-identity-file {identity}: there is no such file")
        if self.max_restarts and self.elastic is not None:
            raise ConfigError(
                "--max-restarts is for jobs of a fixed size; an elastic one goes on after a failure, at most "
                "--reset-limit times"
            )
        if self.max_restarts and self.stdin_rank is not None:
            raise ConfigError(
                "--stdin cannot be combined with --max-restarts: input that one start has read would be lost to the "
                "next"
            )
        if self.views.control and self.views.page is None:
            raise ConfigError("--page-control needs the page; add --page, or leave it out")
        _ = self.nics
        if self.elastic is not None:
            self._check_elastic(self.elastic.rules.largest)
            return
        slots = [host.slots for host in self.hosts if host.slots is not None]
        if self.np is not None:
            self.check_ranks(self.np)
        elif slots and len(slots) == len(self.hosts):
            self.check_ranks(sum(slots))

    @cached_property
    def config(self) -> Config:
        """Settings in the workers' environment."""
        return Config.from_env(self.environ)

    @property
    def start_timeout(self) -> float:
        """Seconds within which the agents, and then the workers, must be up."""
        return self.config.start_timeout if self.times.start_timeout is None else self.times.start_timeout

    @property
    def nics(self) -> NicSettings:
        """Meaning of ``--nics`` for this job's hosts; for any host if they are not known from the start."""
        return parse_nics(self.network_interfaces, [host.name for host in self.hosts] or None)

    def _check_elastic(self, largest: int | None) -> None:
        if self.stdin_rank is not None:
            raise ConfigError("--stdin is for jobs of a fixed size: here, a rank may become another process")
        if self.output.log_ranks is not None and largest is not None and max(self.output.log_ranks) >= largest:
            raise ConfigError(f"--log-ranks {max(self.output.log_ranks)}: {_only(largest)}")
        if (
            not self.output.prefix
            and (largest or 2) > 1
            and (self.output.log_ranks is None or len(self.output.log_ranks) > 1)
        ):
            raise ConfigError(_NO_PREFIX)

    def check_ranks(self, np: int) -> None:
        """Refuse ranks that do not exist, and unprefixed lines if they could come from several ranks.

        Raises:
            ConfigError: the text names the option.
        """
        if self.stdin_rank is not None and not 0 <= self.stdin_rank < np:
            raise ConfigError(f"--stdin {self.stdin_rank}: {_only(np)}")
        if self.output.log_ranks is not None and max(self.output.log_ranks) >= np:
            raise ConfigError(f"--log-ranks {max(self.output.log_ranks)}: {_only(np)}")
        shown = np if self.output.log_ranks is None else len(self.output.log_ranks)
        if not self.output.prefix and shown > 1:
            raise ConfigError(_NO_PREFIX)

    def directory_on(self, host: HostEntry) -> str:
        """Return the working directory of the workers on a host."""
        return self.cwd if host.profile is None else host.profile.cwd


def assign(hosts: Sequence[HostEntry], np: int) -> tuple[Slot, ...]:
    """Give ``np`` ranks to hosts in order, each filled before the next.

    Args:
        hosts: with slots, at least ``np`` in all.

    Returns:
        the slots in order of ranks. Hosts without a rank take no part, and are not counted in indices.
    """
    spots = topology.fill([host.name for host in hosts], [host.slots or 0 for host in hosts], np)
    taking_part = {entry: index for index, entry in enumerate(dict.fromkeys(entry for entry, _ in spots))}
    machines = {name: index for index, name in enumerate(dict.fromkeys(hosts[entry].machine for entry, _ in spots))}
    taken = Counter[str]()
    on_machines = []
    for entry, _ in spots:
        machine = hosts[entry].machine
        on_machines.append((machines[machine], taken[machine]))
        taken[machine] += 1
    places = topology.places(on_machines)
    return tuple(
        Slot(
            rank=rank,
            size=np,
            host=taking_part[entry],
            node=place.host,
            nodes=len(machines),
            hostname=hosts[entry].hostname,
            local_rank=place.local_rank,
            local_size=place.local_size,
            cross_rank=place.cross_rank,
            cross_size=place.cross_size,
            agent=hosts[entry].name,
        )
        for rank, (place, (entry, _)) in enumerate(zip(places, spots, strict=True))
    )


def _only(np: int) -> str:
    return f"there are only ranks 0 to {np - 1}" if np > 1 else "there is only rank 0"
