"""Offers: small operations of one host's ranks that need no order from rank 0.

A rank whose only operation is a small one that it waits for *offers* it: it puts its data and one word, which says what
is offered, into memory that all ranks see. An offer is never taken back, so "all ranks have offered this"
only ever becomes true. Each rank that sees it computes the result for itself; rank 0 is not asked.

A rank that waits for longer also tells rank 0, which *holds* the offer (``held_offers``). If rank 0 hears that some
rank will not offer that operation (it submitted it without an offer, or joined), then no rank will ever see the offer
of all, and rank 0 takes the offers that it holds for ordinary submissions. In any other case it orders nothing.

The word holds the signature's number, and how many operations of that number have ended, which is the same on all
ranks that have got as far. Calls with automatic names that differ only in the name's number have one signature, and
their word holds that number instead: it is what ranks match such calls by.

Two places for offers, used in turn, are enough: a rank that offers again has completed the previous offer, so every
rank had made that, and has therefore read what was offered before it.

Pure: no clock, thread or memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdgloo._backends import kernels
from hvdgloo._engine.messages import Offer, Request, Response
from hvdgloo._engine.submission import Signature, Submission
from hvdgloo.types import Collective, ReduceOp

PLACES = 2
"""Number of places that a rank has for offers."""

_NUMBER_BITS, _INSTANCE_BITS = 28, 36


@dataclass(eq=False, slots=True)
class OwnOffer:
    """An operation that this rank has offered, and not yet completed.

    Attributes:
        operation: filed with the Member like any other, but not sent to rank 0.
        signature: its agreement, and the number that stood for it then.
        word: says what is offered, the same on all ranks.
        turn: number of offers that were completed before it.
        is_due: True from when rank 0 is to be told.
        is_told: True once rank 0 has been told.
    """

    operation: Submission
    signature: Signature
    number: int
    word: int
    turn: int
    is_due: bool = False
    is_told: bool = False

    @property
    def place(self) -> int:
        """One of the ``PLACES``."""
        return self.turn % PLACES

    @property
    def message(self) -> Offer:
        """Tell rank 0 of it."""
        return Offer(self.operation.request, self.number, self.word, self.turn)


def suits(request: Request, limit: int) -> bool:
    """Return whether an operation may be offered: the answer is the same on all ranks that agreed upon it, if they
    gather equal parts.

    Args:
        limit: most bytes that can be offered.
    """
    collective = request.collective
    if collective is Collective.BARRIER:
        return not request.process_set
    if not collective.quick or request.op is ReduceOp.ADASUM or request.process_set or len(request.tensors) != 1:
        return False
    spec = request.tensors[0]
    if spec.device != "cpu" or not 0 < spec.nbytes <= limit:
        return False
    return not (collective.reduces and kernels.is_half(spec.dtype))


def is_even(response: Response) -> bool:
    """Return whether all ranks have parts of one size, if the operation gathers any."""
    return all(len({*rows}) == 1 for rows in response.rows)


def word_of(number: int, instance: int) -> int:
    """Return the word of an offer: never 0, and never given twice, since no number is.

    Args:
        number: of the signature; negative if it was forgotten.
        instance: number of operations with that signature that ended before, or of the automatic name.

    Returns:
        0 if there is no number, or if the counts have become too large for a word, as they have then on all ranks.
    """
    if number < 0 or number + 1 >= 1 << _NUMBER_BITS or instance >= 1 << _INSTANCE_BITS:
        return 0
    return (number + 1) << _INSTANCE_BITS | instance
