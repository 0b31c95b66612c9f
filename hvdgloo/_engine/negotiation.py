"""The coordinator's bookkeeping: which operation has been submitted where, and what the ranks agree upon.

Values in, values out: no clock, thread or socket. An operation is ready when every member of its process set has
submitted it, or has joined; it then takes its place in one total order over all process sets. Adding and removing sets,
and the end of a join, are operations of that order too.

What is known by number, as in a steady training step, is counted all at once (``readiness``). Everything else is looked
at one by one, as a ``PartialSubmission`` each: what is spelled out, carries a tensor's bytes or is observed, and all
operations while some ranks have joined. A number goes over to the second kind when it has to, and back when it has been
ordered.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from hvdgloo._engine import inline
from hvdgloo._engine.conventions import COORDINATOR
from hvdgloo._engine.messages import Execute, Offer, Request, Response, Submit
from hvdgloo._engine.partial_submissions import PartialSubmission, Requests
from hvdgloo._engine.readiness import BLOCK_BITS, Block, Ledger, Masks, bits_of, mask_of, numbers_of
from hvdgloo.types import Collective, ReduceOp

if TYPE_CHECKING:
    from hvdgloo._observe.lateness import LatenessBook


@dataclass(frozen=True)
class Waiting:
    """A pending operation as the stall report sees it."""

    name: str
    since: float
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass
class _Signature:
    """The agreement that a number stands for.

    Attributes:
        place: where it is counted: its block, and its bit there.
        countable: all members may submit it by its number, and it is the only kind of operation under its name.
    """

    response: Response
    requests: Requests
    place: tuple[Block, int]
    countable: bool


@dataclass
class _Batch:
    """The operations that have become ready since the last order was sent, in their order.

    Attributes:
        forgotten: numbers that stand for nothing any more.
        results: of tensors that travelled along, each with the position of its operation.
    """

    items: list[int | Response] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    results: list[tuple[int, bytes]] = field(default_factory=list)

    def combine(self, requests: Requests, payloads: Mapping[int, bytes], members: int, combined: int = 0) -> None:
        """Reduce the tensors that have travelled along with the next operation in the order, if all have.

        Args:
            combined: of how many ranks they are, if leaders have prescaled and combined them.
        """
        if (combined or len(payloads)) == len(requests):
            in_order = [payloads[rank] for rank in sorted(payloads)]
            result = inline.combine(requests[min(payloads)], in_order, members, prescale=not combined)
            if result:
                self.results.append((len(self.items), result))


class ProcessSets:
    """The process sets of a job by number. Numbers of removed sets are used again, in the order of removal.

    Attributes:
        members: the global ranks of each set.
        masks: the same as masks.
    """

    def __init__(self, members: Mapping[int, Sequence[int]]) -> None:
        self.members = {number: tuple(ranks) for number, ranks in members.items()}
        self.masks = {number: mask_of(ranks) for number, ranks in members.items()}
        self._next = max(members) + 1
        self._freed: deque[int] = deque()

    def change(self, response: Response) -> Response:
        """Add or remove a set as the ranks have agreed; return the Response with its number, or with an error."""
        ranks, wanted = response.request.ranks, response.request.number
        same = [number for number, members in self.members.items() if members == ranks]
        number = wanted if wanted in same else same[0] if same else -1
        if response.request.collective is Collective.ADD_PROCESS_SET:
            if same and (same != [0] or not wanted):
                text = f"there is a process set of {format_ranks(ranks)} already; use that one"
                return replace(response, error=text)
            number = wanted
            if not number or number in self.members:
                number = self._freed.popleft() if self._freed else self._next
            self._next = max(self._next, number + 1)
            self.members[number], self.masks[number] = ranks, mask_of(ranks)
            return replace(response, value=number)
        if number <= 0:
            return replace(response, error=f"there is no process set of {format_ranks(ranks)} that could be removed")
        del self.members[number], self.masks[number]
        self._freed.append(number)
        return replace(response, value=number)


class LateJoins:
    """Joins that are put off: what a rank submitted earlier comes first, including what it is being asked to spell out
    again."""

    def __init__(self) -> None:
        self._asked: Counter[int] = Counter()
        self._joins: dict[int, Request] = {}

    def count(self, rank: int, questions: int) -> None:
        """Note that a rank has been asked questions, or has answered some, if the number is negative."""
        self._asked[rank] += questions

    def put_off(self, rank: int, request: Request) -> bool:
        """Keep a join that has arrived; return False if it need not be put off."""
        if self._asked[rank]:
            self._joins[rank] = request
        return rank in self._joins

    def take(self, rank: int) -> Request | None:
        """Return a join that was put off, once nothing is in its way any more."""
        return self._joins.pop(rank) if self._joins and not self._asked[rank] and rank in self._joins else None


class Observer(Protocol):
    """An object that is notified of what happens to operations."""

    def arrived(self, rank: int, request: Request) -> None: ...
    def settled(self, request: Request, *, executed_here: bool) -> None: ...


class Negotiator:
    """Takes every rank's submissions and yields agreed Responses in order.

    Args:
        members: the global ranks of each process set by id, at the beginning; 0 is all ranks.
        capacity: how many signatures are remembered.

    Attributes:
        observer: told of arrivals and orders, if there is one.
        lateness: told which rank was last, if that is counted.
    """

    def __init__(self, members: Mapping[int, Sequence[int]], capacity: int) -> None:
        self._sets = ProcessSets(members)
        self._joined = 0  # ranks, as a mask
        self._late_joins = LateJoins()
        self.observer: Observer | None = None
        self.lateness: LatenessBook | None = None
        # Who is being heard, when, and how long the first of those for whom it speaks had waited for the last.
        self._speaker, self._now, self._waited = COORDINATOR, 0.0, 0.0
        self._capacity = capacity
        self._pending: dict[tuple[int, str], PartialSubmission] = {}
        self._ledger = Ledger()
        self._issued_to: dict[int, int] = {}  # by block, also of forgotten ones: the members of its set, as a mask
        self._payloads: dict[int, dict[int, bytes]] = {}  # of numbers that have begun, by rank
        self._batch = _Batch()
        self._signatures: OrderedDict[int, _Signature] = OrderedDict()
        self._named: dict[tuple[int, str], _Signature] = {}

    def absorb(self, rank: int, submission: Submit, now: float) -> list[int]:
        """File a rank's submission.

        Returns:
            numbers that no longer stand for anything; the rank must spell out these requests.
        """
        if self.lateness is not None:
            self._speaker, self._now, self._waited = rank, now, 0.0
        unknown = [] if self._count(rank, submission, now) else self._absorb_each(rank, submission, now)
        if unknown or submission.resent:
            self._late_joins.count(rank, bool(unknown) - submission.resent)
        for request in submission.requests:
            if self._file(1 << rank, request, now, submission.payload, by_number=False):
                self._compare_kinds(request)
        self._join_late(rank)
        return unknown

    def asks_back(self, ranks: int) -> None:
        """Note that ranks, given as a mask, will be asked to spell out requests, by way of the tree."""
        for rank in bits_of(ranks):
            self._late_joins.count(rank, 1)

    def was_answered(self, ranks: int) -> None:
        """Note that ranks have done so."""
        for rank in bits_of(ranks):
            self._late_joins.count(rank, -1)
            self._join_late(rank)

    def _join_late(self, rank: int) -> None:
        if (request := self._late_joins.take(rank)) is not None:
            self._join(rank, request)

    def absorb_whole(
        self, masks: Masks, now: float, last: int = -1, waited: float = 0.0
    ) -> list[tuple[int, list[int]]]:
        """File numbers that every member of their sets has submitted.

        Args:
            masks: the numbers.
            now: the present.
            last: the rank that was the last to submit them, where others had waited longest for it; -1 if that is
                not known.
            waited: for so many seconds.

        Returns:
            those that no longer stand for anything, with the ranks that must spell out these requests, as a mask.
        """
        self._speaker, self._now, self._waited = last, now, waited
        unknown: list[tuple[int, list[int]]] = []
        counts = not self._joined and self.observer is None
        has_counted = False
        for at, mask in masks:
            block = self._ledger.blocks.get(at)
            known = 0 if block is None else mask & block.used
            if mask != known:
                unknown.append((self._issued_to.get(at, 0), numbers_of(at, mask & ~known)))
            counted = known & block.open if counts and block is not None else 0
            self._order_numbers(numbers_of(at, counted))
            has_counted = has_counted or bool(counted)
            for number in numbers_of(at, known & ~counted):
                members = self._sets.masks[self._signatures[number].response.request.process_set]
                self._absorb_part(members, number, b"", now)
        if has_counted and self.lateness is not None and last >= 0:
            self.lateness.came_last(last, waited)
        return unknown

    def absorb_part(
        self,
        ranks: int,
        what: int | Request,
        payload: bytes,
        since: float,
        *,
        now: float | None = None,
        last: int = -1,
        waited: float = 0.0,
    ) -> bool:
        """File one operation for several ranks, given as a mask.

        Args:
            what: the operation's number, or what the ranks ask for.
            payload: the reduction of their tensors, prescaled, or nothing.
            since: when the first of them submitted it.
            now: the present; by default ``since``.
            last: which of the ranks was the last; by default the lowest.
            waited: how many seconds the first of them had waited for it.

        Returns:
            False if the number no longer stands for anything; nothing was filed then.
        """
        if last < 0 or not ranks >> last & 1:
            last = (ranks & -ranks).bit_length() - 1
        self._speaker, self._now, self._waited = last, since if now is None else now, waited
        return self._absorb_part(ranks, what, payload, since)

    def _absorb_part(self, ranks: int, what: int | Request, payload: bytes, since: float) -> bool:
        if isinstance(what, int):
            signature = self._signatures.get(what)
            if signature is None or ranks & ~signature.requests.ranks:
                return False
            groups = signature.requests.groups(ranks)
        else:
            groups = [(what, ranks)]
        for request, same in groups:
            if self._file(same, request, since, payload, by_number=isinstance(what, int), combined=True):
                self._compare_kinds(request)
        return True

    def _count(self, rank: int, submission: Submit, now: float) -> bool:
        """File a submission's numbers without looking at each.

        Returns:
            False if that cannot be done; nothing has been filed then.
        """
        numbers = submission.signatures
        if not numbers:
            return True
        if self._joined or self.observer is not None:
            return False
        if len(numbers) + len(submission.requests) == 1:
            # While others wait, it may be of another kind than what they wait for.
            return not self._pending and self._count_one(rank, numbers[0], submission.payload, now)
        complete = None if submission.payload else self._ledger.announce(rank, submission.masks, now)
        if complete is None:
            return False
        if self.lateness is not None:
            for block in [self._ledger.blocks[at] for at, mask in complete if mask]:
                if len(block.sources) > 1:
                    self.lateness.came_last(rank, now - block.completed_since)
        if complete != submission.masks:
            done = {number for at, mask in complete if mask for number in numbers_of(at, mask)}
            numbers = tuple([number for number in numbers if number in done]) if done else ()
        self._order_numbers(numbers)
        return True

    def _count_one(self, rank: int, number: int, payload: bytes, now: float) -> bool:
        """As ``_count``, for a single number with a tensor's bytes, if there are any."""
        signature = self._signatures.get(number)
        if signature is None:
            return False
        block, bit = signature.place
        if not block.open & bit or rank not in block.sources:
            return False
        if payload:
            self._payloads.setdefault(number, {})[rank] = payload
        if block.announce(rank, bit, now):
            if self.lateness is not None and len(block.sources) > 1:
                self.lateness.came_last(rank, now - block.completed_since)
            self._order_numbers((number,))
        return True

    def _absorb_each(self, rank: int, submission: Submit, now: float) -> list[int]:
        """As ``absorb``, for the numbers of a submission."""
        unknown = []
        counts = not (submission.payload or self._joined or self.observer is not None)
        alone = len(submission.signatures) + len(submission.requests) == 1
        for number in submission.signatures:
            if counts and not alone and self._count_one(rank, number, b"", now):
                continue
            signature = self._signatures.get(number)
            if signature is None or rank not in signature.requests:
                unknown.append(number)
                continue
            request = signature.requests[rank]
            if self._file(1 << rank, request, now, submission.payload, by_number=True) and alone:
                self._compare_kinds(request)
        return unknown

    def _order_numbers(self, numbers: Sequence[int]) -> None:
        """All members have submitted these: give them their places in the order."""
        items = self._batch.items
        for number in numbers:
            self._signatures.move_to_end(number)
            if number in self._payloads:
                signature = self._signatures[number]
                self._batch.combine(signature.requests, self._payloads.pop(number), len(signature.requests))
            items.append(number)

    def take(self) -> Execute:
        """Return what became ready since the last call, in order, and the signatures that were forgotten since."""
        batch, self._batch = self._batch, _Batch()
        return Execute(tuple(batch.items), tuple(batch.forgotten), tuple(batch.results))

    def responses(self, items: Iterable[int | Response]) -> list[Response]:
        """Spell out what was just taken, without numbers that are no longer known."""
        return [
            self._signatures[item].response if isinstance(item, int) else item
            for item in items
            if not isinstance(item, int) or item in self._signatures
        ]

    @property
    def has_ready(self) -> bool:
        return bool(self._batch.items)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending) or self._ledger.busy

    @property
    def joined(self) -> int:
        """The ranks that have joined, and wait for the others to do so, as a mask."""
        return self._joined

    def keys_of(self, submission: Submit) -> set[tuple[int, str]]:
        """Return the operations that a submission is for, without numbers that stand for nothing."""
        known = [response.request for response in self.responses(submission.signatures)]
        return {request.key for request in (*submission.requests, *known)}

    def ranks_of(self, key: tuple[int, str]) -> int:
        """Return the ranks, as a mask, that have submitted an operation which others have not."""
        signature = self._named.get(key)
        if signature is not None and signature.place[0].begun & signature.place[1]:
            self._withdraw(*signature.place)
        return self._pending[key].requests.ranks if key in self._pending else 0

    def absorb_offer(self, rank: int, offer: Offer, now: float) -> None:
        """File what a rank has offered as its submission."""
        signature = self._signatures.get(offer.number)
        # The number of a call with an automatic name stands for an earlier one.
        by_number = signature is not None and signature.requests.get(rank) == offer.request
        self.absorb(rank, Submit((offer.number,)) if by_number else Submit((), (offer.request,)), now)

    def oldest(self) -> float | None:
        """Since when the operation is pending that has been so for longest; None if there is none."""
        times = [pending.since for pending in self._pending.values()]
        times += [time for block in self._ledger.blocks.values() if (time := block.oldest) is not None]
        return min(times, default=None)

    def waiting(self) -> list[Waiting]:
        """Operations that some member has not submitted, oldest first."""
        report = []
        for (process_set, name), pending in self._pending.items():
            came = pending.requests
            away = came.ranks | (self._joined if pending.excuses else 0)
            missing = [rank for rank in self._sets.members[process_set] if not away >> rank & 1]
            report.append(Waiting(name, pending.since, tuple(came), tuple(missing)))
        for number, since, announced, missing in self._ledger.waiting():
            name = self._signatures[number].response.request.name
            report.append(Waiting(name, since, tuple(announced), tuple(missing)))
        return sorted(report, key=lambda waiting: waiting.since)

    def _file(
        self, ranks: int, request: Request, since: float, payload: bytes, *, by_number: bool, combined: bool = False
    ) -> bool:
        """Note that ranks, given as a mask, have submitted one operation.

        Args:
            combined: the payload is the reduction of the ranks' tensors, prescaled.

        Returns:
            whether others wait for an operation of another kind under its name, so that it may never be ready.
        """
        key = request.key
        pending = self._pending.get(key)
        if pending is None:
            if request.process_set not in self._sets.members:
                return False  # the set was removed while this was on its way; the ranks have been told
            if request.collective is Collective.JOIN:
                for rank in bits_of(ranks):
                    if not self._late_joins.put_off(rank, request):
                        self._join(rank, request)
                return False
            pending = self._open(request, since)
        pending.since = min(pending.since, since)
        self._add(pending, ranks, request, by_number=by_number)
        if payload:
            pending.add_payload(ranks, payload, combined=combined)
        if not pending.missing:
            self._order(key, pending)
            return False
        return pending.contested

    def _open(self, request: Request, now: float) -> PartialSubmission:
        """Look at an operation by itself from now on, until it is ordered."""
        key = request.key
        signature = self._named.get(key)
        if signature is not None:
            self._withdraw(*signature.place)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._begin(request, now)
            if signature is None or not signature.countable:
                pending.contested = self._has_rivals(request)
        return pending

    def _withdraw(self, block: Block, mask: int) -> None:
        """Look at these numbers one by one from now on, until they are ordered."""
        for number, since, announced in block.withdraw(mask):
            requests = self._signatures[number].requests
            pending = self._begin(requests.shared, since)
            pending.payloads = self._payloads.pop(number, None)
            for request, same in requests.groups(mask_of(announced)):
                self._add(pending, same, request, by_number=True)

    def _add(self, pending: PartialSubmission, ranks: int, request: Request, *, by_number: bool) -> None:
        if self.observer is not None:
            for rank in bits_of(ranks):
                self.observer.arrived(rank, request)
        pending.add(ranks, request, self._joined, by_number=by_number)

    def _begin(self, request: Request, since: float) -> PartialSubmission:
        members = self._sets.masks[request.process_set]
        pending = self._pending[request.key] = PartialSubmission(request, since, members.bit_count())
        if self._joined and pending.excuses:
            pending.missing = (members & ~self._joined).bit_count()
        return pending

    def _has_rivals(self, request: Request) -> bool:
        """Return whether there are operations of other kinds under a request's name. From now on they are looked at one
        by one, and compared."""
        rivals = [key for key in request.other_kinds if key in self._named or key in self._pending]
        for key in rivals:
            signature = self._named.get(key)
            if signature is not None:
                signature.countable = False
                self._withdraw(*signature.place)
            pending = self._pending.get(key)
            if pending is not None:
                pending.contested = True
        return bool(rivals)

    def _compare_kinds(self, request: Request) -> None:
        """Fail operations of several kinds under one name if no rank waits for two of them: they would wait for ever.

        As long as ranks submit their operations in one order, a rank that has submitted the second of two has also
        submitted the first, which is therefore not pending or not missing here. Called for what is new, or comes alone;
        not for the many known operations of a training step, which would pay for it each time.
        """
        parts = {key: self._pending[key] for key in (request.key, *request.other_kinds) if key in self._pending}
        text = _disagreement(parts, self._sets.masks[request.process_set] & ~self._joined)
        if not text:
            return
        for key, part in parts.items():
            del self._pending[key]
            self._batch.items.append(Response(part.requests.shared, error=text))
            if self.observer is not None:
                self.observer.settled(part.requests.shared, executed_here=False)

    def _order(self, key: tuple[int, str], pending: PartialSubmission) -> None:
        """Every member has submitted it: give it its place in the order."""
        del self._pending[key]
        members = self._sets.members[key[0]]
        signature = self._named.get(key)
        item: int | Response
        if signature and pending.by_number == len(pending.requests) and not _lacks(pending.requests, members):
            number = signature.response.signature
            self._signatures.move_to_end(number)
            if signature.countable:
                self._ledger.reopen(number)
            item, failed = number, False
        else:
            item = self._settle(key, pending.requests, members)
            failed = bool(item.error)
        if self.observer is not None:
            self.observer.settled(pending.requests.shared, executed_here=not failed and COORDINATOR in members)
        if self.lateness is not None and len(members) > 1:
            self.lateness.came_last(self._speaker, max(self._now - pending.since, self._waited))
        if pending.payloads is not None and not failed:
            self._batch.combine(pending.requests, pending.payloads, len(members), pending.combined)
        self._batch.items.append(item)

    def _join(self, rank: int, request: Request) -> None:
        """A rank has no more data. When all have said so, all go on, and learn which was last."""
        for block in self._ledger.blocks.values():
            self._withdraw(block, block.begun)
        if not self._joined >> rank & 1:
            self._joined |= 1 << rank
            for (process_set, _), pending in self._pending.items():
                if pending.excuses and self._sets.masks[process_set] >> rank & 1 and rank not in pending.requests:
                    pending.missing -= 1
        # Also when it is the last: operations that it submitted before, and that others will not submit, go on without
        # them.
        for key, pending in list(self._pending.items()):
            if not pending.missing:
                self._order(key, pending)
        if self._joined == self._sets.masks[0]:
            self._joined = 0
            self._batch.items.append(Response(request, value=rank))

    def _settle(self, key: tuple[int, str], requests: Requests, members: Sequence[int]) -> Response:
        """Spell out a Response, and remember it under a new number if it may come again."""
        old = self._named.pop(key, None)
        if old is not None:
            # Members replace it when they see the new Response; no rank sends it again.
            self._forget(old.response.signature)
        response = _agreement(requests, members, self._joined)
        if response.request.collective.changes_sets:
            return response if response.error else self._change_sets(response)
        if response.error or self._capacity == 0:
            return response
        number = self._ledger.issue(key[0])
        place = self._ledger.learn(number, key[0], self._sets.members[key[0]])
        self._issued_to.setdefault(number >> BLOCK_BITS, self._sets.masks[key[0]])
        response = Response(response.request, response.rows, "", number)
        countable = len(requests) == len(members) and not self._has_rivals(response.request)
        if not countable:
            self._withdraw(*place)
        self._signatures[number] = self._named[key] = _Signature(response, requests, place, countable)
        if len(self._signatures) > self._capacity:
            evicted, signature = next(iter(self._signatures.items()))
            self._withdraw(*signature.place)
            del self._named[signature.response.request.key]
            self._forget(evicted)
        return response

    def _forget(self, number: int) -> None:
        del self._signatures[number]
        self._payloads.pop(number, None)
        self._ledger.forget(number)
        self._batch.forgotten.append(number)

    def _change_sets(self, response: Response) -> Response:
        response = self._sets.change(response)
        if response.request.collective is Collective.REMOVE_PROCESS_SET and not response.error:
            # Its pending operations are ended by the ranks themselves, since every rank is told of the removal.
            self._pending = {key: pending for key, pending in self._pending.items() if key[0] != response.value}
            for key in [key for key in self._named if key[0] == response.value]:
                self._forget(self._named.pop(key).response.signature)
            self._ledger.drop_set(response.value)
        return response


def _disagreement(parts: Mapping[tuple[int, str], PartialSubmission], members: int) -> str:
    """Return the error of operations of several kinds under one name; "" if some member may still submit one of them.

    Args:
        members: the members of the process set that have not joined, as a mask.
    """
    submitted = 0
    for part in parts.values():
        if submitted & part.requests.ranks:
            return ""  # by a rank that waits for two of them
        submitted |= part.requests.ranks
    if len(parts) < 2 or members & ~submitted:
        return ""
    kinds = [parts[key].requests for key in sorted(parts)]
    request = kinds[0].shared
    sides = "; ".join(f"{requests.shared.kind} on {format_ranks([*requests])}" for requests in kinds)
    return f"{request.name[len(request.kind) + 1 :]}: ranks disagree about the kind of collective: {sides}"


def _agreement(requests: Requests, members: Sequence[int], joined: int) -> Response:
    """Return the Response to the requests of all members that have not joined.

    Args:
        joined: ranks that have, as a mask.
    """
    if requests.others:
        response = agree(requests, [rank for rank in members if rank in requests])
    else:
        response = Response(requests.shared, _rows(requests, [*requests]))
    if not response.error and _lacks(requests, members):
        away = format_ranks(bits_of(joined))
        text = f"{response.request.name}: {away} called join(), which only allreduce and barrier allow"
        response = Response(response.request, error=text)
    return response


def _lacks(requests: Requests, members: Sequence[int]) -> bool:
    """True if members have joined and the operation cannot go on without their data."""
    return len(requests) < len(members) and not requests.shared.collective.excusable


def agree(requests: Mapping[int, Request], members: Sequence[int]) -> Response:
    """The Response to the members' requests; one with an error if they contradict each other.

    Checks follow Horovod's order: dtype, operation, shape, scale factors, reduce operation and wire format, then what
    belongs to one collective, then device. The first that fails is reported, with the ranks on both sides.
    """
    first = requests[members[0]]
    if all(requests[rank] == first for rank in members):
        return Response(first, _rows(requests, members))
    for what, value in _CHECKS:
        if what == "root rank" and not first.collective.has_root:
            continue
        if what in _REDUCTION_ONLY and not first.collective.reduces:
            continue
        error = _difference(what, value, requests, members)
        if error:
            return Response(first, error=error)
    return Response(first, _rows(requests, members))


def _agreed_shapes(request: Request) -> tuple[tuple[int, ...], ...]:
    """The dimensions in which ranks must not differ."""
    skip = 1 if request.collective.sized_late else 0
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
    ("wire format", lambda r: r.wire),
    ("root rank", lambda r: r.root),
    ("ranks of the process set", lambda r: r.ranks),
    ("device type", lambda r: tuple(t.device for t in r.tensors)),
)
_REDUCTION_ONLY = frozenset({"prescale factor", "postscale factor", "reduce operation", "wire format"})


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
    uneven = requests[members[0]].collective.sized_late
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
