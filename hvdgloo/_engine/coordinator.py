"""Rank 0's side of the control plane: one order for all, and one verdict when something breaks.

Pure: messages and times go in, messages to send come out in ``outbox``; the control thread does the rest. States::

    running  --Leave-->  ending  --all drained, or deadline-->  over
    running, ending  --a rank lost, a data plane failed, a stall-->  over

A data plane that fails says only that *some* peer went away, so a rank's ``Failed`` has the failure attributed: every
rank is asked for a sign of life, and a rank whose connection has ended, or which does not answer, is named as the
cause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from hvdgloo._engine import stall
from hvdgloo._engine.conventions import ATTRIBUTION_SECONDS, COORDINATOR, EVERYONE
from hvdgloo._engine.held_offers import HeldOffers
from hvdgloo._engine.liveness import Liveness
from hvdgloo._engine.messages import (
    Abort,
    AskAlive,
    AskStacks,
    Bye,
    Drained,
    End,
    Execute,
    Failed,
    Gathered,
    Leave,
    Lost,
    Message,
    Observe,
    Offer,
    Ping,
    Pong,
    Resend,
    Said,
    Silent,
    Stacks,
    Submit,
    Tune,
)
from hvdgloo._engine.negotiation import Negotiator, Waiting, format_ranks
from hvdgloo._engine.readiness import bits_of
from hvdgloo._engine.run_lengths import mask_of_runs, masks_of_runs
from hvdgloo.types import Collective

if TYPE_CHECKING:
    from hvdgloo._engine.timeline import Timeline, Timelines
    from hvdgloo._engine.tree_position import TreePosition
    from hvdgloo._engine.tuning import Tuner
    from hvdgloo._observe.lateness import LatenessBook

STACKS_SECONDS = 2.0
"""Seconds that late ranks have to say what they are doing."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """The settings that the coordinator's decisions depend on; seconds and counts."""

    operation_timeout: float
    cache_capacity: int
    cycle_time: float
    stall_check: bool
    stall_warning_time: float
    stall_shutdown_time: float


@dataclass
class _Attribution:
    deadline: float
    rank: int
    text: str
    silent: set[int]


@dataclass
class _StallReport:
    deadline: float
    overdue: list[Waiting]
    stacks: dict[int, str | None]


class Coordinator:
    """Decides for ``size`` ranks.

    Args:
        members: the ranks of each process set by id.
        describe: a rank with its host and pid, for messages.
        position: rank 0's place in the tree, if there is one; otherwise every rank speaks to rank 0.
        lateness: where it is counted which ranks come last, if anywhere.
        tuner: what tries other settings, if that was asked for.

    Attributes:
        outbox: messages and whom they are for, in order.
        notes: of stalls, their ends and what autotune has chosen, each with its kind: for the log and for observers.
        offers: those that it has been told of; see ``held_offers``.
        gathering: (in a tree) some ranks wait for others, though no message about that has arrived yet; or some have
            asked lately whether those above are alive.
    """

    def __init__(
        self,
        size: int,
        members: Mapping[int, Sequence[int]],
        rules: CoordinatorSettings,
        describe: Callable[[int], str],
        position: TreePosition | None = None,
        lateness: LatenessBook | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self.outbox: list[tuple[int, Message]] = []
        self.notes: list[tuple[str, str]] = []
        self.busy = self.gathering = False
        self.over = False
        self._size = size
        self._rules = rules
        self._cycle_time = rules.cycle_time
        self._tuner = tuner
        self._describe = describe
        self._negotiator = Negotiator(members, rules.cache_capacity)
        self._negotiator.lateness = lateness
        self.offers = HeldOffers(lambda offer: False)
        self._everyone = tuple(range(size))
        self._in_tree = position is not None
        self._neighbours = tuple(range(1, size)) if position is None else position.children
        self._leaders: Collection[int] = () if position is None else position.leaders
        self._attribution_seconds = ATTRIBUTION_SECONDS if position is None else position.attribution_seconds
        self._neighbours_watch = Liveness(self._neighbours, rules.operation_timeout, at_once=self._in_tree)
        self._last_release = float("-inf")
        self._ticked = float("-inf")
        self._timeline: Timeline | Timelines | None = None
        self._leaver: int | None = None
        self._undrained: set[int] = set()
        self._end_deadline = 0.0
        self._attribution: _Attribution | None = None
        self._stall: _StallReport | None = None
        self._next_stall_check: float | None = None
        self._told: dict[int, str | None] | None = None
        self._late: Collection[int] = ()  # the late ones among them

    def show(self, timeline: Timeline | Timelines | None) -> None:
        """Record arrivals and orders in this timeline from now on; None for no timeline."""
        self._timeline = timeline
        self._negotiator.observer = timeline

    @property
    def has_ready(self) -> bool:
        """True if operations wait for ``release``."""
        return self._negotiator.has_ready

    def waiting(self, now: float, least: float) -> list[Waiting]:
        """Operations that have waited at least ``least`` seconds for ranks that have not submitted them, oldest first.
        While none has, this costs nothing to speak of."""
        times = [time for time in (self._negotiator.oldest(), self.offers.oldest()) if time is not None]
        if self.over or not times or now - min(times) < least:
            return []
        return stall.overdue(self._waiting(), now, least)

    @property
    def stacks(self) -> dict[int, str]:
        """Of the stall that has been reported last and lasts: what late ranks do, those that have answered."""
        return {rank: text for rank, text in (self._told or {}).items() if text and rank in self._late}

    def receive(self, rank: int, message: Message, now: float) -> None:
        """Handle a rank's message."""
        self.heard(rank, now)
        self._receive(rank, message, now)

    def heard(self, neighbour: int, now: float) -> None:
        """Note a neighbour's sign of life. A leader's tells nothing about the ranks below it."""
        self._neighbours_watch.heard(neighbour, now)
        if self._attribution is not None and neighbour not in self._leaders:
            self._attribution.silent.discard(neighbour)

    def hear(self, message: Message, now: float) -> list[tuple[int, Sequence[int]]]:
        """Handle a message that came up the tree.

        Returns:
            ranks, as a mask, each with numbers that no longer stand for anything; the ranks must spell out what these
            stood for.
        """
        unknown: list[tuple[int, Sequence[int]]] = []
        if isinstance(message, Said):
            self._receive(message.rank, message.message, now)
        elif self.over:
            pass
        elif isinstance(message, Gathered) and self._leaver is None:
            last, waited = message.last, message.waited / 1e6
            unknown += self._negotiator.absorb_whole(masks_of_runs(message.whole), now, last, waited)
            for ranks, _ in unknown:
                self._negotiator.asks_back(ranks)
            for part in message.parts:
                ranks = mask_of_runs(part.ranks)
                if part.what is None:
                    self._negotiator.was_answered(ranks)
                elif not self._negotiator.absorb_part(
                    ranks, part.what, part.payload, now - part.age, now=now, last=last, waited=waited
                ):
                    assert isinstance(part.what, int)
                    unknown.append((ranks, [part.what]))
                    self._negotiator.asks_back(ranks)  # before a join that follows in the same message
        elif isinstance(message, Observe):
            self.outbox.append((EVERYONE, message))
        elif isinstance(message, Tune):
            self._change(message)
        elif isinstance(message, Lost):
            self.lost(message.rank, message.reason)
        elif isinstance(message, Abort):
            self._abort("peer", message.text)
        elif isinstance(message, Drained):
            self._drained(bits_of(mask_of_runs(message.ranks)))
        elif isinstance(message, Silent) and self._attribution is not None:
            self._attribution.silent.discard(message.rank)
            self._attribution.silent.update(bits_of(mask_of_runs(message.ranks)))
            self._attribution.silent.discard(self._attribution.rank)
        return unknown

    def _receive(self, rank: int, message: Message, now: float) -> None:
        if self.over:
            return
        if isinstance(message, Submit):
            if self._leaver is not None:
                return  # it crossed with End, and its rank fails these operations when End arrives
            if self.offers:
                joins = any(request.collective is Collective.JOIN for request in message.requests)
                self._decline(self._negotiator.keys_of(message), joining=rank if joins else -1)
            unknown = self._negotiator.absorb(rank, message, now)
            if unknown:
                self.outbox.append((rank, Resend(tuple(unknown))))
            self._compare_offered_kinds()
        elif isinstance(message, Offer):
            if self._leaver is None and not self.offers.has_ended(message):
                self._offered(rank, message, now)
        elif isinstance(message, Ping):
            self.outbox.append((rank, Pong()))
        elif isinstance(message, Leave):
            self._end(rank, message.reason, now)
        elif isinstance(message, Drained):
            self._drained([rank])
        elif isinstance(message, Failed):
            self._open_attribution(rank, message.text, now)
        elif isinstance(message, Abort):
            self._abort("peer", message.text)
        elif isinstance(message, Stacks) and self._stall is not None:
            self._stall.stacks[rank] = message.text
        elif isinstance(message, Tune) and rank == COORDINATOR:
            self._change(message)

    def _offered(self, rank: int, offer: Offer, now: float) -> None:
        """Hold a rank's offer, unless some rank is known not to make it: then it is a submission like any other."""
        joined = self._negotiator.joined & ~self.offers.holders(offer.word) & ~(1 << rank)
        if self.offers.differs(offer):  # as one of the n-th call with an automatic name does, if its shape differs
            self._decline({offer.request.key})
        if joined or self._negotiator.ranks_of(offer.request.key):
            self._negotiator.absorb_offer(rank, offer, now)
            return
        self.offers.hold(rank, offer, now)
        self._compare_offered_kinds()

    def _decline(self, keys: Collection[tuple[int, str]], *, joining: int = -1) -> None:
        """Take held offers for submissions, since a rank does not make them; see ``HeldOffers.take``."""
        for rank, offer, since in self.offers.take(keys, joining=joining):
            self._negotiator.absorb_offer(rank, offer, since)

    def _compare_offered_kinds(self) -> None:
        """Take offers for submissions if each rank waits for another kind of operation under one name, so that they
        fail like these. No rank offers a second operation while it waits for a first one."""
        # Offers that have ended are no longer waited for, and are dropped when this is asked.
        for request in self.offers.requests() if self.offers else ():
            waiting = 0, 0
            kinds = [request.key, *request.other_kinds]
            for key in kinds:
                ranks = self.offers.ranks_of(key) | self._negotiator.ranks_of(key)
                if ranks & waiting[1]:
                    break  # a rank waits for two of them
                waiting = waiting[0] + bool(ranks), waiting[1] | ranks
            else:
                away = waiting[1] | self._negotiator.joined
                if waiting[0] > 1 and all(away >> rank & 1 for rank in self._everyone):
                    self._decline(kinds)

    @property
    def _has_pending(self) -> bool:
        return self._negotiator.has_pending or bool(self.offers)

    def _waiting(self) -> list[Waiting]:
        """As ``Negotiator.waiting``, with what is offered."""
        waiting = [*self._negotiator.waiting(), *self.offers.waiting(self._everyone, self._negotiator.joined)]
        return sorted(waiting, key=lambda each: each.since)

    def lost(self, rank: int, reason: str) -> None:
        """A rank's connection has ended."""
        if self.over or (self._leaver is not None and rank not in self._undrained):
            return
        self._abort("peer", f"{self._describe(rank)} was lost: {reason}", rank)

    def release(self, now: float) -> None:
        """Order everything that is ready. The control thread calls this when the data plane has room."""
        if self.over or not self._negotiator.has_ready:
            return
        self._last_release = now
        if self._timeline is not None:
            self._timeline.cycle(self._timeline.now())
        batch = self._negotiator.take()
        if self._tuner is not None:
            self._tune(self._tuner, batch, now)
        self.outbox.append((EVERYONE, batch))

    @property
    def undecided(self) -> str:
        """Autotune's message if the job ends now; empty if it has chosen, or was not asked for."""
        return "" if self._tuner is None else self._tuner.undecided

    def _tune(self, tuner: Tuner, batch: Execute, now: float) -> None:
        """Show the tuner what is ordered, and have all ranks change settings before that, if it says so."""
        choice = tuner.ordered(self._negotiator.responses(batch.items), now)
        if choice is not None:
            self._change(Tune(*astuple(choice)))
        if tuner.conclusion:
            self.notes.append(("tuning", tuner.conclusion))
            self._tuner = None

    def _change(self, settings: Tune) -> None:
        self._cycle_time = settings.cycle_time
        self.outbox.append((EVERYONE, settings))

    def may_release(self, now: float) -> bool:
        """False until the minimum delay since the last batch has passed."""
        return now >= self._last_release + self._cycle_time

    def tick(self, now: float) -> None:
        """Let time pass: pings, silent ranks, stalls, deadlines."""
        self._ticked = now
        if self.over:
            return
        if self._attribution is not None and now >= self._attribution.deadline:
            self._close_attribution(self._attribution)
        elif self._leaver is not None and now >= self._end_deadline:
            self._finish()
        else:
            self._watch(now)
            if self._leaver is None:
                self._check_stall(now)

    def deadline(self) -> float | None:
        """Return the next time at which ``tick`` has something to do; None while the job is idle."""
        if self.over:
            return None
        times = []
        if self._attribution is not None:
            times.append(self._attribution.deadline)
        if self._leaver is not None:
            times.append(self._end_deadline)
        if self._neighbours_watch.deadline is not None:
            times.append(self._neighbours_watch.deadline)
        if self._stall is not None:
            times.append(self._stall.deadline)
        elif self._next_stall_check is not None:
            times.append(self._next_stall_check)
        release = self._last_release + self._cycle_time
        if self._negotiator.has_ready and release > self._ticked:
            # One that is already due waits for room in the data plane, which wakes the control thread in any case.
            times.append(release)
        return min(times, default=None)

    # Ending.

    def _end(self, rank: int, reason: str, now: float) -> None:
        if self._leaver is not None:
            return
        self.release(now)
        self._leaver = rank
        self._undrained = set(range(self._size))
        self._end_deadline = now + self._rules.operation_timeout
        self._stall = self._next_stall_check = None
        self.outbox.append((EVERYONE, End(rank, reason)))

    def _drained(self, ranks: Iterable[int]) -> None:
        self._undrained.difference_update(ranks)
        if self._leaver is not None and not self._undrained:
            self._finish()

    def _finish(self) -> None:
        self.over = True
        self.outbox.append((EVERYONE, Bye()))

    def _abort(self, kind: str, text: str, rank: int = -1) -> None:
        self.over = True
        self.outbox.append((EVERYONE, Abort(kind, text, rank)))

    # A broken data plane.

    def _open_attribution(self, rank: int, text: str, now: float) -> None:
        if self._attribution is None:
            silent = set(self._neighbours) - {rank}
            self._attribution = _Attribution(now + self._attribution_seconds, rank, text, silent)
            self.outbox.extend((leader, AskAlive()) for leader in sorted(self._leaders))
            self.outbox.extend((other, Ping()) for other in sorted(silent.difference(self._leaders)))

    def _close_attribution(self, attribution: _Attribution) -> None:
        if attribution.silent:
            silent = sorted(attribution.silent)
            who = f"{self._describe(silent[0])} does" if len(silent) == 1 else f"{format_ranks(silent)} do"
            text = f"{who} not answer, and {self._describe(attribution.rank)} reports: {attribution.text}"
            self._abort("peer", text, silent[0])
        else:
            self._abort("backend", f"{self._describe(attribution.rank)} reports: {attribution.text}", attribution.rank)

    # Signs of life, asked for only while some rank waits.

    @property
    def _active(self) -> bool:
        waits = self._has_pending or self._negotiator.joined != 0
        return self._size > 1 and (self.busy or self.gathering or waits or self._leaver is not None)

    def _watch(self, now: float) -> None:
        if self._neighbours_watch.rests(now):
            return
        ping, lost = self._neighbours_watch.tick(now, active=self._active)
        for rank, reason in lost:
            self.lost(rank, reason)
            if self.over:
                return
        if ping:
            self.outbox.extend((rank, Ping()) for rank in self._neighbours)

    # Stalls.

    def _check_stall(self, now: float) -> None:
        rules = self._rules
        if not rules.stall_check:
            return
        if not self._has_pending:
            self._stall = None
            self._recovered()
            if self._next_stall_check is not None and now >= self._next_stall_check:
                self._next_stall_check = None
            return
        if self._stall is not None:
            answered = all(text is not None for text in self._stall.stacks.values())
            if answered or now >= self._stall.deadline:
                self._report_stall(self._stall, now)
            return
        if self._next_stall_check is None:
            # In a tree, what waits is heard of only after a while.
            begun = self._waiting()[0].since if self._in_tree else now
            self._next_stall_check = begun + rules.stall_warning_time
        if now < self._next_stall_check:
            return
        waiting = self._waiting()
        overdue = stall.overdue(waiting, now, rules.stall_warning_time)
        if not overdue:
            self._recovered()
            since = waiting[0].since if waiting else now  # offers may have been completed since the last look
            self._next_stall_check = since + rules.stall_warning_time
            return
        asked = sorted({*stall.missing_ranks(overdue), *set(stall.first_to_wait(overdue)).difference(self._told or ())})
        self._stall = _StallReport(now + STACKS_SECONDS, overdue, dict.fromkeys(asked))
        self.outbox.extend((rank, AskStacks()) for rank in asked)

    def _recovered(self) -> None:
        """Nothing waits any more that a report was about."""
        if self._told is not None:
            self._told = None
            self.notes.append(("stall ended", "the ranks that others waited for have submitted"))

    def _report_stall(self, report: _StallReport, now: float) -> None:
        self._stall = None
        rules = self._rules
        # As they wait now: some ranks may have submitted meanwhile, and the next step uses the same names.
        asked_about = {(operation.name, operation.since) for operation in report.overdue}
        waiting = self._waiting()
        overdue = [w for w in waiting if (w.name, w.since) in asked_about]
        if not overdue:
            self._next_stall_check = now
            return
        self.notes.append(("stall", stall.report(overdue, now, self._describe, report.stacks, self._told, waiting)))
        self._told, self._late = (self._told or {}) | report.stacks, stall.missing_ranks(overdue)
        dead_line = min(operation.since for operation in overdue) + rules.stall_shutdown_time
        if rules.stall_shutdown_time and now >= dead_line:
            self._abort("stall", stall.verdict(overdue, now, self._describe))
            return
        self._next_stall_check = now + rules.stall_warning_time
        if rules.stall_shutdown_time:
            self._next_stall_check = min(self._next_stall_check, dead_line)
