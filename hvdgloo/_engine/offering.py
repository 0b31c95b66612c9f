"""Carries out what ``offers`` decides, in the thread that waits for the operation: no thread is woken, no socket used.

The thread holds ``_attending`` while it is at the memory of the data plane, so that this is not taken away. An offer
whose thread was interrupted stays, and its rank's next operation completes it: other ranks may have done so already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from hvdgloo._backends.base import Lane
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import Offer
from hvdgloo._engine.offers import PLACES, OwnOffer, suits
from hvdgloo._engine.submission import Submission
from hvdgloo._observe.counters import Counters, Traffic
from hvdgloo._platform import interrupts
from hvdgloo.types import Collective

_GRACE_SECONDS = 0.0002
"""Seconds that a rank sleeps, before it tells rank 0 of its offer: ranks that call at the same time answer within that,
and rank 0 would have nothing to do with it."""

_LOOK_SECONDS = 0.5
"""The longest sleep, in seconds: a Ctrl-C between the last look for one and the system call wakes no thread."""


class Offers:
    """One rank's offers.

    Args:
        lane: memory that all ranks see.
        rank, size: this rank, and the number of ranks.
        tell: has rank 0 told of an offer that is due.
        otherwise: waits for an operation that is no longer offered.
        label: name of the data plane in totals.
        counters: of this process, if it counts.
    """

    def __init__(
        self,
        lane: Lane,
        rank: int,
        size: int,
        member: Member,
        tell: Callable[[], None],
        otherwise: Callable[[Handle], None],
        label: str,
        counters: Counters | None,
    ) -> None:
        self._lane, self._rank, self._size, self._member = lane, rank, size, member
        self._tell, self._otherwise = tell, otherwise
        self._label, self._counters = label, counters
        self._traffic: Traffic | None = None
        self._attending, self._looking = threading.Lock(), threading.Lock()
        self._closed = False

    def launch(self, submission: Submission) -> bool:
        """Offer an operation that the calling thread is about to wait for, and complete it if all ranks do so at once.

        Returns:
            False if it has to be submitted.
        """
        persistent = submission.persistent.template or submission.persistent
        if persistent.may_be_offered is None:
            persistent.may_be_offered = suits(submission.request, self._lane.most_bytes)
        if not persistent.may_be_offered or submission.ready is not None:
            return False
        if not self._attending.acquire(blocking=False):
            return False
        try:
            self._settle()
            own = self._member.offer(submission) if self._lane.open() else None
            if own is None:
                return False
            submission.handle.before_waiting = self.attend
            began = submission.submitted or time.monotonic()
            request = submission.request
            sends = submission.inputs and request.root in (-1, self._rank)
            self._lane.post(own.place, own.word, submission.inputs[0] if sends else None, request.prescale, began)
            if not self._lane.watch(own.place, own.word):
                self._lane.sleep(own.place, own.word, _GRACE_SECONDS)
            if self._lane.is_whole(own.place, own.word):
                self._complete(own)
                if self._counters is not None and self._counters.blocked_in is None:
                    self._counters.waiting += submission.handle.ended - began
                return True
            own.is_due = True
        finally:
            self._attending.release()
        self._tell()
        return True

    def attend(self, handle: Handle) -> None:
        """Wait for an operation that was offered, in the calling thread. Returns before it has ended if it was ordered,
        and is being carried out elsewhere.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the offer stays.
        """
        handle.add_done_callback(self._ring)
        is_offered = True
        while is_offered and not handle.done() and not self._closed:
            held = interrupts.hold()
            try:
                # A Ctrl-C that a caller holds back is raised by that caller, later.
                is_offered = self._attend(handle, may_be_interrupted=held is not None)
            finally:
                interrupts.release(held)
        if not handle.done():
            self._otherwise(handle)

    def _attend(self, handle: Handle, *, may_be_interrupted: bool) -> bool:
        """Return False if the operation is not offered any more; True if it has ended, Ctrl-C was pressed, or another
        thread is at the lane."""
        if not self._attending.acquire(timeout=_LOOK_SECONDS):
            return True
        try:
            while not (handle.done() or self._closed or (may_be_interrupted and interrupts.pending())):
                own = self._member.own_offer
                if own is None or own.operation.handle is not handle:
                    return False
                if self._lane.is_whole(own.place, own.word):
                    self._complete(own)
                else:
                    self._lane.sleep(own.place, own.word, _LOOK_SECONDS, partial(self._is_no_longer, own))
        finally:
            self._attending.release()
        return True

    def _is_no_longer(self, own: OwnOffer) -> bool:
        return self._member.own_offer is not own

    def settle(self) -> None:
        """Complete what all ranks have offered, if no thread of this rank is at it; callable from any thread."""
        if self._attending.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._attending.release()

    def _settle(self) -> None:
        own = self._member.own_offer
        if not self._closed and own is not None and self._lane.is_whole(own.place, own.word):
            self._complete(own)

    @property
    def certain(self) -> OwnOffer | None:
        """This rank's offer, if all ranks have made it: it cannot fail any more. For the engine, before ``close``."""
        own = None if self._closed else self._member.own_offer
        return own if own is not None and self._lane.is_whole(own.place, own.word) else None

    def has_ended(self, offer: Offer) -> bool:
        """Rank 0: return whether all ranks have made an offer, which its thread may not yet have completed."""
        member = self._member
        with self._looking:
            if self._closed or member.turn > offer.turn:
                return True
            whole = self._lane.is_whole(offer.turn % PLACES, offer.word)
        return whole or member.turn > offer.turn  # another offer may be there by now

    def close(self, timeout: float) -> bool:
        """Have no thread use the lane any more, once all handles have been resolved.

        Args:
            timeout: seconds.

        Returns:
            False if a thread does not end.
        """
        ended = self._attending.acquire(timeout=timeout)
        with self._looking:
            self._closed = True  # and the other lock is kept: nothing is offered from now on
        return ended

    def _complete(self, own: OwnOffer) -> None:
        """Compute the result, and end the operation."""
        operation = own.operation
        request, lane = operation.request, self._lane
        collective = request.collective
        lane.adapt(own.place)
        if collective.reduces:
            lane.combine(own.place, operation.outputs[0], request.combining, request.factor_after(self._size))
        elif collective is Collective.BROADCAST:
            lane.copy(own.place, [request.root], operation.outputs[0])
        elif collective is Collective.ALLGATHER:
            operation.outputs = [operation.allocated(0, request.tensors[0].shape[0] * self._size)]
            lane.copy(own.place, range(self._size), operation.outputs[0])
        if self._counters is not None:
            operation.handle.ordered = operation.handle.ended = time.monotonic()
        if self._member.complete(own):
            if self._counters is not None:
                self._count(own, self._counters)
            operation.handle.resolve(operation.outputs)

    def _count(self, own: OwnOffer, counters: Counters) -> None:
        operation = own.operation
        counters.negotiation += operation.handle.ended - operation.submitted
        traffic = self._traffic
        if traffic is None:
            traffic = self._traffic = counters.carried(self._label, 0)
        traffic.operations += 1
        traffic.bytes += sum(output.nbytes for output in operation.outputs)
        if counters.lateness is not None:
            counters.lateness.came_last(*self._lane.arrivals(own.place))

    def _ring(self, _: Handle) -> None:
        self._lane.ring()
