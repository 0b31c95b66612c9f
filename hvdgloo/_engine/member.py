"""Each rank's side of the control plane: what it has submitted, and what the coordinator's numbers stand for.

The queue of pending operations is shared between the submitting threads and the control thread; everything else here
belongs to the control thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hvdgloo._engine import inline, neutral_tensors
from hvdgloo._engine.messages import Execute, Offer, Request, Response, Submit, Tune
from hvdgloo._engine.offers import OwnOffer, is_even, word_of
from hvdgloo._engine.submission import Signature, Submission
from hvdgloo._observe.counters import AGREEMENT, Counters, Traffic
from hvdgloo.errors import DuplicateNameError, HorovodInternalError, InvalidArgumentError, MismatchError
from hvdgloo.types import Collective

if TYPE_CHECKING:
    from hvdgloo._engine.timeline import Timeline, Timelines

_RETRY = 64
"""An operation that was offered and then ordered, say since some rank always submits it without waiting, is offered
again when the number of those that have ended is a multiple of this, which it is on all ranks at once."""


class Member:
    """This rank's pending operations.

    Args:
        rank: this rank.
        members: the global ranks of each process set by id, at the beginning; 0 is all ranks.
        inline_threshold: bytes up to which a single operation's tensor travels with its submission.
        counters: of this process, if it counts.

    Attributes:
        sets: the process sets after everything accepted so far; this rank may be in some of them.
        timeline: where the times of operations are recorded, if anywhere.
        own_offer: what this rank offers at present; None for nothing.
        turn: number of offers that have been completed.
    """

    def __init__(
        self,
        rank: int,
        members: Mapping[int, Sequence[int]],
        inline_threshold: int,
        counters: Counters | None = None,
    ) -> None:
        self.sets = {number: tuple(ranks) for number, ranks in members.items()}
        self.timeline: Timeline | Timelines | None = None
        self.own_offer: OwnOffer | None = None
        self.turn = 0
        self._rank = rank
        self._own_sets = {number for number, ranks in self.sets.items() if rank in ranks}
        self._joined = False
        self._ordered = 0  # items in all messages so far, which every rank receives
        self._inline_threshold = inline_threshold
        self._counters = counters
        self._agreed_upon: dict[int, Traffic] = {}
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, str], Submission] = {}
        self._new: list[Submission] = []
        self._orphans: list[Submission] = []
        self._closed: HorovodInternalError | None = None
        # The current agreements, by number, and by the name under which this rank submits them.
        self._signatures: dict[int, Signature] = {}
        self._agreed: dict[tuple[int, str], Signature] = {}
        self._templates: dict[Request, Signature] = {}  # of calls with automatic names

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def oldest_pending(self) -> tuple[str, float]:
        """Name of the oldest operation that waits for other ranks, and when it was submitted; an empty name if there
        is none. Callable from any thread."""
        with self._lock:
            for operation in self._pending.values():
                return operation.request.name, operation.submitted
        return "", 0.0

    @property
    def closed(self) -> HorovodInternalError | None:
        """The reason why nothing may be submitted any more; None while the engine runs."""
        return self._closed

    def add(self, operation: Submission) -> tuple[int, bool]:
        """File an operation; callable from any thread.

        Returns:
            how many were filed since the last ``drain``, this one included, and whether some drained earlier are still
            to be agreed upon.

        Raises:
            DuplicateNameError: the name is pending. Nothing of this operation was filed.
            InvalidArgumentError: the process set does not exist (any more), or this rank is not in it.
            HorovodInternalError: the engine has ended.
        """
        key = operation.request.key
        if self.timeline is not None:
            operation.times = (self.timeline.now(),)
        with self._lock:
            if self._closed is not None:
                self._closed.operation = self._closed.operation or key[1]
                raise self._closed.with_traceback(None)
            if key[0] not in self._own_sets:
                # It existed when the operation was checked, and has been removed since.
                raise InvalidArgumentError(f"{key[1]}: there is no process set {key[0]} with rank {self._rank}")
            if key in self._pending:
                raise DuplicateNameError(
                    f"{key[1]} is already in flight on this rank; wait for the first one, or give each its own name",
                    name=key[1],
                )
            if operation.request.collective is Collective.JOIN:
                self._joined = True
            self._pending[key] = operation
            self._new.append(operation)
            if self._counters is not None:
                self._count(operation, self._counters)
            return len(self._new), len(self._pending) > len(self._new)

    @staticmethod
    def _count(operation: Submission, counters: Counters) -> None:
        operation.submitted = counters.latest = now = time.monotonic()
        if not counters.first:
            counters.first = now
        if counters.asleep:
            counters.wake()

    def offer(self, operation: Submission) -> OwnOffer | None:
        """File an operation that this rank offers; callable from any thread.

        Returns:
            None if it has to be submitted instead; nothing was done then. That is so while anything else waits for
            other ranks, a join above all: rank 0 relies on a rank that waits for something to offer nothing else. It is
            so during a timeline, too, which shows what rank 0 sees.
        """
        key = operation.request.key
        with self._lock:
            if self._closed is not None or self._pending or self.timeline is not None:
                return None
            persistent, template = operation.persistent, operation.persistent.template
            known = template or persistent
            signature = known.signature
            if signature is None or signature.number < 0:
                signature = self._agreed.get(key) if template is None else self._templates.get(template.request)
                if signature is None or signature.request != known.request:
                    return None
                known.signature = signature
            if (signature.was_declined and signature.ended % _RETRY) or not is_even(signature.response):
                return None
            number = signature.number  # the control thread may forget it at any moment
            word = word_of(number, signature.ended if template is None else persistent.instance)
            if not word:
                return None
            self._pending[key] = operation
            if self._counters is not None:
                self._count(operation, self._counters)
            own = self.own_offer = OwnOffer(operation, signature, number, word, self.turn)
            return own

    def take_offer(self) -> Offer | None:
        """Return what is to be said to rank 0 about this rank's offer; None for nothing. To be called after ``drain``
        and sent before what that returned: rank 0 has to know of an offer before a join."""
        own = self.own_offer
        if own is None or own.is_told or not (own.is_due or self._joined):
            return None
        own.is_told = True
        return own.message

    def complete(self, own: OwnOffer) -> bool:
        """Note that all ranks have made this rank's offer; callable from any thread.

        Returns:
            False if the operation has failed meanwhile.
        """
        with self._lock:
            if self.own_offer is not own:
                return False
            self.own_offer = None
            del self._pending[own.operation.request.key]
            own.signature.ended += 1
            own.signature.was_declined = False
            self.turn += 1
            return True

    def tune(self, settings: Tune) -> None:
        """Use other settings from now on. Ranks need not agree on what travels with submissions: if some tensor does
        not, the others are not used."""
        self._inline_threshold = settings.inline_threshold

    def drain(self, *, idle: bool = True) -> Submit | None:
        """The operations filed since the last call.

        Args:
            idle: nothing is being executed on this rank.
        """
        if not self._new:
            return None
        with self._lock:
            new, self._new = self._new, []
        numbers: list[int] = []
        requests: list[Request] = []
        for operation in new:
            persistent = operation.persistent
            signature = persistent.signature
            if signature is None or signature.number < 0:
                signature = self._agreed.get(operation.request.key)
                if signature is None or signature.request != operation.request:
                    requests.append(operation.request)
                    continue
                persistent.signature = signature
            operation.number = signature.number
            numbers.append(signature.number)
        return Submit(tuple(numbers), tuple(requests), self._payload(new) if idle else b"")

    def _payload(self, new: Sequence[Submission]) -> bytes:
        # Only for an operation that is alone. Operations of a training step are fused; one by one they would load rank
        # 0.
        if len(new) > 1 or len(self._pending) > 1 or new[0].ready is not None:
            return b""
        if not inline.suits(new[0].request, self._inline_threshold):
            return b""
        return inline.payload(new[0].inputs[0])

    def resend(self, numbers: Sequence[int]) -> Submit:
        """Spell out requests whose numbers the coordinator had forgotten before they arrived."""
        forgotten = frozenset(numbers)
        with self._lock:
            operations = [operation for operation in self._pending.values() if operation.number in forgotten]
        for operation in operations:
            operation.number = -1
        return Submit((), tuple(operation.request for operation in operations), resent=True)

    def accept(self, message: Execute, now: float = 0.0) -> list[tuple[Response, Submission]]:
        """The operations to execute, in order. Those whose result is already known, or is an error, end here.

        Args:
            now: when they are ordered, on the monotonic clock; only what is counted depends on it.
        """
        batch = []
        results = dict(message.results)
        with self._lock:
            agreed = [self._pop(item) for item in message.items]
            orphans, self._orphans = self._orphans, []
        for orphan in orphans:
            text = f"the process set of {orphan.request.name} was removed before all members had submitted it"
            orphan.handle.resolve(error=InvalidArgumentError(text))
        # Forgotten last: an operation that was ordered in this message may have been forgotten right after.
        for number in message.forgotten:
            self._forget(number)
        before = self._ordered
        self._ordered += len(agreed)
        counters = self._counters
        waited = 0.0
        for position, (response, operation) in enumerate(agreed):
            if operation is None:
                continue
            handle = operation.handle
            handle.order = before + position
            submitted = operation.submitted
            if submitted:
                handle.ordered = now
                if now > submitted:  # or it came while what was read at that moment was being looked at
                    waited += (now - submitted) * operation.remaining
            if response.error:
                handle.resolve(error=MismatchError(response.error, name=operation.request.name))
            elif position in results:
                inline.deliver(results[position], operation.outputs[0])
                if self.timeline is not None:
                    self.timeline.inlined(response, operation)
                if counters is not None:
                    number = response.request.process_set
                    traffic = self._agreed_upon.get(number) or self._agreed_upon_in(number, counters)
                    traffic.operations += 1
                    traffic.bytes += len(results[position])
                    handle.ended = now
                handle.resolve(operation.outputs)
            else:
                batch.append((response, operation))
        if counters is not None:
            counters.negotiation += waited
        return batch

    def close(self, error: HorovodInternalError, spared: OwnOffer | None = None) -> list[Submission]:
        """Refuse further operations with ``error``; returns those that were not ordered, for the caller to fail.

        Args:
            spared: an offer that all ranks have made, which is still to be completed here.
        """
        with self._lock:
            if self._closed is None:
                self._closed = error
            pending, self._pending = self._pending, {}
            self._new.clear()
            if spared is not None and self.own_offer is spared:
                key = spared.operation.request.key
                self._pending[key] = pending.pop(key)
            else:
                self.own_offer = None
        return list(pending.values())

    def _agreed_upon_in(self, process_set: int, counters: Counters) -> Traffic:
        """Return the counter for operations of a process set whose results arrive with the order."""
        traffic = self._agreed_upon[process_set] = counters.carried(AGREEMENT, process_set)
        return traffic

    def _forget(self, number: int) -> None:
        signature = self._signatures.pop(number, None)
        if signature is not None and signature.number == number:
            signature.number = -1
            key = signature.response.request.key
            if self._agreed.get(key) is signature:
                del self._agreed[key]
            if signature.request is not None and self._templates.get(signature.request) is signature:
                del self._templates[signature.request]

    def _pop(self, item: int | Response) -> tuple[Response, Submission | None]:
        """An item's Response, and this rank's part in it: None if this rank is not in the process set."""
        if isinstance(item, int):
            signature = self._signatures[item]
            signature.ended += 1
            response = signature.response
            request = response.request
            operation = self._pending.pop(request.key, None)
        else:
            response, request = item, item.request
            operation = self._pending.pop(request.key, None)
            if response.error:
                # A rank that gets the error may offer the operation again before another one has read this.
                for signature in self._signatures.values():
                    if signature.response.request.key == request.key:
                        signature.ended += 1
            if response.signature >= 0:
                self._remember(response, operation)
            if not response.error:
                self._change_sets(response)
        own = self.own_offer
        if own is not None and own.operation is operation:
            own.signature.was_declined = True
            self.own_offer = None
        if request.collective is Collective.JOIN:
            self._joined = False
            self._forget_templates()
        elif operation is None and self._joined and request.process_set in self._own_sets:
            operation = neutral_tensors.stand_in(request)
        return response, operation

    def _remember(self, response: Response, operation: Submission | None) -> None:
        number = response.signature
        template = None if operation is None else operation.persistent.template
        if template is not None:
            signature = self._templates.get(template.request)
            if signature is None:
                signature = self._templates[template.request] = Signature(number, response, template.request)
            # All calls have one signature, under the number that will be forgotten last.
            signature.number, signature.response = number, response
            signature.ended += 1
            self._signatures[number] = template.signature = signature
            return
        request = None if operation is None else operation.request
        signature = self._signatures[number] = Signature(number, response, request)
        if operation is not None:
            self._agreed[response.request.key] = signature
            operation.persistent.signature = signature

    def _forget_templates(self) -> None:
        """Have calls with automatic names spelled out again: after a join, those are counted from 1, and the words of
        their offers must not be given twice."""
        for signature in self._templates.values():
            signature.number = -1
        self._templates.clear()

    def _change_sets(self, response: Response) -> None:
        request = response.request
        if request.collective is Collective.ADD_PROCESS_SET:
            self.sets[response.value] = request.ranks
            if self._rank in request.ranks:
                self._own_sets.add(response.value)
        elif request.collective is Collective.REMOVE_PROCESS_SET:
            del self.sets[response.value]
            self._own_sets.discard(response.value)
            orphaned = [key for key in self._pending if key[0] == response.value]
            self._orphans += [self._pending.pop(key) for key in orphaned]
