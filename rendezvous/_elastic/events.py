"""Events and actions of an elastic job: plain values, for ``hvdgloo.rendezvous._elastic.job``.

Server and launcher turn what happens (an agent's frame, a worker's request, a timer) into an event, and carry out the
actions that are returned. Workers have ids that are never used twice, so that a late message about one worker
cannot be taken for one about another.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._elastic.messages import CurrentEpoch, Register
from hvdgloo.rendezvous._membership.assignment import Assignment

SHORTEST_COOLDOWN, LONGEST_COOLDOWN = 1.0, 3600.0

RESET_LIMIT_EXCEEDED_MESSAGE = "the workers of this job would have to form another time, which exceeds --reset-limit {}"


class Join(enum.Enum):
    """The moment at which workers in training stop for a new worker."""

    READY = "ready"  # once it has reached elastic.run
    NOW = "now"  # once there is a slot for it, so that they wait while it starts: as in Horovod


@dataclass(frozen=True)
class Rules:
    """The user's options. All times are in seconds.

    Attributes:
        size: number of slots, or of workers without a launcher, that a start needs.
        smallest: number of workers below which the others wait.
        largest: number of workers above which slots stay unused; None for no limit.
        elastic_timeout: longest wait for ``smallest`` workers, or for members that do not come back.
        start_timeout: longest wait for the next worker of an assignment.
        connect_timeout: longest time in which the workers of a new epoch connect with each other.
        reset_limit: number of times that workers may form a new epoch; None for no limit.
        failures_per_host: number of failed workers at which a host is left out.
        cooldown: shortest and longest time for which a host is left out; None for ever.
        join: moment at which new workers join.
        launched: True if a launcher starts the workers and reports their ends. Otherwise they start by themselves, and
            only their connections are known.
        hosts_may_come: True if hosts beyond the first list may be listed later.

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
            raise ConfigError(
                f"--min-np {self.smallest} exceeds -np {self.size}, the number of workers that the job starts with; "
                f"raise -np to {self.smallest}, or leave out --min-np to go on with any number"
            )
        if self.largest is not None and self.largest < self.size:
            raise ConfigError(
                f"--max-np {self.largest} is below -np {self.size}, the number of workers that the job starts with; "
                f"lower -np to {self.largest}, or leave out --max-np for no limit"
            )
        if self.elastic_timeout <= 0:
            raise ConfigError(f"--elastic-timeout must be more than 0 seconds, not {self.elastic_timeout:g}")
        if self.cooldown is not None:
            shortest, longest = self.cooldown
            if not SHORTEST_COOLDOWN <= shortest <= longest <= LONGEST_COOLDOWN:
                raise ConfigError(
                    f"--blacklist-cooldown-range {shortest:g} {longest:g}: give two times from {SHORTEST_COOLDOWN:g} "
                    f"to {LONGEST_COOLDOWN:g} seconds, the shorter one first"
                )


# Events.


class Event(msgspec.Struct, frozen=True):
    """An event that a job is fed."""


class HostsListed(Event, frozen=True):
    """The list of hosts that can be used from now on: (name, slots), in the order in which they are filled.

    Hosts that are parts of one machine form one host of an epoch: (name, machine).
    """

    hosts: tuple[tuple[str, int], ...]
    machines: tuple[tuple[str, str], ...] = ()


class Identified(Event, frozen=True):
    """The machine, pod or container behind a host's name. A different one than before starts with a clean record."""

    host: str
    identity: str


class Leaving(Event, frozen=True):
    """Notice that a host, or a worker without a launcher, is about to be given back or preempted.

    Exactly one of the two is given.
    """

    host: str = ""
    worker: str = ""


class HostLost(Event, frozen=True):
    """Loss of a host: it cannot be reached, or its agent died or could not be started. Its workers are gone."""

    host: str
    reason: str
    status: int = 1


class Registered(Register, Event, frozen=True):
    """A worker's request for the epoch after its last one, and its sender.

    Attributes:
        host, host_name: its host and that host's name; only without a launcher, which knows them.
        rank: its rank in that epoch, for a restarted server.
        index: its index among workers without a launcher, if their starter numbers them.
        pid: id of its process, for messages.
    """

    host: str = ""
    host_name: str = ""
    rank: int | None = None
    index: int | None = None
    pid: int = 0


class Recalled(CurrentEpoch, Event, frozen=True):
    """The present epoch of a worker without a launcher: news only to a server that was restarted meanwhile.

    Attributes:
        worker: its id.
        host, host_name, pid: as in ``Registered``.
    """

    worker: str = ""
    host: str = ""
    host_name: str = ""
    pid: int = 0


class Up(Event, frozen=True):
    """Connection of a worker with all others of its epoch."""

    worker: str
    epoch: int


class Synced(Event, frozen=True):
    """Receipt of the epoch's state by a worker, which has entered ``elastic.run``."""

    worker: str
    epoch: int


class Finished(Event, frozen=True):
    """End of a worker's training."""

    worker: str


class Gone(Event, frozen=True):
    """End of a worker's process or, without a launcher, of its last connection.

    Attributes:
        status: its exit status, or minus the signal; None without a launcher.
        reason: reason in words, to follow ``rank 3 on host h1``.
    """

    worker: str
    status: int | None
    reason: str


class Silent(Event, frozen=True):
    """Silence of a worker whose process exists but has not asked for news for ``seconds``."""

    worker: str
    seconds: float


class TimePassed(Event, frozen=True):
    """Expiry of the job's deadline."""


# Actions.


class Action(msgspec.Struct, frozen=True):
    """An action for the server or the launcher."""


class Spawn(Action, frozen=True):
    """Start a worker. ``plan`` is the epoch that it would belong to if all started workers arrived."""

    worker: str
    host: str
    slot: int
    plan: Assignment


class Stop(Action, frozen=True):
    """End a worker, which is no longer part of the job."""

    worker: str
    reason: str


class Formed(Action, frozen=True):
    """Reply to every member of the assignment, or only to ``again``, which missed the reply."""

    assignment: Assignment
    again: str = ""


class Alone(Action, frozen=True):
    """Reply to a new worker that is not ready: continue alone. ``plan`` has the place that it will probably get."""

    worker: str
    plan: Assignment


class Fate(enum.Enum):
    """Reason for which a worker is in no further epoch."""

    REMOVED = "removed"  # the job goes on without it, and it may end with 0
    OVER = "over"  # others have finished
    FAILED = "failed"  # the job has failed


class Dismissed(Action, frozen=True):
    """Reply to a worker that is in no further epoch."""

    worker: str
    fate: Fate
    reason: str


class Update(enum.IntFlag):
    """Effect of a change of hosts on the workers in training; Horovod's values."""

    NONE = 0
    REMOVED = 1
    ADDED = 2
    MIXED = 3


class Announce(Action, frozen=True):
    """Tell all members what will change at their next commit; NONE withdraws an announcement."""

    serial: int
    update: Update


class Voided(Action, frozen=True):
    """Tell the members of an epoch that it is over or was given up, so that they stop waiting for each other: one of
    them cannot be reached, or they do not connect.
    """

    epoch: int
    reason: str


class Tell(Action, frozen=True):
    """A line for the user.

    Attributes:
        left_out: host that is left out from now on, if the line says that: its name, and its name in messages.
    """

    text: str
    left_out: tuple[str, str] | None = None


class Changed(Action, frozen=True):
    """Record for the summary that workers are in training (again).

    Attributes:
        assignment: the new assignment.
        why: what ended the previous epoch; empty for the first.
        stood: seconds without training: since the first returning worker had to wait, or since the epoch was known to
            be over, whichever was earlier.
    """

    assignment: Assignment
    why: str
    stood: float


class Failing(msgspec.Struct, frozen=True):
    """A failure that the job could not survive.

    Attributes:
        status: exit status, or minus a signal.
        told: the cause as other messages tell it, such as the one that its host is left out.
    """

    worker: str = ""
    rank: int | None = None
    host: str = ""
    status: int = 1
    reason: str = ""
    told: str = ""


class Ended(Action, frozen=True):
    """End the job and everything that still runs. Without a ``failure`` the job succeeded."""

    text: str
    failure: Failing | None = None

    @property
    def consequence(self) -> str:
        """Text without the cause of the failure, for a message that has just told it."""
        told = self.failure.told if self.failure is not None else ""
        return self.text.replace(f": {told}", "").replace(f", as {told}", "") if told else self.text
