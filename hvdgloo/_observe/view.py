"""The job as those see it who look at it: one snapshot, and what has changed since.

The same values serve everybody: the page's scripts, ``hvdgloo-run top --json``, the report and the metrics. Their JSON
is that of ``msgspec.json.encode``: objects with these fields' names. Times are in seconds, sizes in bytes, moments in
seconds since 1970, shares from 0 to 1. Ranks are shown as columns, one list for each property, because a job of 1,024
ranks is sent to browsers each second.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hvdgloo._observe import samples

SCHEMA = 1
"""Raised when a field changes its meaning or goes away."""

STATES = ("starting", "computing", "waiting", "communicating", "idle", "stalled", "lost", "ended", "failed")
"""What a rank may be doing. ``Ranks.state`` has their indices."""


class Job(msgspec.Struct, omit_defaults=False):
    """The job as a whole. What is "at the moment" here and in ``Ranks`` is the mean of all its time once it is over.

    Attributes:
        id: of the job, without meaning.
        command: as the user typed it but for secrets.
        state: "starting", "running", "ended", "failed" or "stopped".
        message: what failed or stopped it, or while it starts what is waited for, in a line; empty if there is nothing
            to say.
        exit_code: None while it runs.
        started: when it was started.
        now: when this was made.
        size: number of ranks; of an elastic job, those of the present epoch.
        epoch, least, most: of an elastic job; ``most`` None if there is no limit; both None for a job of fixed size.
        versions: package to version: hvdgloo, python, torch...
        steps: of the rank that has made most; newcomers of an elastic job begin at 0.
        steps_per_second, bytes_per_second: at the moment; steps of the slowest rank, bytes of all.
        step_seconds, computing, waiting, communicating: of a step at the moment, the mean of all ranks; the last three
            are shares of it.
        control: whether this reader may have steps traced.
    """

    id: str = ""
    command: str = ""
    state: str = "starting"
    message: str = ""
    exit_code: int | None = None
    started: float = 0.0
    now: float = 0.0
    size: int = 0
    epoch: int = 0
    least: int | None = None
    most: int | None = None
    versions: dict[str, str] = {}
    steps: int = 0
    steps_per_second: float = 0.0
    bytes_per_second: float = 0.0
    step_seconds: float = 0.0
    computing: float = 0.0
    waiting: float = 0.0
    communicating: float = 0.0
    control: bool = False


class Gpu(samples.Gpu, frozen=True, array_like=False, forbid_unknown_fields=False):
    """The same as an object, as all here is in JSON."""


class Host(msgspec.Struct):
    """A host at the moment; rates are per second. See ``samples.HostSample``. ``state`` is "up", "left out",
    "lost" or "left"."""

    name: str
    state: str
    cores: int = 0
    cpu: float = 0.0
    stolen: float = 0.0
    throttled: float = 0.0
    memory: int = 0
    memory_total: int = 0
    memory_pressure: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    read: float = 0.0
    written: float = 0.0
    gpus: list[Gpu] = []


class Ranks(msgspec.Struct):
    """Ranks at the moment, in ascending order: item ``i`` of each list is about ``rank[i]``.

    Attributes:
        rank: the ranks.
        host: index in ``Snapshot.hosts``.
        local_rank: on that host.
        pid: of the process on its host.
        state: index in ``STATES``.
        detail: what it waits for and for whom, why it is lost; empty if there is nothing to say.
        steps, operations, bytes: so far.
        step_seconds: of a step at the moment.
        computing, waiting, communicating: shares of that.
        before_first: seconds from a step's begin to its first submission.
        bytes_per_second, cpu (cores in use), memory: at the moment.
        gpu: index among the host's; -1 for none.
    """

    rank: list[int] = []
    host: list[int] = []
    local_rank: list[int] = []
    pid: list[int] = []
    state: list[int] = []
    detail: list[str] = []
    steps: list[int] = []
    operations: list[int] = []
    bytes: list[int] = []
    step_seconds: list[float] = []
    computing: list[float] = []
    waiting: list[float] = []
    communicating: list[float] = []
    before_first: list[float] = []
    bytes_per_second: list[float] = []
    cpu: list[float] = []
    memory: list[int] = []
    gpu: list[int] = []


class PlaneUse(msgspec.Struct):
    """A data plane in use, and why it is; ``name`` and ``why`` as in ``samples.Plane``."""

    name: str
    process_set: int
    device: str
    why: str
    ranks: int
    operations: int
    bytes: int
    bytes_per_second: float


class Straggler(msgspec.Struct):
    """A rank that others wait for.

    Attributes:
        rank, host: who.
        share: of the last ``of`` steps (or operations, if no steps are counted) it was the last in.
        of: how many those are.
        unit: "steps" or "operations".
        seconds: that the others waited in each of those, on average.
        causes: what is unusual there, in sentences; empty if nothing is.
        text: all of it in one sentence.
    """

    rank: int
    host: str
    share: float
    of: int
    unit: str
    seconds: float
    causes: list[str]
    text: str


class Event(msgspec.Struct):
    """Something that has happened.

    Attributes:
        number: counts up from 1; no event has a lower number than one before it.
        at: when.
        kind: "state", "warning", "stall", "stall ended", "elastic", "host", "tuning", "trace", "failure" or
            "straggler".
        rank: whom it is about; -1 for nobody in particular.
        text: in a line.
        more: what belongs to it, in several lines (Python stacks); empty if nothing does.
    """

    number: int
    at: float
    kind: str
    rank: int
    text: str
    more: str = ""


class Series(msgspec.Struct):
    """Curves over the job's life: item ``i`` of each is for the time from ``at[i]`` to ``at[i] + width``.

    ``width`` doubles whenever there would be too many points: memory is bounded, and old times stay. Where nothing is
    known an item is None.

    Attributes:
        at: when each begins.
        width: seconds.
        steps_per_second, step_seconds, computing, waiting, communicating: as in ``Job`` for all, else of one rank; here
            the last three are seconds in each step.
        bytes_per_second: plane to its curve.
        cpu, memory: cores in use, resident bytes (of all ranks together, or of one).
    """

    at: list[float] = []
    width: float = 1.0
    steps_per_second: list[float | None] = []
    step_seconds: list[float | None] = []
    computing: list[float | None] = []
    waiting: list[float | None] = []
    communicating: list[float | None] = []
    bytes_per_second: dict[str, list[float | None]] = {}
    cpu: list[float | None] = []
    memory: list[float | None] = []


class Heat(msgspec.Struct):
    """Which rank made others wait, when: for each rank (in the order of ``rank``) a row of seconds, one for each time
    ``at[i]`` to ``at[i] + width``; rows of ranks that never did are left out.
    """

    at: list[float] = []
    width: float = 1.0
    rank: list[int] = []
    seconds: list[list[float]] = []


class Snapshot(msgspec.Struct):
    """All that there is to see, but for output and the curves of single ranks.

    Attributes:
        schema: ``SCHEMA``.
        job, hosts, ranks, planes, stragglers: at the moment.
        waits: how many rounds made the first to come wait for less than 0.1 ms, 0.2 ms, 0.4 ms, ... (the last: longer).
        events: the last 500.
        series, heat: the job's life.
        settings: name to value, as in a file for ``--config-file``.
        output: number of the last line that a rank has written, see ``OutputLine``.
    """

    schema: int = SCHEMA
    job: Job = msgspec.field(default_factory=Job)
    hosts: list[Host] = []
    ranks: Ranks = msgspec.field(default_factory=Ranks)
    planes: list[PlaneUse] = []
    stragglers: list[Straggler] = []
    waits: list[int] = []
    events: list[Event] = []
    series: Series = msgspec.field(default_factory=Series)
    heat: Heat = msgspec.field(default_factory=Heat)
    settings: dict[str, Any] = {}
    output: int = 0


class Update(msgspec.Struct, omit_defaults=True):
    """What has changed since the last update; what is None has not. Lists replace those before.

    Attributes:
        job: always.
        hosts, planes, stragglers, waits, settings: as in ``Snapshot``.
        ranks: those that have changed; who appears for the first time is new.
        gone: ranks that are no longer part of the job.
        events: new ones.
        series: the points that are new or have changed, by their ``at``; all of them if ``width`` has changed.
        heat: the same.
        output: as in ``Snapshot``.
    """

    job: Job
    hosts: list[Host] | None = None
    ranks: Ranks | None = None
    gone: list[int] | None = None
    planes: list[PlaneUse] | None = None
    stragglers: list[Straggler] | None = None
    waits: list[int] | None = None
    events: list[Event] | None = None
    series: Series | None = None
    heat: Heat | None = None
    settings: dict[str, Any] | None = None
    output: int | None = None


class OutputLine(msgspec.Struct):
    """A line that a rank has written.

    Attributes:
        number: counts up over all ranks.
        at: when it came.
        rank: of whom.
        stream: 1 or 2.
        text: without its end; at most 4,096 characters.
    """

    number: int
    at: float
    rank: int
    stream: int
    text: str


def encode(value: msgspec.Struct | list[OutputLine]) -> bytes:
    """A value's JSON."""
    return msgspec.json.encode(value)
