"""The coordinator's bookkeeping: which operation has been submitted where, and what the ranks agree upon.

Values in, values out: no clock, thread or socket. An operation is ready when every member of its process set has
submitted it, or has joined; it then takes its place in one total order over all process sets. Adding and removing sets,
and the end of a join, are operations of that order too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from hvdgloo._engine import inline
from hvdgloo._engine.messages import REDUCTIONS, SET_CHANGES, Execute, Request, Response, Submit
from hvdgloo.types import Collective, ReduceOp

COORDINATOR = 0
"""The rank whose negotiator orders the operations of all ranks."""

_EXCUSABLE = frozenset({Collective.ALLREDUCE, Collective.BARRIER})
"""Collectives that go on without the data of ranks that have joined."""


class PartialSubmission:
    """An operation that some ranks have submitted, since the time ``since``; how many of them by its number."""

    __slots__ = ("by_number", "payloads", "requests", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.requests: dict[int, Request] = {}
        self.payloads: dict[int, bytes] | None = None
        self.by_number = 0


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


class Observer(Protocol):
    """What is notified of what happens to operations."""

    def arrived(self, rank: int, request: Request) -> None: ...
    def settled(self, request: Request, *, executed_here: bool) -> None: ...


class Negotiator:
    """Takes every rank's submissions and yields agreed Responses in order.

    Args:
        members: the global ranks of each process set by id, at the beginning; 0 is all ranks.
        capacity: how many signatures are remembered.
    """

    def __init__(self, members: Mapping[int, Sequence[int]], capacity: int) -> None:
        self._members = {number: tuple(ranks) for number, ranks in members.items()}
        self._next_set = max(self._members) + 1
        self._freed_sets: deque[int] = deque()
        self._joined: list[int] = []
        self._asked_back: Counter[int] = Counter()
        self._late_joins: dict[int, Request] = {}
        self.observer: Observer | None = None
        self._capacity = capacity
        self._pending: dict[tuple[int, str], PartialSubmission] = {}
        # Numbers of operations that every rank of the job takes part in, and what ranks have submitted of them while
        # nothing else was pending: numbers, with the time of the submission.
        self._common: set[int] = set()
        self._runs: list[dict[int, float]] = [{} for _ in self._members[0]]
        self._ready: list[int | Response] = []
        self._results: list[tuple[int, bytes]] = []
        self._signatures: OrderedDict[int, _Signature] = OrderedDict()
        self._numbers: dict[tuple[int, str], int] = {}
        self._next_number = 0
        self._forgotten: list[int] = []

    def absorb(self, rank: int, submission: Submit, now: float) -> list[int]:
        """File a rank's submission.

        Returns:
            numbers that no longer stand for anything; the rank must spell out these requests.
        """
        if self._absorb_run(rank, submission, now):
            return []
        self._spell_out_runs()
        unknown = []
        alone = len(submission.signatures) + len(submission.requests) == 1
        for number in submission.signatures:
            signature = self._signatures.get(number)
            if signature is None or rank not in signature.requests:
                unknown.append(number)
            else:
                request = signature.requests[rank]
                self._file(rank, request, now, submission.payload, by_number=True)
                if alone:
                    self._compare_kinds(request)
        self._asked_back[rank] += bool(unknown) - submission.resent
        for request in submission.requests:
            self._file(rank, request, now, submission.payload, by_number=False)
            self._compare_kinds(request)
        if not self._asked_back[rank] and rank in self._late_joins:
            self._join(rank, self._late_joins.pop(rank))
        return unknown

    def _absorb_run(self, rank: int, submission: Submit, now: float) -> bool:
        """File a submission of nothing but numbers that all ranks know, as in a steady step, without looking at each.

        Returns:
            False if it is not of that kind, or not all that is pending is; nothing has been filed then.
        """
        if submission.requests or submission.payload or submission.resent or self._pending:
            return False
        if self._joined or self._late_joins or self.observer is not None:
            return False
        numbers = submission.signatures
        if not self._common.issuperset(numbers):
            return False
        self._runs[rank].update(dict.fromkeys(numbers, now))
        complete = set(numbers).intersection(*self._runs)
        if complete:
            ordered = numbers if len(complete) == len(numbers) else [n for n in numbers if n in complete]
            self._ready += ordered
            for number in ordered:
                self._signatures.move_to_end(number)
                for run in self._runs:
                    del run[number]
        return True

    def _spell_out_runs(self) -> None:
        """File what was submitted in runs as everything else is."""
        for rank, run in enumerate(self._runs):
            for number, since in run.items():
                self._file(rank, self._signatures[number].requests[rank], since, b"", by_number=True)
            run.clear()

    def take(self) -> Execute:
        """What has become ready since the last call, in order, and the signatures that have been forgotten since."""
        message = Execute(tuple(self._ready), tuple(self._forgotten), tuple(self._results))
        self._ready, self._forgotten, self._results = [], [], []
        return message

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending) or any(self._runs)

    @property
    def has_joined(self) -> bool:
        """Some ranks have joined, and wait for the others to do so."""
        return bool(self._joined)

    def waiting(self) -> list[Waiting]:
        """Operations that some member has not submitted, oldest first."""
        self._spell_out_runs()
        report = [
            Waiting(
                name,
                pending.since,
                tuple(sorted(pending.requests)),
                tuple(self._missing(process_set, pending)),
            )
            for (process_set, name), pending in self._pending.items()
        ]
        return sorted(report, key=lambda waiting: waiting.since)

    def _file(self, rank: int, request: Request, now: float, payload: bytes, *, by_number: bool) -> None:
        members = self._members.get(request.process_set)
        if members is None:
            return  # the set was removed while this was on its way; the rank has been told
        if request.collective is Collective.JOIN:
            # What this rank submitted earlier comes first, including what it is being asked to spell out again.
            if self._asked_back[rank]:
                self._late_joins[rank] = request
            else:
                self._join(rank, request)
            return
        if self.observer is not None:
            self.observer.arrived(rank, request)
        key = request.key
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = PartialSubmission(now)
        pending.requests[rank] = request
        if payload:
            if pending.payloads is None:
                pending.payloads = {}
            pending.payloads[rank] = payload
        pending.by_number += by_number
        if len(pending.requests) == len(members) or (self._joined and not self._missing(key[0], pending)):
            self._order(key, pending)

    def _compare_kinds(self, request: Request) -> None:
        """Fail operations under one name of which each rank waits for another kind, as they would for ever.

        As long as ranks submit their operations in one order, whoever has submitted the second of two has also
        submitted the first, which is therefore not pending or not missing here. Called for what is new, or comes alone;
        not for the many known operations of a training step, which would pay for it each time.
        """
        own = self._pending.get(request.key)
        if own is None or len(self._pending) < 2:
            return
        others = [key for key in request.other_kinds if key in self._pending]
        if not others:
            return
        parts = {key: self._pending[key] for key in (request.key, *others)}
        submitted = [rank for part in parts.values() for rank in part.requests]
        members = self._members[request.process_set]
        if len(set(submitted)) < len(submitted) or any(r not in submitted and r not in self._joined for r in members):
            return
        name = request.name[len(request.kind) + 1 :]
        first = {key: next(iter(part.requests.values())) for key, part in parts.items()}
        sides = "; ".join(f"{first[key].kind} on {format_ranks(sorted(parts[key].requests))}" for key in sorted(parts))
        for key, asked in first.items():
            del self._pending[key]
            self._ready.append(Response(asked, error=f"{name}: ranks disagree about the kind of collective: {sides}"))
            if self.observer is not None:
                self.observer.settled(asked, executed_here=False)

    def _missing(self, process_set: int, pending: PartialSubmission) -> list[int]:
        """The ranks that an operation still waits for. The sets may not be changed in the absence of ranks that have
        joined."""
        first = next(iter(pending.requests.values()))
        excused = () if first.collective in SET_CHANGES else self._joined
        return [rank for rank in self._members[process_set] if rank not in pending.requests and rank not in excused]

    def _order(self, key: tuple[int, str], pending: PartialSubmission) -> None:
        """Every member has submitted it: give it its place in the order."""
        del self._pending[key]
        members = self._members[key[0]]
        number = self._numbers.get(key)
        error = ""
        submitted = len(pending.requests)
        as_before = pending.by_number == submitted and not (
            submitted < len(members) and _lacks(pending.requests, members)
        )
        if number is not None and as_before:
            self._signatures.move_to_end(number)
            self._ready.append(number)
        else:
            response = self._settle(key, pending.requests, members)
            self._ready.append(response)
            error = response.error
        if self.observer is not None:
            request = next(iter(pending.requests.values()))
            self.observer.settled(request, executed_here=not error and COORDINATOR in members)
        sent = pending.payloads
        if sent is not None and len(sent) == submitted and not error:
            payloads = [sent[rank] for rank in sorted(sent)]
            result = inline.combine(pending.requests[min(pending.requests)], payloads, len(members))
            if result:
                self._results.append((len(self._ready) - 1, result))

    def _join(self, rank: int, request: Request) -> None:
        """A rank has no more data. When all have said so, all go on, and learn which was last."""
        if rank not in self._joined:
            self._joined.append(rank)
        # Also when it is the last: operations that it submitted before, and that others will not submit, go on without
        # them.
        for key, pending in list(self._pending.items()):
            if not self._missing(key[0], pending):
                self._order(key, pending)
        if len(self._joined) == len(self._members[0]):
            self._joined.clear()
            self._ready.append(Response(request, value=rank))

    def _settle(self, key: tuple[int, str], requests: Mapping[int, Request], members: Sequence[int]) -> Response:
        """Spell out a Response, and remember it under a new number if it may come again."""
        old = self._numbers.pop(key, None)
        if old is not None:
            # Members replace it when they see the new Response; no rank sends it again.
            self._forget(old)
        response = agree(requests, [rank for rank in members if rank in requests])
        if not response.error and _lacks(requests, members):
            text = f"{key[1]}: {format_ranks(self._joined)} called join(), which only allreduce and barrier allow"
            response = Response(response.request, error=text)
        if response.request.collective in SET_CHANGES:
            return self._change_sets(response)
        if response.error or self._capacity == 0:
            return response
        number, self._next_number = self._next_number, self._next_number + 1
        response = Response(response.request, response.rows, "", number)
        self._signatures[number] = _Signature(response, requests)
        self._numbers[key] = number
        if len(requests) == len(self._members[0]):
            self._common.add(number)
        if len(self._signatures) > self._capacity:
            evicted, signature = next(iter(self._signatures.items()))
            del self._numbers[signature.response.request.key]
            self._forget(evicted)
        return response

    def _forget(self, number: int) -> None:
        del self._signatures[number]
        self._common.discard(number)
        self._forgotten.append(number)

    def _change_sets(self, response: Response) -> Response:
        if response.error:
            return response
        ranks = response.request.ranks
        number = next((n for n, members in self._members.items() if members == ranks), -1)
        if response.request.collective is Collective.ADD_PROCESS_SET:
            if number >= 0:
                text = f"there is a process set of {format_ranks(ranks)} already; use that one"
                return replace(response, error=text)
            number = self._freed_sets.popleft() if self._freed_sets else self._next_set
            self._next_set = max(self._next_set, number + 1)
            self._members[number] = ranks
            return replace(response, value=number)
        if number <= 0:
            return replace(response, error=f"there is no process set of {format_ranks(ranks)} that could be removed")
        self._forget_set(number)
        return replace(response, value=number)

    def _forget_set(self, number: int) -> None:
        """Its pending operations are ended by the ranks themselves, since every rank is told of the removal."""
        del self._members[number]
        self._freed_sets.append(number)
        self._pending = {key: pending for key, pending in self._pending.items() if key[0] != number}
        for key in [key for key in self._numbers if key[0] == number]:
            self._forget(self._numbers.pop(key))


def _lacks(requests: Mapping[int, Request], members: Sequence[int]) -> bool:
    """True if members have joined and the operation cannot go on without their data."""
    return len(requests) < len(members) and next(iter(requests.values())).collective not in _EXCUSABLE


def agree(requests: Mapping[int, Request], members: Sequence[int]) -> Response:
    """The Response to the members' requests; one with an error if they contradict each other.

    Checks follow Horovod's order: dtype, operation, shape, scale factors, reduce operation, then what belongs to one
    collective, then device. The first that fails is reported, with the ranks on both sides.
    """
    first = requests[members[0]]
    if all(requests[rank] == first for rank in members):
        return Response(first, _rows(requests, members))
    for what, value in _CHECKS:
        if what == "root rank" and first.collective is not Collective.BROADCAST:
            continue
        if what in _REDUCTION_ONLY and first.collective not in REDUCTIONS:
            continue
        error = _difference(what, value, requests, members)
        if error:
            return Response(first, error=error)
    return Response(first, _rows(requests, members))


def _agreed_shapes(request: Request) -> tuple[tuple[int, ...], ...]:
    """The dimensions in which ranks must not differ."""
    skip = 1 if request.collective in _UNEVEN else 0
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
    ("ranks of the process set", lambda r: r.ranks),
    ("device type", lambda r: tuple(t.device for t in r.tensors)),
)
_UNEVEN = frozenset({Collective.ALLGATHER, Collective.ALLTOALL})
"""Collectives in which ranks' first dimensions may differ."""

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
    uneven = requests[members[0]].collective in _UNEVEN
    note = " (first dimensions may differ)" if what == "shape" and uneven else ""
    return f"{name}: ranks disagree about its {what}{note}: {sides}"


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
    first = requests[members[0]]
    if first.collective is not Collective.ALLGATHER:
        return ()
    count = len(first.tensors)
    return tuple(tuple(requests[rank].tensors[i].shape[0] for rank in members) for i in range(count))
