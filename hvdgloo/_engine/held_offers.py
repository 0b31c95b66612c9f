"""Rank 0's record of offers (``offers``): which may still be completed, and which are to be ordered instead. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from hvdgloo._engine.messages import Offer, Request
from hvdgloo._engine.negotiation import Waiting
from hvdgloo._engine.readiness import bits_of, mask_of


@dataclass(frozen=True)
class _Held:
    offer: Offer
    since: float


class HeldOffers:
    """The offers that rank 0 has been told of, of each rank at most one.

    Args:
        has_ended: returns whether all ranks have made an offer, so that it needs nothing more.
    """

    def __init__(self, has_ended: Callable[[Offer], bool]) -> None:
        self.has_ended = has_ended
        self._held: dict[int, _Held] = {}

    def __bool__(self) -> bool:
        """Return whether some held offer has not been made by all ranks."""
        for rank, held in list(self._held.items()):
            if self.has_ended(held.offer):
                del self._held[rank]
        return bool(self._held)

    def hold(self, rank: int, offer: Offer, now: float) -> None:
        """Note a rank's offer; any earlier one of its has ended."""
        self._held[rank] = _Held(offer, now)

    def holders(self, word: int) -> int:
        """Return the ranks, as a mask, whose offer of this word is held."""
        return mask_of(rank for rank, held in self._held.items() if held.offer.word == word)

    def differs(self, offer: Offer) -> bool:
        """Return whether some rank's offer of the same operation has another word: neither will be made by all."""
        key = offer.request.key
        return any(held.offer.request.key == key and held.offer.word != offer.word for held in self._held.values())

    def ranks_of(self, key: tuple[int, str]) -> int:
        """Return the ranks, as a mask, whose offer of an operation is held."""
        return mask_of(rank for rank, held in self._held.items() if held.offer.request.key == key)

    def requests(self) -> list[Request]:
        """Return what is offered, each operation once."""
        return list({held.offer.request.key: held.offer.request for held in self._held.values()}.values())

    def take(self, keys: Collection[tuple[int, str]], *, joining: int = -1) -> Iterator[tuple[int, Offer, float]]:
        """Remove and yield, in order of ranks, the offers that cannot be completed any more, each with its rank and the
        time at which it was told.

        Args:
            keys: operations that some rank submits without an offer.
            joining: rank that joins; -1 for none. What it has not offered, it will not offer.
        """
        offered = self._held[joining].offer.word if joining in self._held else 0
        for rank, held in sorted(self._held.items()):
            if held.offer.request.key in keys or (joining >= 0 and held.offer.word != offered):
                del self._held[rank]
                if not self.has_ended(held.offer):
                    yield rank, held.offer, held.since

    def waiting(self, ranks: Sequence[int], joined: int) -> list[Waiting]:
        """Return the operations that are held, as the stall report shows them.

        Args:
            ranks: all ranks.
            joined: ranks that have joined, as a mask.
        """
        report = []
        for request in self.requests() if self else ():
            made = self.ranks_of(request.key)
            since = min(held.since for held in self._held.values() if held.offer.request.key == request.key)
            missing = tuple(rank for rank in ranks if not (made | joined) >> rank & 1)
            report.append(Waiting(request.name, since, tuple(bits_of(made)), missing))
        return report

    def oldest(self) -> float | None:
        """Return the time at which the oldest was told; None if there is none."""
        return min((held.since for held in self._held.values()), default=None) if self else None
