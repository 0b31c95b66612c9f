"""The job as observers see it: one snapshot, and the changes since.

All of them get the same values: the page's scripts, ``hvdgloo-run top --json``, the report and the metrics. Their JSON
is ``msgspec.json.encode``'s: objects with these fields' names. Durations are in seconds, sizes in bytes, points in time
in seconds since 1970, shares from 0 to 1. Ranks are columns, one list for each property, because a job of 1,024 ranks
is sent to browsers each second.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hvdgloo._observe import samples

SCHEMA = 1
"""Version of these types: raised when a field changes its meaning or is removed."""

STATES = ("starting", "computing", "waiting", "communicating", "idle", "stalled", "lost", "ended", "failed")
"""States of a rank; ``Ranks.state`` has their indices."""


class Progress(msgspec.Struct, omit_defaults=False):
    """Progress of the training, as far as the program tells it; None where it does not.

    Attributes:
        step, steps, epoch, epochs: numbers that the program logged; steps and epochs count from 0.
        share: share of the training that is done.
        remaining: seconds until the end at the speed so far; None if that is not known, or the job is over.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    share: float | None = None
    remaining: float | None = None


class Job(msgspec.Struct, omit_defaults=False):
    """The job as a whole. Values "at the moment", here and in ``Ranks``, are means over the whole job once it is over.

    Attributes:
        id: id of the job, without meaning.
        command: the command as the user typed it, without secrets.
        state: "starting", "running", "ended", "failed" or "stopped".
        message: one line: what failed or stopped it, or while it starts, what it waits for; empty if there is nothing
            to report.
        exit_code: exit status; None while it runs.
        started: time of its start.
        now: time of this snapshot or update.
        size: number of ranks; of an elastic job, in the present epoch.
        epoch: number of an elastic job's epoch.
        least, most: bounds on an elastic job's ranks; ``most`` None if there is no limit; both None for a job of fixed
            size.
        versions: package to version: hvdgloo, python, torch...
        steps: steps of the rank that made most; new workers of an elastic job begin at 0.
        steps_per_second, bytes_per_second: steps of the slowest rank and bytes of all, at the moment.
        step_seconds: duration of a step at the moment, the mean of all ranks.
        computing, waiting, communicating: shares of that duration.
        outer: sentence about the ranks' outer steps; empty if they make none.
        control: True if this reader may have steps traced.
        progress: progress of the training; None if the program does not tell it.
        logged: number by name, as the program logged it last; None for one that is not finite.
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
    outer: str = ""
    control: bool = False
    progress: Progress | None = None
    logged: dict[str, float | None] = {}


class Gpu(samples.Gpu, frozen=True, array_like=False, forbid_unknown_fields=False):
    """The same sample as an object, like everything here in JSON."""


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
        local_rank: local rank on that host.
        pid: id of the process on its host.
        state: index in ``STATES``.
        detail: the operation and ranks that it waits for, or why it is lost; empty if there is nothing to report.
        steps, operations, bytes: totals so far.
        step_seconds: duration of a step at the moment.
        computing, waiting, communicating: shares of that duration.
        before_first: seconds from a step's beginning to its first submission.
        bytes_per_second, cpu (cores in use), memory: rates and sizes at the moment.
        gpu: index of its GPU on the host; -1 for none.
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
    """A data plane in use; ``name`` and ``why`` are as in ``samples.Plane``.

    ``crossed`` describes how tensors crossed between hosts in fewer bytes; empty if none did.
    """

    name: str
    process_set: int
    device: str
    why: str
    ranks: int
    operations: int
    bytes: int
    bytes_per_second: float
    crossed: str = ""


class Straggler(msgspec.Struct):
    """A rank that others wait for.

    Attributes:
        rank, host: the rank and its host.
        share: share of the last ``of`` steps (or operations, if no steps are counted) in which it was the last.
        of: number of these steps or operations.
        unit: "steps" or "operations".
        seconds: time for which the others waited in each of these, on average.
        causes: sentences about what is unusual about it; empty if nothing is.
        text: all of this in one sentence.
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
    """An event.

    Attributes:
        number: number of the event, ascending from 1.
        at: time of the event.
        kind: "state", "warning", "stall", "stall ended", "elastic", "host", "tuning", "trace", "failure", "straggler"
            or "note" (the program's own).
        rank: rank that it is about; -1 for none in particular.
        text: one line.
        more: further lines (Python stacks); empty if there are none.
    """

    number: int
    at: float
    kind: str
    rank: int
    text: str
    more: str = ""


class Series(msgspec.Struct):
    """Curves over the job's life: item ``i`` of each is for the time from ``at[i]`` to ``at[i] + width``.

    ``width`` doubles whenever there would be too many points: memory is bounded, and the past is kept. An item is None
    where nothing is known.

    Attributes:
        at: time at which each item begins.
        width: seconds.
        steps_per_second, step_seconds, computing, waiting, communicating: as in ``Job`` for all ranks, or of one rank;
            here the last three are seconds in each step.
        bytes_per_second: plane to its curve.
        cpu, memory: cores in use, resident bytes (of all ranks together, or of one).
        logged: name to the curve of what the program logged; empty for a single rank.
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
    logged: dict[str, list[float | None]] = {}


class Heat(msgspec.Struct):
    """Seconds for which each rank made others wait: a row for each rank (in the order of ``rank``), with an item for
    each time from ``at[i]`` to ``at[i] + width``. Ranks that never made others wait have no row.
    """

    at: list[float] = []
    width: float = 1.0
    rank: list[int] = []
    seconds: list[list[float]] = []


class Early(msgspec.Struct):
    """The first numbers that the program logged, more often than once a second: so short jobs have curves, too.

    Attributes:
        at: times of the points.
        logged: by name, as in ``Series``.
    """

    at: list[float] = []
    logged: dict[str, list[float | None]] = {}


class Mark(msgspec.Struct):
    """A mark on all charts for something that happens often.

    Attributes:
        at: end of the last one that the mark stands for.
        kind: "outer step", "commit" (of an elastic state) or "checkpoint".
        count: number of them; above 1 where there would be too many marks.
    """

    at: float
    kind: str
    count: int = 1


class Snapshot(msgspec.Struct):
    """Everything that there is to see, except output and the curves of single ranks.

    Attributes:
        schema: ``SCHEMA``.
        job, hosts, ranks, planes, stragglers: state at the moment.
        waits: number of rounds in which the first rank waited for less than 0.1 ms, 0.2 ms, 0.4 ms, ... (the last:
            longer).
        events: the last 500.
        early: first numbers that the program logged.
        marks: outer steps and saves of rank 0, in the order of time for each kind.
        series, heat: curves over the job's life.
        settings: name to value, as in a file for ``--config-file``.
        changed: names of the settings that differ from their defaults.
        units: name of a setting to its unit; those without a unit are missing.
        output: number of the last line that a rank wrote, see ``OutputLine``.
    """

    schema: int = SCHEMA
    job: Job = msgspec.field(default_factory=Job)
    hosts: list[Host] = []
    ranks: Ranks = msgspec.field(default_factory=Ranks)
    planes: list[PlaneUse] = []
    stragglers: list[Straggler] = []
    waits: list[int] = []
    events: list[Event] = []
    early: Early = msgspec.field(default_factory=Early)
    marks: list[Mark] = []
    series: Series = msgspec.field(default_factory=Series)
    heat: Heat = msgspec.field(default_factory=Heat)
    settings: dict[str, Any] = {}
    changed: list[str] = []
    units: dict[str, str] = {}
    output: int = 0


class Update(msgspec.Struct, omit_defaults=True):
    """Changes since the last update; a field that is None has not changed. Lists replace earlier ones.

    Attributes:
        job: always present.
        hosts, planes, stragglers, waits, early, marks, settings, changed, units: as in ``Snapshot``.
        ranks: ranks that changed or are new.
        gone: ranks that are no longer part of the job.
        events: new ones.
        series: points that are new or have changed, by their ``at``; all of them if ``width`` has changed.
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
    early: Early | None = None
    marks: list[Mark] | None = None
    series: Series | None = None
    heat: Heat | None = None
    settings: dict[str, Any] | None = None
    changed: list[str] | None = None
    units: dict[str, str] | None = None
    output: int | None = None


class OutputLine(msgspec.Struct):
    """A line that a rank wrote.

    Attributes:
        number: number of the line, ascending over all ranks.
        at: time at which it arrived.
        rank: rank that wrote it.
        stream: 1 for standard output, 2 for standard error.
        text: the line without its end; at most 4,096 characters.
    """

    number: int
    at: float
    rank: int
    stream: int
    text: str


def encode(value: msgspec.Struct | list[OutputLine]) -> bytes:
    """Encode a value as JSON."""
    return msgspec.json.encode(value)
