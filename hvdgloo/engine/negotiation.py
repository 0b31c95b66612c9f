"""The coordinator's bookkeeping: which operation has been submitted where, and what the ranks agree upon.

Values in, values out: no clock, thread or socket. An operation is ready when every member of its process set has
submitted it; it then takes its place in one total order over all process sets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdgloo.engine import inline
from hvdgloo.engine.messages import Execute, Request, Response, Submit
from hvdgloo.types import Collective, ReduceOp


@dataclass
class Pending:
    """An operation that some ranks have submitted."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    by_number: int = 0


@dataclass(frozen=True)
class Waiting:
    """A pending operation as the stall report sees it."""

    name: str
    since: float
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass
class _Signature:
    response: Response
    requests: Mapping[int, Request]


class Negotiator:
    """Absorbs every rank's submissions and yields agreed Responses in order.

    Args:
        members: the global ranks of each process set by id; read at each use, so sets may come and go.
        capacity: how many signatures are remembered.
    """

    def __init__(self, members: Mapping[int, Sequence[int]], capacity: int) -> None:
        self._members = members
        self._capacity = capacity
        self._pending: dict[tuple[int, str], Pending] = {}
        self._ready: list[int | Response] = []
        self._results: list[tuple[int, bytes]] = []
        self._signatures: OrderedDict[int, _Signature] = OrderedDict()
        self._numbers: dict[tuple[int, str], int] = {}
        self._next_number = 0
        self._forgotten: list[int] = []

    def absorb(self, rank: int, submission: Submit, now: float) -> list[int]:
        """File a rank's submission.

        Returns:
            numbers that stand for nothing any more; the rank must spell these requests out.
        """
        unknown = []
        for number in submission.signatures:
            signature = self._signatures.get(number)
            if signature is None:
                unknown.append(number)
            else:
                self._file(rank, signature.requests[rank], now, submission.payload, by_number=True)
        for request in submission.requests:
            self._file(rank, request, now, submission.payload, by_number=False)
        return unknown

    def take(self) -> Execute:
        """What has become ready since the last call, in order, and the signatures forgotten meanwhile."""
        message = Execute(tuple(self._ready), tuple(self._forgotten), tuple(self._results))
        self._ready, self._forgotten, self._results = [], [], []
        return message

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def waiting(self) -> list[Waiting]:
        """Operations that some member has not submitted, oldest first."""
        report = [
            Waiting(
                name,
                pending.since,
                tuple(sorted(pending.requests)),
                tuple(rank for rank in self._members[process_set] if rank not in pending.requests),
            )
            for (process_set, name), pending in self._pending.items()
        ]
        return sorted(report, key=lambda waiting: waiting.since)

    def _file(self, rank: int, request: Request, now: float, payload: bytes, *, by_number: bool) -> None:
        key = request.process_set, request.name
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = Pending(now)
        pending.requests[rank] = request
        if payload:
            pending.payloads[rank] = payload
        pending.by_number += by_number
        members = self._members[request.process_set]
        if len(pending.requests) < len(members):
            return
        del self._pending[key]
        number = self._numbers.get(key)
        error = ""
        if number is not None and pending.by_number == len(members):
            self._signatures.move_to_end(number)
            self._ready.append(number)
        else:
            response = self._settle(key, pending.requests, members)
            self._ready.append(response)
            error = response.error
        if len(pending.payloads) == len(members) and not error:
            result = inline.combine(request, [pending.payloads[member] for member in members])
            if result:
                self._results.append((len(self._ready) - 1, result))

    def _settle(self, key: tuple[int, str], requests: Mapping[int, Request], members: Sequence[int]) -> Response:
        """Spell out a Response, and remember it under a new number if it may come again."""
        old = self._numbers.pop(key, None)
        if old is not None:
            # Members replace it when they see the new Response; nobody sends it again.
            del self._signatures[old]
            self._forgotten.append(old)
        response = agree(requests, members)
        if response.error or self._capacity == 0:
            return response
        number, self._next_number = self._next_number, self._next_number + 1
        response = Response(response.request, response.rows, "", number)
        self._signatures[number] = _Signature(response, requests)
        self._numbers[key] = number
        if len(self._signatures) > self._capacity:
            evicted, signature = self._signatures.popitem(last=False)
            del self._numbers[signature.response.request.key]
            self._forgotten.append(evicted)
        return response


def agree(requests: Mapping[int, Request], members: Sequence[int]) -> Response:
    """What the members' requests amount to; a Response with an error if they contradict each other.

    Checks follow Horovod's order: dtype, operation, shape, scale factors, reduce operation, then what belongs to one
    collective, then device. The first that fails is reported, with the ranks on both sides.
    """
    first = requests[members[0]]
    if all(requests[rank] == first for rank in members):
        return Response(first, _rows(requests, members) if first.collective is Collective.ALLGATHER else ())
    for what, value in _CHECKS:
        if what == "root rank" and first.collective is not Collective.BROADCAST:
            continue
        if what in _REDUCTION_ONLY and first.collective is not Collective.ALLREDUCE:
            continue
        error = _difference(what, value, requests, members)
        if error:
            return Response(first, error=error)
    return Response(first, _rows(requests, members))


def _agreed_shapes(request: Request) -> tuple[tuple[int, ...], ...]:
    """The dimensions in which ranks must not differ."""
    skip = 1 if request.collective is Collective.ALLGATHER else 0
    return tuple(spec.shape[skip:] for spec in request.tensors)


_CHECKS: tuple[tuple[str, Callable[[Request], object]], ...] = (
    ("number of tensors", lambda r: len(r.tensors)),
    ("dtype", lambda r: tuple(str(t.dtype) for t in r.tensors)),
    ("operation", lambda r: r.collective.name),
    ("number of dimensions", lambda r: tuple(len(t.shape) for t in r.tensors)),
    ("shape", _agreed_shapes),
    ("prescale factor", lambda r: r.prescale),
    ("postscale factor", lambda r: r.postscale),
    ("reduce operation", lambda r: ReduceOp(r.op).name),
    ("root rank", lambda r: r.root),
    ("device type", lambda r: tuple(t.device.partition(":")[0] for t in r.tensors)),
)
_REDUCTION_ONLY = frozenset({"prescale factor", "postscale factor", "reduce operation"})


def _difference(
    what: str, value: Callable[[Request], object], requests: Mapping[int, Request], members: Sequence[int]
) -> str:
    """A sentence that groups ranks by value; empty if all are equal."""
    ranks: dict[object, list[int]] = {}
    for rank in members:
        ranks.setdefault(value(requests[rank]), []).append(rank)
    if len(ranks) == 1:
        return ""
    sides = "; ".join(f"{_shown(side)} on {format_ranks(who)}" for side, who in ranks.items())
    name = requests[members[0]].name
    note = " (first dimensions may differ)" if what == "shape" and _is_gather(requests[members[0]]) else ""
    return f"{name}: ranks disagree about its {what}{note}: {sides}"


def _is_gather(request: Request) -> bool:
    return request.collective is Collective.ALLGATHER


def _shown(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return str(value)


def format_ranks(ranks: Sequence[int], limit: int = 16) -> str:
    """Ranks in a sentence: ``rank 3``, ``ranks 1, 2, 5``, at most ``limit`` spelled out."""
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _rows(requests: Mapping[int, Request], members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    count = len(requests[members[0]].tensors)
    if not _is_gather(requests[members[0]]):
        return ()
    return tuple(tuple(requests[rank].tensors[i].shape[0] for rank in members) for i in range(count))
