"""The operations of the ranks below a leader in a tree: what it holds back of them, and what it passes up.

A leader may hold something back only where no rank can tell the difference: an operation that not all ranks below have
submitted cannot be ready. What must not wait goes up as it is, and from then on the rest of that operation does, too
("opened"):

- what has waited for a second, so that the root can report who is late;
- all that a rank has submitted before it joins, so that its join overtakes nothing;
- operations of different kinds under one name, which wait for each other for ever;
- everything while the root writes a timeline.

So what the root sees is always what it might have seen without a tree, but for two things. What all below a leader have
submitted within a second of each other goes up without its age: the ages would have to be spelled out number by number
wherever a rank is a little late. And what leaders have reduced on the way is added in another order, and in half
precision rounded by each of them.

With what all below have submitted goes up who was the last of them, and how long the first had waited: from this the
root knows whom a job waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from hvdgloo._engine import inline
from hvdgloo._engine.messages import Execute, Gathered, Message, Part, Request, Resend, Response, Submit
from hvdgloo._engine.partial_submissions import Held
from hvdgloo._engine.readiness import Block, Ledger, bits_of, mask_of, numbers_of
from hvdgloo._engine.run_lengths import mask_of_runs, masks_of_runs, runs_of_mask, runs_of_masks
from hvdgloo._engine.tree_position import TreePosition
from hvdgloo.types import Collective

BATCH_SECONDS = 1e-3
"""Seconds that a leader which has just sent something up waits for an answer, before it sends more without one."""

_WORTH_SAYING = 0.1
"""Seconds; what was submitted less long ago counts as submitted now."""


class Upward:
    """Messages for a leader's parent, in order; what is gathered of operations waits to go up as one message.

    Args:
        batches: after a batch, the next one waits for an answer for a moment. The root waits for none.
    """

    def __init__(self, *, batches: bool) -> None:
        self._batches = batches
        self._messages: list[Message] = []
        self._whole: dict[int, int] = {}
        self._parts: list[Part] = []
        self._last, self._waited = -1, 0.0  # of these: which rank made the others wait longest
        self._unanswered_until = float("-inf")

    def add_whole(self, block: int, mask: int) -> None:
        """Gather numbers of a block that all ranks below have submitted."""
        self._whole[block] = self._whole.get(block, 0) | mask

    def add_part(self, part: Part) -> None:
        """Gather an operation, or what some ranks below have submitted of it."""
        self._parts.append(part)

    def came_last(self, rank: int, waited: float) -> None:
        """Note that a rank was the last to submit something, for which the first had waited so many seconds."""
        if self._last < 0 or waited > self._waited:
            self._last, self._waited = rank, waited

    def say(self, message: Message) -> None:
        """Send a message, after what has been gathered."""
        self._close()
        self._messages.append(message)

    def answered(self) -> None:
        """Let the next batch go up at once."""
        self._unanswered_until = float("-inf")

    @property
    def deadline(self) -> float | None:
        """The time at which what has been gathered goes up; None if there is nothing."""
        return self._unanswered_until if self._whole or self._parts else None

    def is_due(self, now: float) -> bool:
        """Return whether ``take`` has something to send."""
        return bool(self._messages or ((self._whole or self._parts) and now >= self._unanswered_until))

    def take(self, now: float) -> list[Message]:
        """Return the messages to be sent now."""
        if not self.is_due(now):
            return []
        if self._batches and not self._messages:
            self._unanswered_until = now + BATCH_SECONDS
        self._close()
        messages, self._messages = self._messages, []
        return messages

    def _close(self) -> None:
        if self._whole or self._parts:
            waited = round(self._waited * 1e6)
            last = self._last if waited else -1
            self._messages.append(Gathered(runs_of_masks(self._whole.items()), tuple(self._parts), last, waited))
            self._whole, self._parts = {}, []
            self._last, self._waited = -1, 0.0


class OperationsBelow:
    """The operations of the ranks below a leader, or below the root.

    Args:
        position: the leader's place.
        members: the global ranks of each process set by id, at the beginning; 0 is all ranks.
        patience: seconds after which an operation that not all have submitted goes up.
        up: takes what goes up.
        deliver: has a question sent to ranks below, given as a mask.

    Attributes:
        next_look: when ``look_at_what_waits`` has something to do; None if nothing is held.
    """

    def __init__(
        self,
        position: TreePosition,
        members: Mapping[int, Sequence[int]],
        patience: float,
        up: Upward,
        deliver: Callable[[int, Resend], None],
    ) -> None:
        self.next_look: float | None = None
        self._position = position
        self._patience = patience
        self._up = up
        self._deliver = deliver
        # Of each process set, the ranks below that are in it, and the children that speak for some of them.
        self._members: dict[int, int] = {}
        self._sources: dict[int, frozenset[int]] = {}
        for number, in_set in members.items():
            self._add_set(number, in_set)
        # What is known by number, and counted by it.
        self._ledger = Ledger()
        self._known: dict[int, Request] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._rivals: set[tuple[int, str]] = set()  # known under several kinds, so never counted
        # What is looked at one by one.
        self._held: dict[tuple[int, str], Held] = {}
        self._opened: set[tuple[int, str]] = set()
        self._joined = 0
        self._late_joins: dict[int, Request] = {}
        self._asked: dict[int, deque[bool]] = {}  # what a rank will answer: whether this leader has asked for it
        self._observed = False
        # Whose message is being read and when: the last of those it speaks for, and how long the first had waited.
        self._now, self._speaker, self._waited = float("-inf"), position.rank, 0.0

    @property
    def holds(self) -> bool:
        """True if some ranks below wait, and for others below as far as is known here."""
        return bool(self._held or self._opened) or self._ledger.busy

    def end(self) -> None:
        """Hold nothing any more: the job ends."""
        self._held.clear()
        self._opened.clear()
        self._ledger = Ledger()
        self.next_look = None

    def observe(self, on: bool, now: float) -> None:
        """Pass everything up as it is, or no longer."""
        self._observed, self._now = on, now
        if on:
            for block in self._ledger.blocks.values():
                self._withdraw(block, block.begun)
            for key in list(self._held):
                self._open(key)

    # Submissions.

    def submitted(self, rank: int, submission: Submit, now: float) -> None:
        """Handle what a rank has submitted.

        Raises:
            ValueError: it answers what it was not asked.
        """
        self._now, self._speaker, self._waited = now, rank, 0.0
        asked_above = submission.resent and not self._was_asked(rank)
        unknown: list[int] = []
        for at, mask in submission.masks:
            unknown += self._announced(rank, at, mask, submission.payload)
        if unknown:
            self.ask_back(1 << rank, unknown)
        for request in submission.requests:
            if asked_above:
                # The rank that asked waits for this rank's answer, and will let nothing overtake it.
                self._open(request.key)
            self._file(1 << rank, request, -1, _prescaled(request, submission.payload), now)
        if submission.resent:
            self._answered(rank, asked_above)

    def gathered(self, leader: int, message: Gathered, now: float) -> None:
        """Handle what another leader has passed up.

        Raises:
            ValueError: it speaks for ranks that are not below it, or that were not asked.
        """
        self._now = now
        self._speaker, self._waited = (leader, 0.0) if message.last < 0 else (message.last, message.waited / 1e6)
        below = self._position.below[leader]
        unknown: list[int] = []
        for at, mask in masks_of_runs(message.whole):
            unknown += self._announced(leader, at, mask, b"")
        if unknown:
            self.ask_back(below, unknown)
        for part in message.parts:
            ranks = mask_of_runs(part.ranks)
            if ranks & ~below:
                raise ValueError(f"rank {leader} has sent a Part of ranks that are not below it")
            if part.what is None:
                for rank in bits_of(ranks):
                    self._answered(rank, not self._was_asked(rank))
                continue
            number = part.what if isinstance(part.what, int) else -1
            request = self._known.get(part.what) if isinstance(part.what, int) else part.what
            if request is None:
                self.ask_back(ranks, [number])
                continue
            members = self._members.get(request.process_set, 0)
            if request.collective is not Collective.JOIN and below & members & ~ranks & ~self._excused((request,)):
                # Others below that leader are still to come, so it has opened the operation: it must not be held here.
                self._open(request.key)
            self._file(ranks, request, number, part.payload, now - part.age)

    def _announced(self, child: int, at: int, mask: int, payload: bytes) -> list[int]:
        """All ranks below a child have submitted these numbers; returns those that mean nothing any more."""
        block = self._ledger.blocks.get(at)
        if block is None:
            return numbers_of(at, mask)
        unknown = mask & ~block.used
        mask ^= unknown
        counted = 0 if payload or self._joined or self._observed else mask & block.open
        if counted:
            whole = block.announce(child, counted, self._now - self._waited)
            if whole:
                self._up.came_last(self._speaker, self._now - block.completed_since)
                self._up.add_whole(at, whole)
            else:
                self._look_by(self._now + self._patience)
        if counted != mask:
            ranks = self._position.below[child] & self._members[block.process_set]
            for number in numbers_of(at, mask ^ counted):
                request = self._known[number]
                self._file(ranks, request, number, _prescaled(request, payload), self._now)
        return numbers_of(at, unknown)

    def _file(self, ranks: int, request: Request, number: int, payload: bytes, since: float) -> None:
        """Ranks have submitted an operation, by its number or (-1) spelled out."""
        if not self._members.get(request.process_set, 0):
            return  # the set was removed while this was on its way; the ranks have been told
        if request.collective is Collective.JOIN:
            for rank in bits_of(ranks):
                self._join(rank, request)
            return
        key = request.key
        if self._observed:
            self._open(key)
        if key not in self._opened and key not in self._held:
            self._hold(key, since)
            for rival in self._rivals_of(request):
                self._open(rival)
                self._open(key)
        if key in self._opened:
            self._up.came_last(self._speaker, self._waited)
            self._pass(ranks, request if number < 0 else number, payload, since)
        else:
            self._held[key].add(ranks, None if number >= 0 else request, payload)
            self._release_if_whole(key)

    def _excused(self, requests: Iterable[Request]) -> int:
        """The ranks below without which an operation goes on; or fails, but that is for the root to say."""
        return 0 if any(request.collective.changes_sets for request in requests) else self._joined

    def _release_if_whole(self, key: tuple[int, str]) -> None:
        """Pass up an operation if all ranks below have submitted it, or are excused."""
        held = self._held[key]
        if not self._members[key[0]] & ~held.came & ~self._excused(held.spelled):
            self._up.came_last(self._speaker, self._now - held.since)
            self._release(key)

    def _hold(self, key: tuple[int, str], since: float) -> None:
        """Look at an operation by itself from now on, until it has gone up."""
        self._stop_counting(key)
        if key not in self._held:
            self._held[key] = Held(since)
            self._look_by(since + self._patience)

    def _stop_counting(self, key: tuple[int, str]) -> bool:
        """Look at an operation by itself from now on if it is known by a number; return whether it is."""
        number = self._numbers.get(key)
        if number is None:
            return False
        self._withdraw(*self._ledger.place(number))
        return True

    def _withdraw(self, block: Block, mask: int) -> None:
        """Look at these numbers one by one from now on."""
        members = self._members[block.process_set]
        for number, since, children in block.withdraw(mask):
            held = self._held[self._known[number].key] = Held(since)
            for child in children:
                held.numbered |= self._position.below[child] & members

    def _rivals_of(self, request: Request) -> list[tuple[int, str]]:
        """Operations of other kinds under a request's name that are under way. Such numbers are no longer counted."""
        found = []
        for key in request.other_kinds:
            if self._stop_counting(key):
                self._rivals.add(key)
            if key in self._held or key in self._opened:
                found.append(key)
        return found

    def _open(self, key: tuple[int, str]) -> None:
        """Hold nothing of an operation back until it has been ordered."""
        if key in self._opened:
            return
        self._stop_counting(key)
        self._opened.add(key)
        if key in self._held:
            self._release(key)

    def _release(self, key: tuple[int, str]) -> None:
        """Pass up what was held of an operation."""
        held = self._held.pop(key)
        number = self._numbers.get(key, -1)
        groups: list[tuple[int | Request, int]] = list(held.spelled.items())
        if held.numbered:
            groups.insert(0, (number, held.numbered))
        payload = b""
        if len(groups) == 1:
            payload = held.combined(self._known[number] if held.numbered else next(iter(held.spelled)))
        for what, ranks in groups:
            self._pass(ranks, what, payload, held.since)
        if held.numbered and held.spelled:
            # Above, the number may mean nothing any more. Then the ranks that sent it are asked to spell it out, and
            # their answers must not be held here for the others' answers, which have just gone up.
            self._opened.add(key)
        self._reopen(key)

    def _reopen(self, key: tuple[int, str]) -> None:
        """Count an operation by its number again, if it has one."""
        number = self._numbers.get(key)
        if number is not None and key not in self._opened and key not in self._rivals:
            self._ledger.reopen(number)

    def _pass(self, ranks: int, what: int | Request | None, payload: bytes, since: float) -> None:
        age = self._now - since
        self._up.add_part(Part(runs_of_mask(ranks), what, payload, age if age >= _WORTH_SAYING else 0.0))

    def _look_by(self, when: float) -> None:
        if self.next_look is None or when < self.next_look:
            self.next_look = when

    def look_at_what_waits(self, now: float) -> None:
        """Pass up what has waited for long; who has not submitted it follows from that."""
        self._now = now
        limit = now - self._patience
        for block in self._ledger.blocks.values():
            overdue = mask_of(number - block.first for number, since, _ in block.waiting() if since <= limit)
            self._withdraw(block, overdue)
        for key in [key for key, held in self._held.items() if held.since <= limit]:
            self._open(key)
        waiting = [held.since for held in self._held.values()]
        waiting += [since for block in self._ledger.blocks.values() for _, since, _ in block.waiting()]
        self.next_look = min(waiting) + self._patience if waiting else None

    # Joins, and what ranks are asked to spell out.

    def _join(self, rank: int, request: Request) -> None:
        """A rank has no more data. What it submitted before goes up first, also what it is being asked to spell out."""
        if rank in self._asked:
            self._late_joins[rank] = request
            return
        for block in self._ledger.blocks.values():
            self._withdraw(block, block.begun)
        for key in [key for key, held in self._held.items() if held.came >> rank & 1]:
            self._open(key)
        self._joined |= 1 << rank
        for key in list(self._held):
            self._release_if_whole(key)
        self._pass(1 << rank, request, b"", self._now)

    def ask_back(self, ranks: int, numbers: Sequence[int], *, asked_here: bool = True) -> None:
        """Have ranks below, given as a mask, spell out what numbers stood for that mean nothing any more, here or
        above."""
        for rank in bits_of(ranks & self._position.everyone):
            self._asked.setdefault(rank, deque()).append(asked_here)
        self._deliver(ranks, Resend(tuple(numbers)))

    def _was_asked(self, rank: int) -> bool:
        """A rank has answered a Resend: was it this leader's?

        Raises:
            ValueError: it was not asked.
        """
        questions = self._asked.get(rank)
        if questions is None:
            raise ValueError(f"rank {rank} answers what it was not asked")
        here = questions.popleft()
        if not questions:
            del self._asked[rank]
        return here

    def _answered(self, rank: int, asked_above: bool) -> None:
        """A rank has spelled out what it was asked for."""
        if asked_above:
            self._pass(1 << rank, None, b"", self._now)
        if rank in self._late_joins and rank not in self._asked:
            self._join(rank, self._late_joins.pop(rank))

    # Orders.

    def ordered(self, message: Execute) -> None:
        """Note what the root has ordered, what numbers it gave that, and which it has forgotten."""
        if self._opened:
            for item in message.items:
                request = item.request if isinstance(item, Response) else self._known.get(item)
                if request is not None and request.key in self._opened:
                    self._opened.remove(request.key)
                    self._reopen(request.key)
        for item in message.items:
            if isinstance(item, Response):
                self._responded(item)
        for number in message.forgotten:
            self._forget(number)

    def _responded(self, response: Response) -> None:
        request = response.request
        if request.collective is Collective.JOIN:
            self._joined = 0
        if response.error:
            return
        if request.collective is Collective.ADD_PROCESS_SET:
            self._add_set(response.value, request.ranks)
        elif request.collective is Collective.REMOVE_PROCESS_SET:
            self._drop_set(response.value)
        elif response.signature >= 0 and self._members[request.process_set]:
            self._learn(response.signature, request)

    def _learn(self, number: int, request: Request) -> None:
        key = request.key
        before = self._numbers.get(key)
        if before is not None:
            self._forget(before)
        self._known[number] = request
        self._numbers[key] = number
        self._ledger.learn(number, request.process_set, self._sources[request.process_set])
        for rival in request.other_kinds:
            if self._stop_counting(rival):
                self._rivals.update((key, rival))
        if key in self._rivals:
            self._stop_counting(key)

    def _forget(self, number: int) -> None:
        """Forget a number that the root has forgotten. Ranks that have submitted it, and wait for others, spell it
        out."""
        request = self._known.get(number)
        if request is None:
            return
        key = request.key
        self._withdraw(*self._ledger.place(number))
        held = self._held.get(key)
        if held is not None and held.numbered:
            self.ask_back(held.forget_numbered(), [number])
            if not held.spelled:
                del self._held[key]
        self._ledger.forget(number)
        self._rivals.discard(key)
        del self._known[number]
        if self._numbers.get(key) == number:
            del self._numbers[key]

    def _add_set(self, number: int, ranks: Iterable[int]) -> None:
        below = self._position.below
        members = self._members[number] = mask_of(ranks) & self._position.everyone
        self._sources[number] = frozenset(child for child, speaks_for in below.items() if speaks_for & members)

    def _drop_set(self, number: int) -> None:
        """Its operations under way are ended by the ranks themselves."""
        del self._members[number], self._sources[number]
        self._held = {key: held for key, held in self._held.items() if key[0] != number}
        self._opened = {key for key in self._opened if key[0] != number}
        self._rivals = {key for key in self._rivals if key[0] != number}
        for key in [key for key in self._numbers if key[0] == number]:
            del self._known[self._numbers.pop(key)]
        self._ledger.drop_set(number)


def _prescaled(request: Request, payload: bytes) -> bytes:
    return inline.reduced(request, [payload], prescale=True) if payload else b""
