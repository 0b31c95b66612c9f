"""The messages between ranks before data moves: values, and their bytes.

A member (any rank) tells the coordinator (rank 0) what it has submitted; the coordinator answers with one order of
execution for all. A tensor's signature is spelled out once and stands for a small integer afterwards, and consecutive
integers travel as runs, so a steady training step is a message of a few bytes. ``hvdgloo._net.codec`` turns classes
into bytes.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeAlias

import msgspec

from hvdgloo._engine.readiness import Masks, masks_of
from hvdgloo._engine.run_lengths import items_of_runs, runs_of_items
from hvdgloo._net import codec
from hvdgloo._net.codec import Count
from hvdgloo.types import ENCODABLE, Collective, DType, ReduceOp, TensorSpec, WireFormat

_KINDS = tuple(
    collective.prefix(grouped=grouped)
    for collective in Collective
    if collective.has_tensors
    for grouped in (False, True)
)
"""The prefixes of names."""


class Request(codec.Message, frozen=True, dict=True):
    """One rank's wish to take part in one collective.

    A group of tensors is one Request (ready, executed and failed together); a single tensor is a group of one.

    Attributes:
        name: unique among what is pending in the process set, e.g. ``allreduce.fc.weight``. Ranks are matched by it.
        collective: what to do.
        tensors: what ranks must agree upon; in an allgather the first dimensions may differ.
        op: the reduce operation of a reduction.
        prescale, postscale: factors applied before and after a reduction, in addition to the average's 1/size.
        root: global rank of a broadcast's source, else -1.
        process_set: id of the set that takes part; 0 is all ranks.
        ranks: members of the process set to be added or removed.
        number: the id that a process set which is added is to get, 0 for any, or of the one to be removed. One that is
            to have a certain id may have all ranks.
        wire: the form in which values of an allreduce cross between hosts; see ``form``.
    """

    name: str
    collective: Collective
    tensors: tuple[TensorSpec, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    process_set: int = 0
    ranks: tuple[Count, ...] = ()
    number: Count = 0
    wire: WireFormat = WireFormat.FULL

    @cached_property
    def key(self) -> tuple[int, str]:
        """The key of the operation while it is pending."""
        return self.process_set, self.name

    @cached_property
    def kind(self) -> str:
        """The prefix of the name: the collective, of a tensor or of a group. Empty if the name has another one."""
        prefix = self.name.partition(".")[0]
        return prefix if prefix in _KINDS else ""

    @cached_property
    def other_kinds(self) -> tuple[tuple[int, str], ...]:
        """The keys of operations of other kinds with the same name from the user; none for an automatic name."""
        name = self.name[len(self.kind) + 1 :]
        if not self.kind or name.startswith("noname."):
            return ()
        return tuple([(self.process_set, f"{kind}.{name}") for kind in _KINDS if kind != self.kind])

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def on_device(self) -> bool:
        """True if some tensor is on a GPU."""
        return any(spec.device != "cpu" for spec in self.tensors)

    @property
    def combining(self) -> ReduceOp:
        """The part of a reduction that combines elements: an average is a sum, divided afterwards."""
        return ReduceOp.SUM if self.op is ReduceOp.AVERAGE else self.op

    def form(self, dtype: DType) -> WireFormat:
        """Return the form in which values of one type cross between hosts."""
        return self.wire if dtype in ENCODABLE[self.wire] else WireFormat.FULL

    def factor_after(self, size: int) -> float:
        """Return the factor of what ``size`` ranks have combined; an average's division is part of it."""
        return self.postscale / size if self.op is ReduceOp.AVERAGE else self.postscale


class Response(codec.Message, frozen=True, dict=True):
    """An agreement of all members of a process set.

    Attributes:
        request: the agreed operation. Where first dimensions may differ, it has the shapes of the set's first rank.
        rows: for an allgather, one tuple per tensor with every member's first dimension, in order of ranks.
        error: why it cannot be executed; empty if it can.
        signature: the number that stands for it from now on, -1 for none.
        value: for a join, the rank that came last; for a process set that was added or removed, its id; else -1.
    """

    request: Request
    rows: tuple[tuple[Count, ...], ...] = ()
    error: str = ""
    signature: int = -1
    value: int = -1

    # Computed once: a signature's Response is planned with in every training step.

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor's result."""
        if self.request.collective is not Collective.ALLGATHER:
            return tuple(spec.nbytes for spec in self.request.tensors)
        return tuple(
            sum(rows) * math.prod(spec.shape[1:]) * spec.dtype.itemsize
            for rows, spec in zip(self.rows, self.request.tensors, strict=True)
        )

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """A text for each tensor; tensors with equal texts may share a buffer."""
        r = self.request
        # Gathering moves bytes, whatever they mean; reducing computes on one dtype with one set of factors.
        common = f"{r.collective.value} {r.process_set} {r.root}"
        if r.collective.reduces:
            common += f" {int(r.op)} {r.prescale!r} {r.postscale!r}"
            if r.wire is WireFormat.FULL:
                return tuple(f"{common} {spec.device} {spec.dtype}" for spec in r.tensors)
            if r.wire is WireFormat.INT4_FEEDBACK:
                common += f" {r.name}"  # so that its buffers are the same in every step
            return tuple(f"{common} {spec.device} {spec.dtype} {r.form(spec.dtype)}" for spec in r.tensors)
        return tuple(f"{common} {spec.device}" for spec in r.tensors)


# From a member to the coordinator.


class Submit(msgspec.Struct, frozen=True, dict=True):
    """Operations that became ready on this rank: known signatures, and new requests.

    ``payload`` holds the tensor's bytes if there is a single operation and it is small enough; see ``inline``.
    ``resent`` says that this answers a Resend.
    """

    signatures: tuple[int, ...] = ()
    requests: tuple[Request, ...] = ()
    payload: bytes = b""
    resent: bool = False

    @cached_property
    def masks(self) -> Masks:
        """The signatures, to be counted many at once."""
        return masks_of(self.signatures)


class Offer(codec.Message, frozen=True, tag=21):
    """A rank has offered an operation to the other ranks of its host for a while, and some have not; see ``offers``.

    Attributes:
        request: what it offers.
        number: the number that stands for it.
        word: what its offer looks like.
        turn: number of offers that were completed before.
    """

    request: Request
    number: Count
    word: Count
    turn: Count


class Leave(codec.Message, frozen=True, tag=3):
    """This rank ends its part: ``shutdown()`` was called, or the interpreter exits, perhaps because of the error
    ``reason``."""

    reason: str = ""


class Drained(codec.Message, frozen=True, tag=4):
    """Everything that was ordered before ``End`` has been executed here; with ``ranks`` (as runs), on those."""

    ranks: tuple[Count, ...] = ()


class Failed(codec.Message, frozen=True, tag=5):
    """This rank's data plane failed."""

    text: str


class Stacks(codec.Message, frozen=True, tag=6):
    """The stacks of this rank's Python threads."""

    text: str


# From the coordinator to members.


class Execute(msgspec.Struct, frozen=True):
    """The next operations in the common order: a signature's number, or a Response spelled out.

    ``results`` holds, by position in ``items``, the bytes of results that are already known; see ``inline``.
    """

    items: tuple[int | Response, ...]
    forgotten: tuple[int, ...] = ()
    results: tuple[tuple[int, bytes], ...] = ()


class Resend(codec.Message, frozen=True, tag=2):
    """These numbers were forgotten before they arrived; spell out again what they stood for."""

    signatures: tuple[Count, ...]


class AskStacks(codec.Message, frozen=True, tag=7):
    """Others wait for this rank; what is it doing?"""


class End(codec.Message, frozen=True, tag=8):
    """``rank`` has left, for a ``reason`` if it said one: nothing will be ordered after this."""

    rank: int
    reason: str = ""


class Abort(codec.Message, frozen=True, tag=9):
    """The job's collectives have failed on all ranks. ``kind`` chooses the error's class; ``rank`` is the one to blame,
    or -1. A rank that is told so from outside the job says it to the coordinator, too."""

    kind: str
    text: str
    rank: int = -1


class Bye(codec.Message, frozen=True, tag=10):
    """Every rank has drained; connections may be closed."""


class Tune(codec.Message, frozen=True, tag=20):
    """Settings for fusing and sending all that is ordered from here on; see ``tuning.Choice``. Rank 0 may send it to
    its coordinator, too, which passes it on."""

    fusion_threshold: Count
    cycle_time: float
    hierarchical_threshold: Count
    inline_threshold: Count


# In a tree (see ``tree``), from the leader of a host to the one above. Ranks travel as runs: start, length, ...


class Part(codec.Message, frozen=True):
    """The submissions of some ranks for one operation.

    Attributes:
        ranks: who has.
        what: the operation's number, or what they ask for; None if they have only answered a Resend.
        payload: the reduction of their tensors, prescaled, if all of them have sent theirs along.
        age: seconds since the first of them submitted it.
    """

    ranks: tuple[Count, ...]
    what: Count | Request | None
    payload: bytes = b""
    age: float = 0.0


class Gathered(codec.Message, frozen=True, tag=13):
    """The submissions of the ranks of a subtree.

    Attributes:
        whole: numbers that all of them have submitted which take part in the operation, as runs.
        parts: everything else, in order.
        last: of what all have submitted, who was the last to do so, where the first had waited longest for it; -1 if
            no rank has waited.
        waited: for so many microseconds.
    """

    whole: tuple[Count, ...] = ()
    parts: tuple[Part, ...] = ()
    last: int = -1
    waited: Count = 0


class Said(codec.Message, frozen=True, tag=14):
    """A rank's message to the coordinator by way of its leaders."""

    rank: Count
    message: Leave | Failed | Stacks


class Lost(codec.Message, frozen=True, tag=15):
    """A rank's connection with its leader has ended, or it no longer answers."""

    rank: Count
    reason: str


class Silent(codec.Message, frozen=True, tag=16):
    """The answer of the leader ``rank`` to ``AskAlive``: the ranks that gave no sign of life."""

    rank: Count
    ranks: tuple[Count, ...] = ()


# In a tree, from a leader to those below.


class To(codec.Message, frozen=True, tag=17):
    """A message to only some of the ranks below."""

    ranks: tuple[Count, ...]
    message: Resend | AskStacks


class AskAlive(codec.Message, frozen=True, tag=18):
    """Ask all ranks of your subtree for a sign of life."""


class Observe(codec.Message, frozen=True, tag=19):
    """The coordinator's wish to see each rank's submissions, as it does while it writes a timeline, or its end."""

    on: bool


# Both ways.


class Ping(codec.Message, frozen=True, tag=11):
    """Are you there? Sent only while something is pending."""


class Pong(codec.Message, frozen=True, tag=12):
    """Yes."""


Message: TypeAlias = (
    Submit
    | Offer
    | Leave
    | Drained
    | Failed
    | Stacks
    | Execute
    | Resend
    | AskStacks
    | End
    | Abort
    | Bye
    | Ping
    | Pong
    | Gathered
    | Said
    | Lost
    | Silent
    | To
    | AskAlive
    | Observe
    | Tune
)


FOR_EVERYONE = (Execute, End, Abort, Bye, Observe, Tune)
"""In a tree, leaders pass these on to all below them, as they came."""


# Signatures as sent: start and length of each run.


class _SubmitRuns(codec.Message, frozen=True, tag=0):
    """Like Submit, but a missing payload is None, which saves a byte in every step."""

    runs: tuple[Count, ...]
    requests: tuple[Request, ...]
    payload: bytes | None
    resent: bool


class _ExecuteRuns(codec.Message, frozen=True, tag=1):
    """``items`` is a start, a length, a start, a length, ..., with Responses before any start."""

    items: tuple[Count | Response, ...]
    forgotten: tuple[Count, ...]
    results: tuple[tuple[Count, bytes], ...]


_CODEC: codec.Codec[Any] = codec.Codec(
    _SubmitRuns
    | _ExecuteRuns
    | Offer
    | Resend
    | Leave
    | Drained
    | Failed
    | Stacks
    | AskStacks
    | End
    | Abort
    | Bye
    | Ping
    | Pong
    | Gathered
    | Said
    | Lost
    | Silent
    | To
    | AskAlive
    | Observe
    | Tune,
    "control message",
)


def encode(message: Message) -> bytes:
    """A message's bytes, without framing."""
    return _CODEC.encode(_travelling(message))


def frame(message: Message) -> bytearray:
    """A message as it is sent."""
    return _CODEC.frame(_travelling(message))


def decode(data: bytes | memoryview) -> Message:
    """The inverse of ``encode``.

    Raises:
        ValueError: the bytes are not a message of this version.
    """
    message = _CODEC.decode(data)
    if isinstance(message, _SubmitRuns):
        signatures: Any = items_of_runs(message.runs)
        return Submit(signatures, message.requests, message.payload or b"", message.resent)
    if isinstance(message, _ExecuteRuns):
        items = items_of_runs(message.items)
        if any(position >= len(items) for position, _ in message.results):
            raise ValueError("not a control message: a result of nothing")
        return Execute(items, message.forgotten, message.results)
    arrived: Message = message
    return arrived


class Decoder:
    """``decode`` for many senders who say the same: equal bytes become the same Submit, so that what it spells out is
    decoded, and kept, once for all of them. Not for several threads at a time."""

    def __init__(self) -> None:
        self._known: dict[bytes, Submit] = {}
        self._bytes = 0

    def decode(self, data: bytes | memoryview) -> Message:
        """As the function ``decode``."""
        data = bytes(data)
        known = self._known.get(data)
        if known is not None:
            return known
        message = decode(data)
        # Those with a tensor's bytes hardly ever come again.
        if isinstance(message, Submit) and not message.payload:
            self._bytes += len(data) + _KNOWN_OVERHEAD
            if self._bytes > _KNOWN_BYTES:
                self._known.clear()
                self._bytes = len(data) + _KNOWN_OVERHEAD
            self._known[data] = message
        return message


_KNOWN_BYTES = 1 << 16
"""Bytes of messages that a Decoder keeps, or a single message that is longer."""

_KNOWN_OVERHEAD = 64
"""Counted for each, so that short ones are not too many."""


def _travelling(message: Message) -> codec.Message:
    if isinstance(message, Submit):
        runs: Any = runs_of_items(message.signatures)
        return _SubmitRuns(runs, message.requests, message.payload or None, message.resent)
    if isinstance(message, Execute):
        return _ExecuteRuns(runs_of_items(message.items), message.forgotten, message.results)
    return message
