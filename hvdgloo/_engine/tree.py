"""The control plane of many hosts: a tree in which the ranks of a host speak through its leader.

With one connection for each rank, rank 0 reads a message of every rank for every answer. In a large job only the first
rank of each host, its *leader*, has a connection with those above: rank 0 is the root, and the leader of host ``i``
reports to the leader of host ``(i - 1) // fanin``. A leader passes up what all ranks below it have submitted, and
passes down what the root has decided; everything else is decided by the root, as without a tree.

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

A leader that is lost takes the ranks below it along, whether or not it has drained itself: no other rank
speaks for them. Pure: messages and times go in, messages come
out; the control thread does the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from hvdgloo._engine import inline
from hvdgloo._engine.conventions import ping_interval
from hvdgloo._engine.liveness import Liveness, RollCall
from hvdgloo._engine.messages import (
    Abort,
    AskAlive,
    AskStacks,
    Drained,
    End,
    Execute,
    Failed,
    Gathered,
    Leave,
    Lost,
    Message,
    Observe,
    Part,
    Ping,
    Pong,
    Request,
    Resend,
    Response,
    Said,
    Silent,
    Stacks,
    Submit,
    To,
    Tune,
)
from hvdgloo._engine.partial_submissions import Held
from hvdgloo._engine.readiness import Block, Ledger, bits_of, mask_of, numbers_of
from hvdgloo._engine.run_lengths import mask_of_runs, masks_of_runs, runs_of_mask, runs_of_masks
from hvdgloo._engine.tree_position import TreePosition
from hvdgloo.types import Collective

PATIENCE_SECONDS = 1.0
"""Seconds after which the root is told of an operation that some ranks below have submitted and others have not."""

BATCH_SECONDS = 1e-3
"""Seconds that a leader which has just sent something up waits for an answer, before it sends more without one."""

_WORTH_SAYING = 0.1
"""Seconds; what was submitted less long ago counts as submitted now."""


class Aggregator:
    """The knowledge of a leader, or of the root, about the ranks below.

    Args:
        position: its place.
        members: the global ranks of each process set by id, at the beginning; 0 is all ranks.
        patience: seconds after which an operation that not all have submitted goes up.
        operation_timeout: seconds after which a silent child counts as lost.

    Attributes:
        down: messages for children, and for the leader's own rank, in order.
        busy: the leader's own rank waits for something.
    """

    def __init__(
        self, position: TreePosition, members: Mapping[int, Sequence[int]], patience: float, operation_timeout: float
    ) -> None:
        self.down: list[tuple[int, Message]] = []
        self.busy = False
        self._position = position
        self._everyone = 0
        for ranks in position.below.values():
            self._everyone |= ranks
        self._patience = patience
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
        # What goes up.
        self._whole: dict[int, int] = {}
        self._parts: list[Part] = []
        self._last, self._waited = -1, 0.0  # of these: who made the others wait longest
        # Whose message is being read: who was the last of those it speaks for, and how long the first had waited.
        self._comer, self._comers_waited = position.rank, 0.0
        self._up: list[Message] = []
        self._unanswered_until = float("-inf")
        # The rest.
        self._now = float("-inf")
        self._next_look: float | None = None
        self._ending = False
        self._drained = 0
        self._roll_call: RollCall | None = None
        self._asked_from_above = self._asked_from_below = float("-inf")
        self._ping_seconds = 2 * ping_interval(operation_timeout)
        self._watch = Liveness(position.children, operation_timeout, at_once=True)

    # What comes from below.

    def receive(self, child: int, message: Message, now: float) -> None:
        """Handle a child's message, or one of the leader's own rank.

        Raises:
            ValueError: the child has no right to say this.
        """
        if child != self._position.rank:
            self._check(child, message)
        self._now = now
        self._comer, self._comers_waited = child, 0.0
        self._watch.heard(child, now)
        if self._roll_call is not None and child not in self._position.leaders:
            self._answered_the_roll(self._roll_call, child, 0)
        if isinstance(message, Submit):
            self._submitted(child, message)
        elif isinstance(message, Gathered):
            self._gathered(child, message)
        elif isinstance(message, Ping):
            self._asked_from_below = now
            self.down.append((child, Pong()))
        elif isinstance(message, Drained):
            self._drain(mask_of_runs(message.ranks) if message.ranks else 1 << child)
        elif isinstance(message, (Leave, Failed, Stacks)):
            self._say(Said(child, message))
        elif isinstance(message, (Said, Lost, Observe, Tune, Abort)):
            self._say(message)
        elif isinstance(message, Silent):
            if self._position.parent < 0:
                self._say(message)
            elif self._roll_call is not None:
                self._answered_the_roll(self._roll_call, child, mask_of_runs(message.ranks))

    def _check(self, child: int, message: Message) -> None:
        """Members speak for themselves, leaders for the ranks below them.

        Raises:
            ValueError: this one does otherwise.
        """
        is_leader = child in self._position.leaders
        if isinstance(message, Submit):
            allowed = not is_leader
        elif isinstance(message, Gathered):  # the ranks of its parts are looked at where they are read
            allowed = is_leader and (message.last < 0 or self._speaks_for(child, mask_of_runs((message.last, 1))))
        elif isinstance(message, Observe):
            allowed = is_leader
        elif isinstance(message, (Said, Lost)):
            allowed = is_leader and self._speaks_for(child, mask_of_runs((message.rank, 1)))
        elif isinstance(message, Silent):
            named = mask_of_runs((message.rank, 1)) | mask_of_runs(message.ranks)
            allowed = is_leader and self._speaks_for(child, named)
        elif isinstance(message, Drained):
            allowed = self._speaks_for(child, mask_of_runs(message.ranks))
        else:
            allowed = True
        if not allowed:
            raise ValueError(f"rank {child} has sent a {type(message).__name__} that is not for it to send")

    def _speaks_for(self, child: int, ranks: int) -> bool:
        return not ranks & ~self._position.below[child]

    def lost(self, child: int, reason: str, now: float) -> None:
        """A child's connection has ended."""
        self._now = now
        if self._drained:
            self._say(Drained(runs_of_mask(self._drained)))
            self._drained = 0
        self._say(Lost(child, reason))

    # What comes from above.

    def pass_down(self, message: Message, now: float) -> None:
        """Take note of a message for this leader, or for everyone, from its parent or the coordinator. Who passes on
        what is for everyone does so before: answers to what follows from it come after it."""
        self._now = now
        if isinstance(message, Execute):
            self._unanswered_until = float("-inf")
            self._ordered(message)
        elif isinstance(message, To):
            self.send(mask_of_runs(message.ranks), message.message)
        elif isinstance(message, (Resend, AskStacks)):
            self.send(1 << self._position.rank, message)
        elif isinstance(message, Ping):
            self._asked_from_above = now
            self._up.append(Pong())
        elif isinstance(message, AskAlive):
            self._call_the_roll()
        elif isinstance(message, Observe):
            self._observe(message.on)
        elif isinstance(message, End):
            self._end()

    def send(self, ranks: int, message: Resend | AskStacks) -> None:
        """Have a message delivered to some ranks below, given as a mask."""
        self._deliver(ranks, message, asked_here=False)

    def ask_back(self, ranks: int, numbers: Sequence[int]) -> None:
        """Have ranks below, given as a mask, spell out what numbers stood for that mean nothing any more."""
        self._deliver(ranks, Resend(tuple(numbers)), asked_here=True)

    def _deliver(self, ranks: int, message: Resend | AskStacks, *, asked_here: bool) -> None:
        for child, below in self._position.below.items():
            meant = ranks & below
            if not meant:
                continue
            if isinstance(message, Resend):
                for rank in bits_of(meant):
                    self._asked.setdefault(rank, deque()).append(asked_here)
            if meant == 1 << child:
                self.down.append((child, message))
            else:
                self.down.append((child, To(runs_of_mask(meant), message)))

    # What goes up.

    def is_due(self, now: float) -> bool:
        """Return whether ``take`` or ``down`` has something to send."""
        return bool(self._up or self.down or ((self._whole or self._parts) and now >= self._unanswered_until))

    def take(self, now: float) -> list[Message]:
        """Return the messages to be sent to the parent now."""
        if self._up:
            self._close()
        elif (self._whole or self._parts) and now >= self._unanswered_until:
            self._close()
            if self._position.parent >= 0:
                self._unanswered_until = now + BATCH_SECONDS
        up, self._up = self._up, []
        return up

    def _close(self) -> None:
        """Whatever is said next comes after what has been gathered."""
        if self._whole or self._parts:
            whole, waited = runs_of_masks(self._whole.items()), round(self._waited * 1e6)
            last = self._last if waited else -1
            self._up.append(Gathered(whole, tuple(self._parts), last, waited))
            self._whole, self._parts = {}, []
            self._last, self._waited = -1, 0.0

    def _say(self, message: Message) -> None:
        self._close()
        self._up.append(message)

    @property
    def holds(self) -> bool:
        """Some ranks below wait, and for others below as far as is known here."""
        return bool(self._held or self._opened) or self._ledger.busy

    def asked_from_below(self, now: float) -> bool:
        """Return whether some rank below waits, and asked lately whether the ranks above are alive."""
        return now < self._asked_from_below + self._ping_seconds

    def tick(self, now: float) -> None:
        """Let time pass: what has waited for long, silent children."""
        self._now = now
        if self._next_look is not None and now >= self._next_look:
            self._look_at_what_waits()
        if self._roll_call is not None and now >= self._roll_call.deadline:
            self._close_the_roll(self._roll_call)
        if self._position.parent >= 0:
            self._watch_children(now)

    def deadline(self) -> float | None:
        """Return the next time at which ``tick`` or ``take`` has something to do; None if only a message can tell."""
        times = []
        if self._next_look is not None:
            times.append(self._next_look)
        if self._roll_call is not None:
            times.append(self._roll_call.deadline)
        if self._whole or self._parts:
            times.append(self._unanswered_until)
        watch = self._watch.deadline
        if watch is not None:
            times.append(watch)
        return min(times, default=None)

    def _watch_children(self, now: float) -> None:
        active = self.busy or self.holds or self._ending or now < self._asked_from_above + self._ping_seconds
        ping, lost = self._watch.tick(now, active=active)
        for child, reason in lost:
            self.lost(child, reason, now)
        if ping:
            self.down.extend((child, Ping()) for child in self._position.children)

    # Submissions.

    def _submitted(self, rank: int, submission: Submit) -> None:
        if self._ending:
            return
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
            self._file(1 << rank, request, -1, self._prescaled(request, submission.payload), self._now)
        if submission.resent:
            self._answered(rank, asked_above)

    def _gathered(self, leader: int, message: Gathered) -> None:
        if self._ending:
            return
        if message.last >= 0:
            self._comer, self._comers_waited = message.last, message.waited / 1e6
        unknown: list[int] = []
        for at, mask in masks_of_runs(message.whole):
            unknown += self._announced(leader, at, mask, b"")
        if unknown:
            self.ask_back(self._position.below[leader], unknown)
        for part in message.parts:
            ranks = mask_of_runs(part.ranks)
            if not self._speaks_for(leader, ranks):
                raise ValueError(f"rank {leader} has sent a Part of ranks that are not below it")
            since = self._now - part.age
            if part.what is None:
                for rank in bits_of(ranks):
                    self._answered(rank, not self._was_asked(rank))
            elif isinstance(part.what, int):
                request = self._known.get(part.what)
                if request is None:
                    self.ask_back(ranks, [part.what])
                else:
                    self._file_part(leader, ranks, request, part.what, part.payload, since)
            else:
                self._file_part(leader, ranks, part.what, -1, part.payload, since)

    def _announced(self, child: int, at: int, mask: int, payload: bytes) -> list[int]:
        """All ranks below a child have submitted these numbers; returns those that mean nothing any more."""
        block = self._ledger.blocks.get(at)
        if block is None:
            return numbers_of(at, mask)
        unknown = mask & ~block.used
        mask ^= unknown
        counted = 0 if payload or self._joined or self._observed else mask & block.open
        if counted:
            whole = block.announce(child, counted, self._now - self._comers_waited)
            if whole:
                self._came_last(self._now - block.completed_since)
                self._whole[at] = self._whole.get(at, 0) | whole
            else:
                self._look_by(self._now + self._patience)
        if counted != mask:
            ranks = self._position.below[child] & self._members[block.process_set]
            for number in numbers_of(at, mask ^ counted):
                request = self._known[number]
                self._file(ranks, request, number, self._prescaled(request, payload), self._now)
        return numbers_of(at, unknown)

    def _file_part(self, leader: int, ranks: int, request: Request, number: int, payload: bytes, since: float) -> None:
        """A part of an operation that another leader has passed up. If others below that one are still to come, it has
        been opened there and must not be held here."""
        members = self._members.get(request.process_set, 0)
        if request.collective is not Collective.JOIN and (
            self._position.below[leader] & members & ~ranks & ~self._excused(request)
        ):
            self._open(request.key)
        self._file(ranks, request, number, payload, since)

    def _file(self, ranks: int, request: Request, number: int, payload: bytes, since: float) -> None:
        """Ranks have submitted an operation, by its number or (-1) spelled out."""
        members = self._members.get(request.process_set, 0)
        if not members:
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
            self._came_last(self._comers_waited)
            self._pass(ranks, request if number < 0 else number, payload, since)
            return
        held = self._held[key]
        held.add(ranks, None if number >= 0 else request, payload)
        if not members & ~held.came & ~self._excused(request):
            self._came_last(self._now - held.since)
            self._release(key)

    def _came_last(self, waited: float) -> None:
        """With whom is being heard now something is complete here, for which the first has waited so many seconds."""
        if self._last < 0 or waited > self._waited:
            self._last, self._waited = self._comer, waited

    def _excused(self, request: Request) -> int:
        """The ranks below without which an operation goes on; or fails, but that is for the root to say."""
        return 0 if request.collective.changes_sets else self._joined

    def _hold(self, key: tuple[int, str], since: float) -> None:
        """Look at an operation by itself from now on, until it has gone up."""
        number = self._numbers.get(key)
        if number is not None:
            self._withdraw(*self._ledger.place(number))
        if key not in self._held:
            self._held[key] = Held(since)
            self._look_by(since + self._patience)

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
            number = self._numbers.get(key)
            if number is not None:
                self._rivals.add(key)
                self._withdraw(*self._ledger.place(number))
            if key in self._held or key in self._opened:
                found.append(key)
        return found

    def _open(self, key: tuple[int, str]) -> None:
        """Hold nothing of an operation back until it has been ordered."""
        if key in self._opened:
            return
        number = self._numbers.get(key)
        if number is not None:
            self._withdraw(*self._ledger.place(number))
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
        self._parts.append(Part(runs_of_mask(ranks), what, payload, age if age >= _WORTH_SAYING else 0.0))

    def _prescaled(self, request: Request, payload: bytes) -> bytes:
        return inline.reduced(request, [payload], prescale=True) if payload else b""

    def _look_by(self, when: float) -> None:
        if self._next_look is None or when < self._next_look:
            self._next_look = when

    def _look_at_what_waits(self) -> None:
        """Pass up what has waited for long; who has not submitted it follows from that."""
        limit = self._now - self._patience
        for block in self._ledger.blocks.values():
            overdue = mask_of(number - block.first for number, since, _ in block.waiting() if since <= limit)
            self._withdraw(block, overdue)
        for key in [key for key, held in self._held.items() if held.since <= limit]:
            self._open(key)
        waiting = [held.since for held in self._held.values()]
        waiting += [since for block in self._ledger.blocks.values() for _, since, _ in block.waiting()]
        self._next_look = min(waiting) + self._patience if waiting else None

    # Joins.

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
        for key, held in list(self._held.items()):
            members = self._members[key[0]]
            excused = self._joined if not self._changes_sets(held) else 0
            if not members & ~held.came & ~excused:
                self._came_last(self._now - held.since)
                self._release(key)
        self._pass(1 << rank, request, b"", self._now)

    def _changes_sets(self, held: Held) -> bool:
        return any(request.collective.changes_sets for request in held.spelled)

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

    def _ordered(self, message: Execute) -> None:
        if self._opened:
            for item in message.items:
                key = self._known[item].key if isinstance(item, int) and item in self._known else None
                self._ordered_key(item.request.key if isinstance(item, Response) else key)
        for item in message.items:
            if isinstance(item, Response):
                self._responded(item)
        for number in message.forgotten:
            self._forget(number)

    def _ordered_key(self, key: tuple[int, str] | None) -> None:
        if key in self._opened:
            self._opened.remove(key)
            self._reopen(key)

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
            if rival in self._numbers:
                self._rivals.update((key, rival))
                self._withdraw(*self._ledger.place(self._numbers[rival]))
        if key in self._rivals:
            self._withdraw(*self._ledger.place(number))

    def _forget(self, number: int) -> None:
        """Forget a number that the root has forgotten. A rank that has submitted it, and waits for others, spells it
        out."""
        request = self._known.pop(number, None)
        if request is None:
            return
        key = request.key
        block, bit = self._ledger.place(number)
        self._withdraw_forgotten(block, bit, key)
        self._ledger.forget(number)
        self._rivals.discard(key)
        if self._numbers.get(key) == number:
            del self._numbers[key]

    def _withdraw_forgotten(self, block: Block, bit: int, key: tuple[int, str]) -> None:
        members = self._members[block.process_set]
        ranks = 0
        for _, _, children in block.withdraw(bit):
            for child in children:
                ranks |= self._position.below[child] & members
        held = self._held.get(key)
        if held is not None and held.numbered:
            ranks |= held.forget_numbered()
            if not held.spelled:
                del self._held[key]
        if ranks:
            self.ask_back(ranks, [block.first + bit.bit_length() - 1])

    def _add_set(self, number: int, ranks: Iterable[int]) -> None:
        members = self._members[number] = mask_of(ranks) & self._everyone
        self._sources[number] = frozenset(child for child, below in self._position.below.items() if below & members)

    def _drop_set(self, number: int) -> None:
        """Its operations under way are ended by the ranks themselves."""
        del self._members[number], self._sources[number]
        self._held = {key: held for key, held in self._held.items() if key[0] != number}
        self._opened = {key for key in self._opened if key[0] != number}
        self._rivals = {key for key in self._rivals if key[0] != number}
        for key in [key for key in self._numbers if key[0] == number]:
            del self._known[self._numbers.pop(key)]
        self._ledger.drop_set(number)

    # The end, signs of life, timelines.

    def _end(self) -> None:
        self._ending = True
        self._held.clear()
        self._opened.clear()
        self._ledger = Ledger()
        self._next_look = None

    def _drain(self, ranks: int) -> None:
        self._drained |= ranks
        if self._drained == self._everyone:
            self._say(Drained(runs_of_mask(self._drained)))
            self._drained = 0

    def _call_the_roll(self) -> None:
        self._roll_call = RollCall(self._position.children, self._now + self._position.attribution_seconds)
        for child in self._position.children:
            self.down.append((child, AskAlive() if child in self._position.leaders else Ping()))
        if not self._position.children:
            self._close_the_roll(self._roll_call)

    def _answered_the_roll(self, roll_call: RollCall, child: int, silent: int) -> None:
        if roll_call.answered(child, silent):
            self._close_the_roll(roll_call)

    def _close_the_roll(self, roll_call: RollCall) -> None:
        self._roll_call = None
        self._say(Silent(self._position.rank, runs_of_mask(roll_call.silent)))

    def _observe(self, on: bool) -> None:
        self._observed = on
        if on:
            for block in self._ledger.blocks.values():
                self._withdraw(block, block.begun)
            for key in list(self._held):
                self._open(key)
