"""What an elastic job is told, and what it answers: plain values, for ``hvdgloo.rendezvous._elastic.job``.

Whoever drives a job turns what happens (an agent's frame, a worker's request, a timer) into an event, and carries out
the actions that come back. Workers are known by an id that is never used twice, so that nothing that is said late about
one can be taken for another's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._elastic.assignment import Assignment

SHORTEST_COOLDOWN, LONGEST_COOLDOWN = 1.0, 3600.0

RESET_LIMIT_EXCEEDED_MESSAGE = "the workers of this job would have to form another time, which exceeds --reset-limit {}"


class Join(enum.Enum):
    """When those that are in training stop for a newcomer."""

    READY = "ready"  # once it has reached elastic.run
    NOW = "now"  # once there is a slot for it, so that they wait while it starts: as in Horovod


@dataclass(frozen=True)
class Rules:
    """What the user has asked for. All times are in seconds.

    Attributes:
        size: slots, or workers without a launcher, that must be there before the job starts.
        smallest, largest: fewer workers than this wait for others; more slots than this stay unused.
        elastic_timeout: how long to wait for ``smallest`` workers, or for those that do not come back.
        start_timeout: how long to wait for a further worker of a assignment.
        connect_timeout: how long the workers of a new epoch may take to connect with each other.
        reset_limit: how often workers may form anew; None for any number of times.
        failures_per_host: a host is left out at this failure of a worker there.
        cooldown: the shortest and the longest time for which it is left out; None for ever.
        join: when newcomers are let in.
        launched: workers are started for this job, and their ends are reported. Otherwise they come on their own, and
            all that is known is whether they are connected.
        hosts_may_come: hosts beyond those that were listed first may be listed later.

    Raises:
        ConfigError: at construction, for values that contradict each other.
    """

    size: int
    smallest: int
    largest: int | None = None
    elastic_timeout: float = 600.0
    start_timeout: float = 120.0
    connect_timeout: float = 30.0
    reset_limit: int | None = None
    failures_per_host: int = 1
    cooldown: tuple[float, float] | None = None
    join: Join = Join.READY
    launched: bool = True
    hosts_may_come: bool = True

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("-np", self.size, 1),
            ("--min-np", self.smallest, 1),
            ("--max-np", self.largest, 1),
            ("--reset-limit", self.reset_limit, 0),
            ("--failures-per-host", self.failures_per_host, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{flag} must be at least {least}, not {value}")
        if self.smallest > self.size:
            raise ConfigError(f"--min-np {self.smallest} exceeds -np {self.size}, the slots that a start waits for")
        if self.largest is not None and self.largest < self.size:
            raise ConfigError(f"--max-np {self.largest} is below -np {self.size}, the slots that a start waits for")
        if self.elastic_timeout <= 0:
            raise ConfigError(f"--elastic-timeout must be more than 0 seconds, not {self.elastic_timeout:g}")
        if self.cooldown is not None:
            shortest, longest = self.cooldown
            if not SHORTEST_COOLDOWN <= shortest <= longest <= LONGEST_COOLDOWN:
                raise ConfigError(
                    f"--blacklist-cooldown-range {shortest:g} {longest:g}: give two times from {SHORTEST_COOLDOWN:g} "
                    f"to {LONGEST_COOLDOWN:g} seconds, the shorter one first"
                )


# What can happen.


@dataclass(frozen=True)
class Event:
    """Something that a job is told."""


@dataclass(frozen=True)
class HostsListed(Event):
    """These hosts can be used from now on, and no others: (name, slots), in the order in which they are filled.

    Some may be parts of machines, which form one host of an epoch each: (name, machine).
    """

    hosts: tuple[tuple[str, int], ...]
    machines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Identified(Event):
    """A host of this name is this machine, pod or container. Another one than before starts with a clean record."""

    host: str
    identity: str


@dataclass(frozen=True)
class Leaving(Event):
    """A host, or a worker without a launcher, will not be there much longer: it is given back or preempted.

    Exactly one of the two is given.
    """

    host: str = ""
    worker: str = ""


@dataclass(frozen=True)
class HostLost(Event):
    """A host can no longer be reached, its agent has died or could not be started; it has no workers any more."""

    host: str
    reason: str
    status: int = 1


@dataclass(frozen=True)
class Registered(Event):
    """A worker asks for the epoch after the last one that it was a member of. It is answered once, later or at once.

    To ask again, as clients do whose connection or poll has ended, changes nothing.

    Attributes:
        worker: its id.
        after: the epoch that it comes from; -1 if it has not been a member yet.
        ready: it has reached ``elastic.run``; False in ``init()``.
        serial, digest: of its newest commit; -1 if it has none.
        error: why it has left the epoch; empty if a change of hosts is the reason.
        accused: ranks of that epoch which it cannot reach, or which have not answered.
        host, host_name: where it is, and how it is called; only without a launcher, which knows.
        rank: its rank in that epoch, for a server that was restarted and has no memory of it.
        index: its place among workers without a launcher, if whatever starts them counts them.
        pid: of its process, for messages.
        stood: seconds for which it has been held up, from the moment when it began to wait for others in that epoch.
    """

    worker: str
    after: int = -1
    ready: bool = False
    serial: int = -1
    digest: str = ""
    error: str = ""
    accused: tuple[int, ...] = ()
    host: str = ""
    host_name: str = ""
    rank: int | None = None
    index: int | None = None
    pid: int = 0
    stood: float = 0.0


@dataclass(frozen=True)
class Recalled(Event):
    """A worker without a launcher says in which epoch it is: news only to a server that was restarted meanwhile.

    Attributes:
        worker, epoch, rank: who it is, and where in which epoch.
        size: of that epoch.
        synced: the worker has had the job's state in it.
        host, host_name, pid: as in ``Registered``.
    """

    worker: str
    epoch: int
    rank: int
    size: int
    synced: bool = False
    host: str = ""
    host_name: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Up(Event):
    """A worker is connected with all others of its epoch."""

    worker: str
    epoch: int


@dataclass(frozen=True)
class Synced(Event):
    """A worker has the state of its epoch: it has entered ``elastic.run``, and does not start from nothing."""

    worker: str
    epoch: int


@dataclass(frozen=True)
class Finished(Event):
    """A worker's training has come to its end."""

    worker: str


@dataclass(frozen=True)
class Gone(Event):
    """A worker's process has ended or, without a launcher, its last connection has.

    Attributes:
        status: its exit status, or minus the signal; None without a launcher.
        reason: in words, after ``rank 3 on host h1``.
    """

    worker: str
    status: int | None
    reason: str


@dataclass(frozen=True)
class Silent(Event):
    """A worker does not listen to news any more, ``seconds`` after the last ones, though its process is there."""

    worker: str
    seconds: float


@dataclass(frozen=True)
class TimePassed(Event):
    """The job's deadline has come."""


# What is to be done about it.


@dataclass(frozen=True)
class Action:
    """Something that a job wants done."""


@dataclass(frozen=True)
class Spawn(Action):
    """Start a worker. ``plan`` is the epoch that it would belong to if all that are started came."""

    worker: str
    host: str
    slot: int
    plan: Assignment


@dataclass(frozen=True)
class Stop(Action):
    """End a worker: it is not part of the job any more."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Formed(Action):
    """The answer to every member of the assignment. ``again``: only to this one, which has missed it."""

    assignment: Assignment
    again: str = ""


@dataclass(frozen=True)
class Alone(Action):
    """The answer to a newcomer that is not ready: go on alone. ``plan`` has the place that it will probably get."""

    worker: str
    plan: Assignment


class Fate(enum.Enum):
    """Why a worker is in no further epoch."""

    REMOVED = "removed"  # the job goes on without it, and it may end with 0
    OVER = "over"  # others have finished
    FAILED = "failed"  # the job has failed


@dataclass(frozen=True)
class Dismissed(Action):
    """The answer to a worker that is in no further epoch."""

    worker: str
    fate: Fate
    reason: str


class Update(enum.IntFlag):
    """What a change of hosts means to the workers that are in training; Horovod's values."""

    NONE = 0
    REMOVED = 1
    ADDED = 2
    MIXED = 3


@dataclass(frozen=True)
class Announce(Action):
    """Tell all members what would change at their next commit; NONE withdraws what was announced."""

    serial: int
    update: Update


@dataclass(frozen=True)
class Voided(Action):
    """Tell the members of an epoch that it is over, or will not come about, so that they stop waiting for each other:
    one of them can no longer be reached, or they do not connect.
    """

    epoch: int
    reason: str


@dataclass(frozen=True)
class Tell(Action):
    """A line for the user.

    Attributes:
        left_out: the host that is left out from now on, by its name and by that in messages, if this is what it says.
    """

    text: str
    left_out: tuple[str, str] | None = None


@dataclass(frozen=True)
class Changed(Action):
    """Workers are in training (again), for the summary.

    Attributes:
        assignment: the new one.
        why: what ended the epoch before; empty for the first.
        stood: seconds for which nobody was in training: since the first worker that came back had to wait, or since it
            was known that the epoch was over, whichever was earlier.
    """

    assignment: Assignment
    why: str
    stood: float


@dataclass(frozen=True)
class Failing:
    """The failure that a job could not survive. ``status`` is an exit status, or minus a signal."""

    worker: str = ""
    rank: int | None = None
    host: str = ""
    status: int = 1
    reason: str = ""


@dataclass(frozen=True)
class Ended(Action):
    """The job is over, and what still runs is to be ended. Without a ``failure`` it has succeeded."""

    text: str
    failure: Failing | None = None
