"""An elastic job's workers as values: what they have asked, what they were told, and what must hold at every answer.

The bed feeds a job, carries out its actions in the only way that matters to it, and checks each of them. Processes die
when the test says so, and the job hears of it later, when the test says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hvdgloo.rendezvous._elastic.events import (
    Action,
    Alone,
    Announce,
    Changed,
    Dismissed,
    Ended,
    Event,
    Fate,
    Formed,
    Gone,
    HostsListed,
    Registered,
    Rules,
    Spawn,
    Stop,
    Synced,
    Tell,
    TimePassed,
    Up,
    Update,
    Voided,
)
from hvdgloo.rendezvous._elastic.job import ElasticJob
from hvdgloo.rendezvous._elastic.phases import Phase
from hvdgloo.rendezvous._membership.assignment import NO_STATE, Assignment

UNTROUBLED = frozenset({Phase.RUNNING, Phase.OVER, Phase.FAILED})


def chance() -> float:
    """Return a fixed value in place of a random one; a named function, so that a bed can be pickled."""
    return 0.5


@dataclass
class Actor:
    """One worker process.

    Attributes:
        id, host, slot: as it was started.
        alive: it runs; ``seen`` once the job has heard that it does not.
        asked: the request that waits for an answer.
        epoch, rank: of its newest answer.
        alone: it was told to go on by itself.
        up, synced, finished: what it has said of its epoch.
        serial: of its newest commit.
        dismissed: it was told that it is in no further epoch.
        stopped: the job wants it ended.
        accused: another worker has named it.
        was_out: its slot could not be used at some time.
        well: it has ended with status 0.
    """

    id: str
    host: str
    slot: int
    alive: bool = True
    seen: bool = False
    asked: Registered | None = None
    epoch: int = -1
    rank: int | None = None
    alone: bool = False
    up: bool = False
    synced: bool = False
    finished: bool = False
    serial: int = NO_STATE
    dismissed: bool = False
    stopped: bool = False
    accused: bool = False
    was_out: bool = False
    well: bool = False


@dataclass
class Bed:
    """A job and its workers.

    Attributes:
        hold: see ``ElasticJob``.
        now: the clock.
        listed: hosts and slots, as the job was told last.
        actors: all that were ever started.
        voided: the highest epoch that was voided.
        update: what was announced last.
        ended: how the job has ended.
        told: lines for the user.
    """

    rules: Rules
    hosts: tuple[tuple[str, int], ...]
    hold: float = 0.0
    now: float = 1000.0
    listed: dict[str, int] = field(default_factory=dict)
    actors: dict[str, Actor] = field(default_factory=dict)
    voided: int = -1
    update: Update = Update.NONE
    serial: int = 0
    ended: Ended | None = None
    told: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    changes: list[Changed] = field(default_factory=list)
    limit: float = math.inf
    """Of what was waited for when the last event came."""

    def __post_init__(self) -> None:
        self.job = ElasticJob(self.rules, self.now, chance, hold=self.hold)
        if self.hosts:
            self.list(self.hosts)

    # What happens.

    def feed(self, event: Event) -> tuple[Action, ...]:
        """The job is told; its actions are checked, and carried out."""
        self.limit = self.job._phases.limit
        actions = self.job.feed(event, self.now)
        for action in actions:
            self._carry_out(action)
        self.check()
        return actions

    def list(self, hosts: Iterable[tuple[str, int]]) -> tuple[Action, ...]:
        hosts = tuple(hosts)
        self.listed = dict(hosts)
        return self.feed(HostsListed(hosts))

    def ask(self, actor: Actor, **details: object) -> tuple[Action, ...]:
        """A worker registers, or repeats what it has asked."""
        if actor.asked is None:
            actor.asked = Registered(actor.id, actor.epoch, **details)  # type: ignore[arg-type]
            actor.up = False
        return self.feed(actor.asked)

    def arrive(self, actor: Actor) -> tuple[Action, ...]:
        """It calls ``init()``; or ``elastic.run``, if it was told to go on alone."""
        return self.ask(actor, ready=actor.alone)

    def come_back(
        self, actor: Actor, error: str = "a peer was lost", accused: tuple[int, ...] = (), stood: float = 0.0
    ) -> None:
        for rank in accused:
            other = self.by_rank(actor.epoch, rank)
            if other is not None:
                other.accused = True
        digest = f"commit {actor.serial}"
        self.ask(actor, ready=True, serial=actor.serial, error=error, accused=accused, digest=digest, stood=stood)

    def kill(self, actor: Actor) -> None:
        """Its process ends; the job does not know yet."""
        actor.alive = False

    def see(self, actor: Actor, status: int | None = -9) -> tuple[Action, ...]:
        """The job hears that a process has ended."""
        actor.alive, actor.seen, actor.asked, actor.well = False, True, None, not status
        return self.feed(Gone(actor.id, status, "was killed by signal 9 (SIGKILL)" if status else "has ended"))

    def wait(self) -> bool:
        """Time passes until the job's deadline; False if there is none."""
        if self.job.deadline == float("inf"):
            return False
        self.now = max(self.now, self.job.deadline)
        self.feed(TimePassed())
        return True

    # Who is there.

    def alive(self) -> list[Actor]:
        return [actor for actor in self.actors.values() if actor.alive]

    def by_rank(self, epoch: int, rank: int) -> Actor | None:
        assignment = next((assignment for assignment in self.assignments if assignment.epoch == epoch), None)
        if assignment is None or not 0 <= rank < assignment.size:
            return None
        return self.actors[assignment.members[rank].worker]

    @property
    def members(self) -> list[Actor]:
        """The members of the newest epoch whose processes run."""
        if not self.assignments:
            return []
        actors = [self.actors[member.worker] for member in self.assignments[-1].members]
        return [actor for actor in actors if actor.alive]

    def broken(self) -> bool:
        """Tell whether members of the newest epoch would notice that it is over."""
        if not self.assignments:
            return False
        epoch = self.assignments[-1].epoch
        actors = [self.actors[member.worker] for member in self.assignments[-1].members]
        return self.voided >= epoch or any(
            not actor.alive or actor.asked is not None or actor.dismissed for actor in actors if not actor.finished
        )

    # What must hold.

    def _carry_out(self, action: Action) -> None:
        match action:
            case Spawn(worker, host, slot, plan):
                assert worker not in self.actors, "an id is used twice"
                assert slot < self.listed[host]
                assert not any((a.host, a.slot) == (host, slot) for a in self.actors.values() if not a.seen)
                assert plan.ranks[worker] < plan.size
                self.actors[worker] = Actor(worker, host, slot)
            case Stop(worker):
                actor = self.actors[worker]
                assert not actor.stopped
                actor.stopped = True
                self._may_be_stopped(actor)
            case Formed(assignment, again=""):
                self._formed(assignment)
            case Formed(assignment, again):
                actor = self._answered(again)
                assert actor.epoch == assignment.epoch == self.assignments[-1].epoch
            case Alone(worker, plan):
                actor = self._answered(worker)
                assert not actor.alone
                assert worker in plan.ranks
                actor.alone = True
            case Dismissed(worker, fate, reason):
                assert reason
                assert fate in Fate
                if worker in self.actors:
                    self._answered(worker).dismissed = True
            case Announce(serial, update):
                assert serial > self.serial
                assert update != self.update
                self.serial, self.update = serial, update
            case Voided(epoch, reason):
                assert reason
                # What is decided at once may be the next assignment, too: its only member is back.
                assert self.voided < epoch <= self.job.assignment.epoch
                self.voided = epoch
            case Tell(text):
                self.told.append(text)
            case Changed():
                self.changes.append(action)
            case Ended():
                assert self.ended is None
                assert action.text
                assert action.failure is None or action.failure.status != 0
                self.ended = action
            case _:
                raise AssertionError(f"unknown: {action}")

    def _answered(self, worker: str) -> Actor:
        actor = self.actors[worker]
        assert actor.asked is not None, f"{worker} is answered, and has not asked"
        actor.asked = None
        return actor

    def _may_be_stopped(self, actor: Actor) -> None:
        """No worker is killed that is not accused, late, or on a host that is out."""
        host_out = actor.slot >= self.listed.get(actor.host, 0) or self.job._pool.hosts.slots(actor.host, self.now) == 0
        host_out = host_out or actor.was_out  # it was told to leave, had its time, and its slot may be listed again
        late = self.now >= self.limit or actor.accused or actor.epoch == self.voided
        assert host_out or late or actor.dismissed, f"{actor} is killed, and has done nothing"

    def _formed(self, assignment: Assignment) -> None:
        assert not self.assignments or assignment.epoch > self.assignments[-1].epoch
        largest = self.rules.largest or 10**9
        assert (
            1 <= (self.rules.smallest if self.changes or self.hold else self.rules.size) <= assignment.size <= largest
        )
        members = [self.actors[member.worker] for member in assignment.members]
        self._note_hosts()
        for actor in members:
            assert not actor.dismissed
            assert not actor.stopped
            assert not actor.seen
            assert actor.slot < self.job._pool.hosts.slots(actor.host, self.now), "it is on a host that is out"
        old = [actor.rank for actor in members if actor.rank is not None]
        serials = [actor.serial for actor in members]
        self._check_order(assignment, members)
        if any(actor.synced for actor in self.actors.values()):
            assert max(serials) > NO_STATE, "no member has the state"
            assert serials[assignment.root] == max(serials)
            assert serials.index(max(serials)) == assignment.root
        assert not assignment.everyone or len(set(serials)) == 1
        if old:
            assert members[0].rank is not None, "rank 0 is a newcomer"
        # What is accounted for: no worker that is alive and could come back is left behind.
        if self.assignments:
            for member in self.assignments[-1].members:
                actor = self.actors[member.worker]
                late = actor.accused and not self.rules.launched  # it cannot be ended
                out = actor.seen or actor.stopped or actor.dismissed or actor.was_out or late
                assert member.worker in assignment.ranks or out or actor.asked is not None, f"{actor} is forgotten"
        for rank, actor in enumerate(members):
            self._answered(actor.id)
            actor.epoch, actor.rank, actor.alone, actor.up = assignment.epoch, rank, False, False
        self.assignments.append(assignment)

    def _check_order(self, assignment: Assignment, members: list[Actor]) -> None:
        """Survivors keep their order, a host's ranks are consecutive, and slots give local ranks."""
        hosts = [member.host for member in assignment.members]
        assert [host for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host] == list(dict.fromkeys(hosts))
        firsts = []
        for host, _ in assignment.slots:
            on_it = [actor for actor in members if actor.host == host]
            old = [actor.rank for actor in on_it if actor.rank is not None]
            assert old == sorted(old)
            assert all(actor.rank is not None for actor in on_it[: len(old)])
            firsts.append(min(old) if old else 10**9)
            by_slot = sorted(on_it, key=lambda actor: actor.slot)
            for actor in on_it:
                member = assignment.members[members.index(actor)]
                assert member.local_rank == by_slot.index(actor)
                if [a.slot for a in by_slot] == list(range(len(by_slot))):
                    assert member.local_rank == actor.slot
        assert firsts == sorted(firsts)

    def check(self) -> None:
        """Check the invariants that hold whenever the job has processed an event."""
        job = self.job
        self._note_hosts()
        assert (self.ended is not None) == job.final
        if job.final:
            assert not any(actor.asked for actor in self.actors.values() if not actor.seen), "a worker waits for ever"
        elif job.phase is not Phase.RUNNING and any(actor.asked for actor in self.alive()):
            assert job.deadline < float("inf"), f"{job.phase} has no deadline"
        if job.phase in (Phase.CONNECTING, Phase.RUNNING) and self.assignments:
            for actor in (self.actors[member.worker] for member in self.assignments[-1].members):
                over = actor.stopped or (actor.seen and not actor.well) or (actor.asked is not None)
                ending = job._departures.ending
                assert not over or ending, f"epoch {job.assignment.epoch} is void without {actor}, and goes on"
        limit = self.rules.reset_limit
        assert limit is None or job.resets <= limit
        assert len(self.changes) <= job.resets + 1
        waiting = {actor.id for actor in self.actors.values() if actor.asked is not None and not actor.seen}
        assert waiting == {worker.id for worker in job._pool.workers.values() if worker.pending}

    def time_alone(self) -> Phase:
        """Let time pass without further events."""
        for _ in range(5000):
            if self.job.phase in UNTROUBLED or not self.wait():
                break
        assert self.job.phase in UNTROUBLED or not any(actor.asked for actor in self.actors.values() if not actor.seen)
        return self.job.phase

    def cooperate(self) -> Phase:
        """Let all workers that still run do what they should, and let all pending events arrive."""
        for _ in range(50):
            if self.job.final:
                break
            busy = False
            for actor in list(self.actors.values()):
                if self.job.final:
                    break
                busy |= self._cooperate(actor)
            if not busy:
                break
        else:
            raise AssertionError("it goes on without end")
        return self.job.phase

    def _cooperate(self, actor: Actor) -> bool:
        if (not actor.alive or actor.stopped or actor.dismissed) and not actor.seen:
            self.see(actor, -9 if not actor.dismissed or actor.stopped else 0)
        elif actor.seen or actor.asked is not None or actor.finished:
            return False
        elif actor.epoch < 0:
            self.arrive(actor)
        elif self.broken() and actor in self.members:
            self.come_back(actor)
        elif not actor.up:
            self.say_up(actor)
        else:
            return False
        return True

    def say_up(self, actor: Actor) -> None:
        actor.up = True
        self.feed(Up(actor.id, actor.epoch))
        if not self.job.final:
            actor.synced, actor.serial = True, max(actor.serial, 0)
            self.feed(Synced(actor.id, actor.epoch))

    def _note_hosts(self) -> None:
        for actor in self.actors.values():
            actor.was_out |= actor.slot >= self.job._pool.hosts.slots(actor.host, self.now)
