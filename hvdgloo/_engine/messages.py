"""What ranks say to each other before data moves: values, and their bytes.

A member (any rank) tells the coordinator (rank 0) what it has submitted; the coordinator answers with one order of
execution for all. A tensor's signature is spelled out once and stands for a small integer afterwards, and consecutive
integers travel as runs, so a steady training step is a message of a few bytes. Messages are msgpack arrays whose first
element is the class's number: nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import msgpack

from hvdgloo.types import Collective, DType, ReduceOp, TensorSpec

SET_CHANGES = frozenset({Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET})
"""Operations of all ranks that change the process sets."""

REDUCTIONS = frozenset({Collective.ALLREDUCE, Collective.REDUCESCATTER})
"""Collectives that compute, by a reduce operation and scale factors."""


@dataclass(frozen=True)
class Request:
    """One rank's wish to take part in one collective.

    A group of tensors is one Request (ready, executed and failed together); a single tensor is a group of one.

    Attributes:
        name: unique among what is pending in the process set, e.g. ``allreduce.fc.weight``. Ranks are matched by it.
        collective: what to do.
        tensors: what ranks must agree upon; in an allgather the first dimensions may differ.
        op: of a reduction.
        prescale, postscale: factors applied before and after a reduction, in addition to the average's 1/size.
        root: global rank of a broadcast's source, else -1.
        process_set: id of the set that takes part; 0 is all ranks.
        ranks: members of the process set that is to be added or removed.
    """

    name: str
    collective: Collective
    tensors: tuple[TensorSpec, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    process_set: int = 0
    ranks: tuple[int, ...] = ()

    @cached_property
    def key(self) -> tuple[int, str]:
        """What identifies the operation while it is pending."""
        return self.process_set, self.name

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True)
class Response:
    """What all members of a process set agreed upon.

    Attributes:
        request: the agreed operation. Where first dimensions may differ, they are those of the set's first rank.
        rows: for an allgather, one tuple per tensor with every member's first dimension, in order of ranks.
        error: why it cannot be executed; empty if it can.
        signature: the number that stands for it from now on, -1 for none.
        value: of a join the rank that came last, of a process set that was added or removed its id, else -1.
    """

    request: Request
    rows: tuple[tuple[int, ...], ...] = ()
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
        """For each tensor a text that is equal where tensors may share a buffer."""
        r = self.request
        # Gathering moves bytes, whatever they mean; reducing computes on one dtype with one set of factors.
        common = f"{r.collective.value} {r.process_set} {r.root}"
        if r.collective in REDUCTIONS:
            common += f" {int(r.op)} {r.prescale!r} {r.postscale!r}"
            return tuple(f"{common} {spec.device} {spec.dtype}" for spec in r.tensors)
        return tuple(f"{common} {spec.device}" for spec in r.tensors)


# From a member to the coordinator.


@dataclass(frozen=True)
class Submit:
    """Operations that became ready on this rank: known signatures, and new requests.

    ``payload`` holds the tensor's bytes if there is a single operation and it is small enough; see ``inline``.
    ``resent`` says that this answers a Resend.
    """

    signatures: tuple[int, ...] = ()
    requests: tuple[Request, ...] = ()
    payload: bytes = b""
    resent: bool = False


@dataclass(frozen=True)
class Leave:
    """This rank ends its part: ``shutdown()`` was called, or the interpreter exits, perhaps by the error ``reason``."""

    reason: str = ""


@dataclass(frozen=True)
class Drained:
    """Everything that was ordered before ``End`` has been executed here."""


@dataclass(frozen=True)
class Failed:
    """This rank's data plane failed."""

    text: str


@dataclass(frozen=True)
class Stacks:
    """What this rank's Python threads are doing."""

    text: str


# From the coordinator to members.


@dataclass(frozen=True)
class Execute:
    """The next operations in the common order: a signature's number, or a Response spelled out.

    ``results`` holds, by position in ``items``, the bytes of those whose result is known already; see ``inline``.
    """

    items: tuple[int | Response, ...]
    forgotten: tuple[int, ...] = ()
    results: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True)
class Resend:
    """These numbers were forgotten before they arrived; say again what they stood for."""

    signatures: tuple[int, ...]


@dataclass(frozen=True)
class AskStacks:
    """Others wait for this rank; what is it doing?"""


@dataclass(frozen=True)
class End:
    """``rank`` has left, for a ``reason`` if it said one: nothing will be ordered after this."""

    rank: int
    reason: str = ""


@dataclass(frozen=True)
class Abort:
    """The job's collectives have failed for all. ``kind`` chooses the error's class, ``rank`` is to blame or -1."""

    kind: str
    text: str
    rank: int = -1


@dataclass(frozen=True)
class Bye:
    """Every rank has drained; connections may be closed."""


# Both ways.


@dataclass(frozen=True)
class Ping:
    """Are you there? Sent only while something is pending."""


@dataclass(frozen=True)
class Pong:
    """Yes."""


Message: TypeAlias = (
    Submit | Leave | Drained | Failed | Stacks | Execute | Resend | AskStacks | End | Abort | Bye | Ping | Pong
)

_MAX_NUMBERS = 1 << 20
"""How many signatures one message may list: far beyond any model's tensors, and a few dozen megabytes."""

_DTYPES = tuple(DType)
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}
_COLLECTIVES = tuple(Collective)
_COLLECTIVE_NUMBER = {collective: number for number, collective in enumerate(_COLLECTIVES)}


def _runs(numbers: Iterable[int]) -> list[int]:
    """Consecutive numbers as [start, length, start, length, ...]."""
    runs: list[int] = []
    expected = -1
    for number in numbers:
        if number == expected:
            runs[-1] += 1
        else:
            runs += (number, 1)
        expected = number + 1
    return runs


def _from_runs(runs: list[int]) -> tuple[int, ...]:
    numbers: list[int] = []
    for at in range(0, len(runs), 2):
        _extend(numbers, runs[at : at + 2])
    return tuple(numbers)


def _extend(numbers: list[Any], run: list[int]) -> None:
    """Spell out one run. It is a few bytes that stand for any number of integers, so their total is limited before."""
    start, length = _counts(run)
    if len(numbers) + length > _MAX_NUMBERS:
        raise ValueError("runs of too many numbers")
    numbers.extend(range(start, start + length))


# What arrives with a wrong type must not get further than ``decode``: deeper in, it would end the control thread.


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is expected")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError("an integer is expected")
    return value


def _factor(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("a number is expected")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("bytes are expected")
    return value


def _counts(values: Iterable[Any]) -> tuple[int, ...]:
    """Integers that are not negative."""
    counts = tuple(values)
    for count in counts:
        if not isinstance(count, int):
            raise TypeError("an integer is expected")
        if count < 0:
            raise ValueError("a negative number")
    return counts


def _pack_request(r: Request) -> list[Any]:
    return [
        r.name,
        _COLLECTIVE_NUMBER[r.collective],
        [[_DTYPE_NUMBER[t.dtype], t.shape, t.device] for t in r.tensors],
        int(r.op),
        r.prescale,
        r.postscale,
        r.root,
        r.process_set,
        r.ranks,
    ]


def _unpack_request(packed: list[Any]) -> Request:
    name, collective, tensors, op, prescale, postscale, root, process_set, ranks = packed
    _counts((collective, *(dtype for dtype, _, _ in tensors)))  # tuples would count a negative index from the end
    return Request(
        _text(name),
        _COLLECTIVES[collective],
        tuple(TensorSpec(_DTYPES[dtype], _counts(shape), _text(device)) for dtype, shape, device in tensors),
        ReduceOp(op),
        _factor(prescale),
        _factor(postscale),
        _integer(root),
        _integer(process_set),
        _counts(ranks),
    )


def _pack_items(items: tuple[int | Response, ...]) -> list[Any]:
    """Items in order: [start, length] for a run of signatures, or the five parts of a Response."""
    packed: list[Any] = []
    expected = -1
    for item in items:
        if not isinstance(item, int):
            packed.append([_pack_request(item.request), item.rows, item.error, item.signature, item.value])
            expected = -1
        elif item == expected:
            packed[-1][1] += 1
            expected += 1
        else:
            packed.append([item, 1])
            expected = item + 1
    return packed


def _unpack_items(packed: list[Any]) -> tuple[int | Response, ...]:
    items: list[int | Response] = []
    for part in packed:
        if len(part) == 2:
            _extend(items, part)
        else:
            request, rows, error, signature, value = part
            counts = tuple(_counts(row) for row in rows)
            items.append(Response(_unpack_request(request), counts, _text(error), _integer(signature), _integer(value)))
    return tuple(items)


def _execute(items: tuple[int | Response, ...], forgotten: tuple[int, ...], results: list[Any]) -> Execute:
    known = []
    for position, data in results:
        if not 0 <= _integer(position) < len(items):
            raise ValueError("a result of nothing")
        known.append((position, _bytes(data)))
    return Execute(items, forgotten, tuple(known))


def _plain(message: Any) -> list[Any]:
    return list(vars(message).values())


_CODECS: dict[type, tuple[Callable[[Any], list[Any]], Callable[..., Message]]] = {
    Submit: (
        lambda m: [_runs(m.signatures), [_pack_request(r) for r in m.requests], m.payload, *[True] * m.resent],
        lambda runs, requests, payload, resent=False: Submit(
            _from_runs(runs), tuple(_unpack_request(r) for r in requests), _bytes(payload), bool(resent)
        ),
    ),
    Execute: (
        lambda m: [_pack_items(m.items), m.forgotten, m.results],
        lambda items, forgotten, results: _execute(_unpack_items(items), _counts(forgotten), results),
    ),
    Resend: (_plain, lambda signatures: Resend(_counts(signatures))),
    Leave: (_plain, lambda reason: Leave(_text(reason))),
    Drained: (_plain, Drained),
    Failed: (_plain, lambda text: Failed(_text(text))),
    Stacks: (_plain, lambda text: Stacks(_text(text))),
    AskStacks: (_plain, AskStacks),
    End: (_plain, lambda rank, reason: End(_integer(rank), _text(reason))),
    Abort: (_plain, lambda kind, text, rank: Abort(_text(kind), _text(text), _integer(rank))),
    Bye: (_plain, Bye),
    Ping: (_plain, Ping),
    Pong: (_plain, Pong),
}
_NUMBERS = {cls: number for number, cls in enumerate(_CODECS)}
_DECODERS = tuple(decode for _, decode in _CODECS.values())


def encode(message: Message) -> bytes:
    """A message's bytes, without framing."""
    pack, _ = _CODECS[type(message)]
    return bytes(msgpack.packb([_NUMBERS[type(message)], *pack(message)]))


def decode(data: bytes | memoryview) -> Message:
    """The inverse of ``encode``.

    Raises:
        ValueError: the bytes are not a message of this version.
    """
    try:
        number, *parts = msgpack.unpackb(data)
        if number < 0:
            raise ValueError("negative message number")
        message: Message = _DECODERS[number](*parts)
        return message
    except Exception as error:  # whatever a hostile or foreign byte string provokes is one thing to the caller
        raise ValueError(f"not a control message: {type(error).__name__}") from error
