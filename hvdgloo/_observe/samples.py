"""Samples that ranks and hosts send about once a second, and their encoding.

Every count is a total since the process began, so a lost sample costs nothing but a moment: the next one has all of it.
A reader takes differences, and starts again where a total has become smaller: that is another process.
Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

from hvdgloo._net.codec import Codec, Count, Message


class Flow(Message, frozen=True):
    """Totals of one data plane for one process set.

    Attributes:
        plane: name as in ``Sample.planes``; ``"agreement"`` for small tensors that travel with the negotiation.
        process_set: number of the process set; 0 is all ranks.
        operations: number of tensors, not of buckets.
        bytes: size of this rank's tensors.
        seconds: time in which at least one bucket was on the plane.
        wire_bytes: size of these tensors in the form in which they crossed between hosts; 0 if they did not.
        wire_error: relative error of those that were encoded for that, from samples.
        form: name of the form in which values were encoded last, such as "int8"; empty if none were.
    """

    plane: str
    process_set: Count
    operations: Count
    bytes: Count
    seconds: float
    wire_bytes: Count = 0
    wire_error: float = 0.0
    form: str = ""


class Causes(Message, frozen=True):
    """Parts of the time of collective operations, summed over tensors.

    Tensors of a bucket travel together, so the sum may be far more than the time that passed; divided by
    ``Sample.operations`` it is an average tensor's.

    Attributes:
        negotiation: from submission until all ranks had submitted it.
        queue: from then until the operation began.
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
        seconds: from the end of the first one to the end of the last; the first is not counted, since its beginning is
            not known.
        waiting: of these seconds, blocked for operations that other ranks had not submitted. Where several threads
            block at once, only the first of them counts, here as in ``communicating``.
        communicating: blocked for operations that all had submitted.
        before_first: from each step's beginning to its first submission; a slow input pipeline shows here.
        last: duration of the last step.
    """

    count: Count = 0
    seconds: float = 0.0
    waiting: float = 0.0
    communicating: float = 0.0
    before_first: float = 0.0
    last: float = 0.0


class OuterSteps(Message, frozen=True):
    """The outer steps of one rank, in which ranks average what each has changed in several inner steps.

    Attributes:
        count: of outer steps that have ended; each fragment's is one.
        bytes: size of the changes that this rank has sent, before they were encoded.
        seconds: time for which outer steps kept the program from its inner steps.
        every: number of inner steps from one outer step to the next.
        ended: end of the last one, since 1970, by the host's clock.
    """

    count: Count = 0
    bytes: Count = 0
    seconds: float = 0.0
    every: Count = 0
    ended: float = 0.0


class Saves(Message, frozen=True):
    """The saves of one rank that are of one kind.

    Attributes:
        kind: "commit" of an elastic state, or "checkpoint".
        count: number of them.
        ended: end of the last one, since 1970, by the host's clock.
    """

    kind: str
    count: Count
    ended: float


class Missing(Message, frozen=True):
    """An operation for which some ranks wait (known to rank 0).

    Attributes:
        name: name of its tensor.
        seconds: time since the first rank submitted it.
        ranks: ranks that have not submitted it; at most 16.
        count: number of all such ranks.
    """

    name: str
    seconds: float
    ranks: Sequence[Count]
    count: Count


class Late(Message, frozen=True):
    """Rounds in which one rank was the last to submit.

    Attributes:
        rank: the rank.
        count: number of rounds in which it was the last.
        seconds: sum of the first rank's waits in these rounds.
        recent_count, recent_seconds: the same among the last ``Lateness.recent`` rounds.
    """

    rank: Count
    count: Count
    seconds: float
    recent_count: Count
    recent_seconds: float


class Lateness(Message, frozen=True):
    """Ranks that made others wait, as rank 0's coordinator saw it.

    A round is a training step of rank 0, where steps are counted, and otherwise an operation. In a step, only the
    operation counts that others waited for longest. Counting starts again with the first step, so all rounds are of one
    kind: steps if ``Sample.steps.count`` is not 0.

    Attributes:
        rounds: number of rounds since the beginning.
        recent: number of rounds that ``recent_*`` count: the last 1,000, or fewer at first.
        waits: number of rounds in which the first rank waited for less than 0.1 ms, 0.2 ms, 0.4 ms, ... (the last:
            longer).
        ranks: ranks that were ever the last, in ascending order.
    """

    rounds: Count
    recent: Count
    waits: Sequence[Count]
    ranks: Sequence[Late]


class Plane(Message, frozen=True):
    """A data plane that this rank has opened.

    Attributes:
        name: "shared memory", "gloo", "hierarchical", "nccl" or "alone".
        process_set: number of the process set that uses it.
        device: "cpu" or "cuda".
        why: reason for its choice, e.g. "hosts h1 and h2", "all ranks are on one host".
    """

    name: str
    process_set: Count
    device: str
    why: str


class Progress(Message, frozen=True):
    """Progress of the training, as far as the program tells it; see ``progress.Progress``."""

    step: Count | None = None
    steps: Count | None = None
    epoch: Count | None = None
    epochs: Count | None = None


class Early(Message, frozen=True):
    """Numbers that the program logged in its first seconds, more often than samples are sent.

    Attributes:
        at: times, since 1970, by the host's clock.
        values: for each time the numbers by name, as they were then.
    """

    at: Sequence[float]
    values: Sequence[dict[str, float]]


class Sample(Message, frozen=True, tag=1):
    """One rank.

    Attributes:
        rank, size: its place in the job.
        epoch: epoch of an elastic job.
        pid: id of the process that the totals belong to.
        at: time of the sample, since 1970, by the host's clock.
        operations, bytes: totals of all collectives so far.
        steps: see ``Steps``.
        causes: see ``Causes``.
        flows: by plane and process set.
        doing: its activity for most of the last second: "computing", "waiting" (for other ranks), "communicating",
            "idle" (nothing was submitted), "starting" (no collective so far); "ended" in its last sample: its part of
            the job is over, though its process may go on.
        pending: operation that it has waited for longest; empty if none.
        pending_seconds: length of that wait.
        cpu_seconds: user and system time of this process and of its children that have ended.
        memory: resident bytes.
        gpu: index of its GPU on the host; -1 for none.
        planes: data planes that are open.
        settings: fusion threshold, cycle time and so on, as ``--config-file`` names them; only when they have changed.
        lateness, missing: from rank 0 only.
        stacks: from rank 0 only: (rank, text) for each rank that a stall report is about.
        outer: see ``OuterSteps``.
        logged: from rank 0 only: (name, value) of each number that the program logged last.
        progress: from rank 0 only; None if the program does not tell it.
        saves: from rank 0 only: see ``Saves``.
        early: from rank 0 only: see ``Early``; None in most samples once it is complete.
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
    outer: OuterSteps = OuterSteps()
    logged: Sequence[tuple[str, float]] = ()
    progress: Progress | None = None
    saves: Sequence[Saves] = ()
    early: Early | None = None


class Note(Message, frozen=True, tag=2):
    """A message that a rank sends once: a stall, a choice of autotune, a warning.

    Attributes:
        rank: rank that sends it.
        at: time, since 1970.
        kind: "warning", "stall", "stall ended", "tuning", "trace" or "note" (the program's own).
        text: for people.
    """

    rank: Count
    at: float
    kind: str
    text: str


class Gpu(Message, frozen=True):
    """One GPU, as NVML reports it. ``use`` is from 0 to 1; clocks are in MHz."""

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
        at: time, since 1970.
        cores: number of the machine's cores.
        cpu: share of all cores that was busy since the last sample, 0 to 1.
        stolen: share that a hypervisor gave to other machines.
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
"""Encoding of an observation in one datagram from a worker to its agent, and in a frame from there to the launcher."""


class TraceOrder(Message, frozen=True, tag=16):
    """An agent's order to a worker: trace the next steps.

    The trace is complete when it exists as ``{folder}/trace.{number}.{rank}.json``; a rank that cannot trace sends a
    Note.

    Attributes:
        number: number of this order.
        steps: number of steps; where no steps are counted, the trace ends after a time.
        folder: the agent's directory on this host.
    """

    number: Count
    steps: Count
    folder: str


ORDERS: Codec[TraceOrder] = Codec(TraceOrder, "order")
"""Encoding of an order in one datagram from an agent to a worker."""

LIMIT = 128 * 1024
"""Size of the longest observation in bytes; a longer one is dropped."""
