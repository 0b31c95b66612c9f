"""What ranks and hosts say of themselves, about once a second: values, and their bytes.

All that is counted is a total since the process began, so a sample that is lost costs nothing but a moment: the next
one has it all. Whoever reads them takes differences, and begins anew where a total has become smaller: that is another
process.
Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

from hvdgloo._net.codec import Codec, Count, Message


class Flow(Message, frozen=True):
    """What one data plane has carried for one process set.

    Attributes:
        plane: its name as in ``Sample.planes``; ``"agreement"`` for small tensors that travel with the negotiation.
        process_set: its number; 0 is all ranks.
        operations: tensors, not buckets.
        bytes: of this rank's tensors.
        seconds: in which at least one bucket was on the plane.
    """

    plane: str
    process_set: Count
    operations: Count
    bytes: Count
    seconds: float


class Causes(Message, frozen=True):
    """Where the time of collective operations went, summed over tensors.

    Those of a bucket are on their way together, so this may exceed the time that has passed by far; divided by
    ``Sample.operations`` it is what an average tensor has seen.

    Attributes:
        negotiation: from submission until all ranks had submitted it.
        queue: from then until it was begun.
        data: until its tensors were ready to be read (a GPU had not computed them yet).
        copy: into fusion buffers and out of them.
        wire: on the data plane.
    """

    negotiation: float = 0.0
    queue: float = 0.0
    data: float = 0.0
    copy: float = 0.0
    wire: float = 0.0


class Steps(Message, frozen=True):
    """The training steps of one rank: one for each ``optimizer.step()`` or batch of a ``fit``.

    Their time is split into three parts, in which the program was: waiting until other ranks had submitted something,
    waiting for what was on its way then, and everything else.

    Attributes:
        count: of steps that have ended.
        seconds: from the end of the first one to the end of the last; the first is not counted, since nobody knows when
            it began.
        waiting: of these seconds, blocked for operations that other ranks had not submitted. Where several threads
            block at once, only the first of them counts, here as in ``communicating``.
        communicating: blocked for operations that all had submitted.
        before_first: from each step's begin to its first submission; a slow input pipeline shows here.
        last: how long the last step took.
    """

    count: Count = 0
    seconds: float = 0.0
    waiting: float = 0.0
    communicating: float = 0.0
    before_first: float = 0.0
    last: float = 0.0


class Missing(Message, frozen=True):
    """An operation for which some ranks wait (known to rank 0).

    Attributes:
        name: of its tensor.
        seconds: since the first rank submitted it.
        ranks: that have not submitted it; at most 16.
        count: of all those.
    """

    name: str
    seconds: float
    ranks: Sequence[Count]
    count: Count


class Late(Message, frozen=True):
    """How often one rank was the last to come.

    Attributes:
        rank: its rank.
        count: of rounds in which it was the last.
        seconds: that the first to come waited then, summed.
        recent_count, recent_seconds: the same among the last ``Lateness.recent`` rounds.
    """

    rank: Count
    count: Count
    seconds: float
    recent_count: Count
    recent_seconds: float


class Lateness(Message, frozen=True):
    """Who made whom wait, as rank 0's coordinator has seen it.

    A round is a training step of rank 0, where steps are counted, and otherwise an operation. In a step, the operation
    counts for which others waited longest. With the first step all begins anew, so rounds are either the one or the
    other: steps if ``Sample.steps.count`` is not 0.

    Attributes:
        rounds: since the beginning.
        recent: how many of them ``recent_*`` are about: the last 1,000, or fewer at first.
        waits: how many rounds made the first to come wait for less than 0.1 ms, 0.2 ms, 0.4 ms, ... (the last: longer).
        ranks: those that were ever the last, in ascending order.
    """

    rounds: Count
    recent: Count
    waits: Sequence[Count]
    ranks: Sequence[Late]


class Plane(Message, frozen=True):
    """A data plane that this rank has opened.

    Attributes:
        name: "shared memory", "gloo", "hierarchical", "nccl" or "alone".
        process_set: for whose operations.
        device: "cpu" or "cuda".
        why: the reason, e.g. "hosts h1 and h2", "all ranks are on one host".
    """

    name: str
    process_set: Count
    device: str
    why: str


class Sample(Message, frozen=True, tag=1):
    """One rank.

    Attributes:
        rank, size: its place in the job.
        epoch: of an elastic job.
        pid: of the process, which totals are of.
        at: when this was taken, since 1970, by the host's clock.
        operations, bytes: of all collectives so far.
        steps: see ``Steps``.
        causes: see ``Causes``.
        flows: by plane and process set.
        doing: what it was at in most of the last second: "computing", "waiting" (for other ranks), "communicating",
            "idle" (nothing was submitted), "starting" (no collective so far); "ended" in its last one: its part of the
            job is over, though its process may go on.
        pending: the operation that it has been waiting for longest; empty if none.
        pending_seconds: for so long.
        cpu_seconds: user and system time of this process and those of its children that have ended.
        memory: resident bytes.
        gpu: index of its GPU among those of the host; -1 for none.
        planes: those that are open.
        settings: fusion threshold, cycle time and so on, as ``--config-file`` names them; only when they have changed.
        lateness, missing: from rank 0 only.
        stacks: rank 0: (rank, text) of ranks that a stall report is about.
    """

    rank: Count
    size: Count
    epoch: Count
    pid: Count
    at: float
    operations: Count = 0
    bytes: Count = 0
    steps: Steps = Steps()
    causes: Causes = Causes()
    flows: Sequence[Flow] = ()
    doing: str = "starting"
    pending: str = ""
    pending_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory: Count = 0
    gpu: int = -1
    planes: Sequence[Plane] = ()
    settings: dict[str, Any] | None = None
    lateness: Lateness | None = None
    missing: Sequence[Missing] = ()
    stacks: Sequence[tuple[int, str]] = ()


class Note(Message, frozen=True, tag=2):
    """Something that a rank has to say once: a stall, a choice of autotune, a warning.

    Attributes:
        rank: of whom it comes.
        at: since 1970.
        kind: "warning", "stall", "stall ended", "tuning" or "trace".
        text: for people.
    """

    rank: Count
    at: float
    kind: str
    text: str


class Gpu(Message, frozen=True):
    """One GPU, as NVML sees it. ``use`` is from 0 to 1; clocks are in MHz."""

    index: Count
    name: str
    use: float
    memory: Count
    memory_total: Count
    clock: Count
    clock_most: Count


class HostSample(Message, frozen=True, tag=3):
    """One host, measured by its agent.

    Attributes:
        at: since 1970.
        cores: of the machine.
        cpu: share of all cores that was busy since the last sample, 0 to 1.
        stolen: share that a hypervisor gave to others.
        throttled: share of the time in which a control group's limit held the job back.
        memory, memory_total: in use and all.
        memory_pressure: share of the time in which some process waited for memory (Linux' PSI "some", 10 s).
        received, sent: bytes by network interfaces other than loopback, total.
        read, written: bytes by disks, total.
        gpus: empty where NVML does not answer.
    """

    at: float
    cores: Count
    cpu: float
    stolen: float = 0.0
    throttled: float = 0.0
    memory: Count = 0
    memory_total: Count = 0
    memory_pressure: float = 0.0
    received: Count = 0
    sent: Count = 0
    read: Count = 0
    written: Count = 0
    gpus: Sequence[Gpu] = ()


Observation = Union[Sample, Note, HostSample]

CODEC: Codec[Observation] = Codec(Observation, "observation", shown=True)
"""What travels from a worker to its agent in one datagram, and on to the launcher in a frame."""


class TraceOrder(Message, frozen=True, tag=16):
    """What an agent asks of a worker: trace the next steps.

    The trace is complete when it is at ``{folder}/trace.{number}.{rank}.json``; a rank that cannot trace says so in a
    Note.

    Attributes:
        number: of this request.
        steps: how many; where no steps are counted, the trace ends after a time.
        folder: of the agent, on this host.
    """

    number: Count
    steps: Count
    folder: str


ORDERS: Codec[TraceOrder] = Codec(TraceOrder, "order")
"""What travels from an agent to a worker in one datagram."""

LIMIT = 128 * 1024
"""The longest observation in bytes; what is longer is not handed on."""
