"""Operations that some ranks have submitted and others have not: who has asked for what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hvdgloo._engine import inline
from hvdgloo._engine.messages import Request
from hvdgloo._engine.readiness import bits_of


class Requests(Mapping[int, Request]):
    """Requests for one operation by rank. Most are usually equal, and take no memory by rank.

    Args:
        shared: the first rank's request.

    Attributes:
        shared: the first rank's request.
        ranks: who has submitted the operation, as a mask.
        others: the requests that differ from the shared one, by rank.
    """

    __slots__ = ("others", "ranks", "shared")

    def __init__(self, shared: Request) -> None:
        self.shared = shared
        self.ranks = 0
        self.others: dict[int, Request] = {}

    def add(self, ranks: int, request: Request) -> int:
        """File what ranks, given as a mask, ask for, in place of what they had asked for before; return those that had
        asked for nothing."""
        for rank in bits_of(ranks & self.ranks):
            self.others.pop(rank, None)
        if request is not self.shared and request != self.shared:
            self.others.update(dict.fromkeys(bits_of(ranks), request))
        new = ranks & ~self.ranks
        self.ranks |= ranks
        return new

    def groups(self, ranks: int) -> list[tuple[Request, int]]:
        """The requests of some of the ranks, given as a mask, each with the mask of those that made it."""
        found: dict[Request, int] = {}
        for rank, request in self.others.items():
            if ranks >> rank & 1:
                found[request] = found.get(request, 0) | 1 << rank
                ranks ^= 1 << rank
        return [(self.shared, ranks), *found.items()] if ranks else [*found.items()]

    def __getitem__(self, rank: int) -> Request:
        if not self.ranks >> rank & 1:
            raise KeyError(rank)
        return self.others.get(rank, self.shared)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and bool(self.ranks >> rank & 1)

    def __iter__(self) -> Iterator[int]:
        return iter(bits_of(self.ranks))

    def __len__(self) -> int:
        return self.ranks.bit_count()


class PartialSubmission:
    """An operation that some ranks have submitted, since the time ``since``.

    Args:
        request: the first rank's; ``requests`` does not count it as submitted yet.
        missing: how many ranks have to submit it, or to join if it excuses them, before it is ready.

    Attributes:
        requests: who has submitted it, and what.
        by_number: how many of them submitted it by its number.
        payloads: the tensors that travelled along, by rank; or by the first of the ranks for which each stands.
        combined: for how many ranks they stand, prescaled; 0 if each is one rank's own.
        missing: how many ranks it still waits for.
        contested: there are operations of another kind under its name.
    """

    __slots__ = ("by_number", "combined", "contested", "missing", "payloads", "requests", "since")

    def __init__(self, request: Request, since: float, missing: int) -> None:
        self.since = since
        self.requests = Requests(request)
        self.missing = missing
        self.by_number = 0
        self.payloads: dict[int, bytes] | None = None
        self.combined = 0
        self.contested = False

    @property
    def excuses(self) -> bool:
        """True if it goes on without ranks that have joined. The sets may not be changed in their absence."""
        return not self.requests.shared.collective.changes_sets

    def add(self, ranks: int, request: Request, joined: int, *, by_number: bool) -> None:
        """Note that ranks have submitted it; some may have joined, and so not have been waited for. Both are masks."""
        new = self.requests.add(ranks, request)
        if self.excuses:
            new &= ~joined
        self.missing -= new.bit_count()
        self.by_number += ranks.bit_count() if by_number else 0

    def add_payload(self, ranks: int, payload: bytes, *, combined: bool) -> None:
        """Keep a rank's tensor; or (``combined``) the prescaled reduction of the tensors of several ranks."""
        if self.payloads is None:
            self.payloads = {}
        self.payloads[(ranks & -ranks).bit_length() - 1] = payload
        self.combined += ranks.bit_count() if combined else 0


class Held:
    """The same for a leader in a tree, which need not look at each rank: ranks are masks.

    Args:
        since: when the first rank submitted it.

    Attributes:
        numbered: those who did by its number.
        spelled: those who spelled it out, by what they asked for.
    """

    __slots__ = ("_paid", "_payloads", "numbered", "since", "spelled")

    def __init__(self, since: float) -> None:
        self.since = since
        self.numbered = 0
        self.spelled: dict[Request, int] = {}
        self._payloads: dict[int, bytes] = {}  # by the first of the ranks for which each stands
        self._paid = 0

    def add(self, ranks: int, request: Request | None, payload: bytes) -> None:
        """Note that ranks have submitted it.

        Args:
            request: what they ask for; None if they have named its number.
            payload: the reduction of their tensors, prescaled, or nothing.
        """
        if request is None:
            self.numbered |= ranks
        else:
            self.spelled[request] = self.spelled.get(request, 0) | ranks
        if payload:
            self._payloads[(ranks & -ranks).bit_length()] = payload
            self._paid |= ranks

    @property
    def came(self) -> int:
        """All who have submitted it."""
        came = self.numbered
        for ranks in self.spelled.values():
            came |= ranks
        return came

    def combined(self, request: Request) -> bytes:
        """The reduction of all their tensors, in the order of ranks; empty if some have sent none."""
        if self._paid != self.came:
            return b""
        return inline.reduced(request, [self._payloads[first] for first in sorted(self._payloads)])

    def forget_numbered(self) -> int:
        """The number means nothing any more; returns those who named it, who count as not having come."""
        ranks, self.numbered, self._paid = self.numbered, 0, 0
        self._payloads.clear()
        return ranks
