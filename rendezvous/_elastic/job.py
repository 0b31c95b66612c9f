"""The members of an elastic job, epoch by epoch: one pure state machine for the launcher and for hvdgloo-rendezvous.

Events go in, actions come out (``hvdgloo.rendezvous._elastic.events``), and times are the caller's. ::

                 enough workers             all have registered             all are connected
     WAITING -----------------> FORMING -----------------------> CONNECTING ----------------> RUNNING
       ^ |                        | ^                                |                          |
       | |      one has ended     | |         one has failed, ended  |      one has returned,   |
       | +<-----------------------+ |         or returned            v      ended, or is out    |
       |                            +---- (never answered twice) DRAINING <---------------------+
       +---------------------------------------------------------+
                  every member of the last epoch is accounted for

**Accounting decides, not timing.** An epoch is decided when each member of the last one has returned for the next,
has ended, or is out (its host was removed or left out). So it makes no difference whether a worker or the launcher
notices a failure first, and no worker can end up in an epoch that the others do not know.

**A failure voids an epoch that is being formed** or connected, so that no member waits for one that will not join.
Requests without a reply stay pending; workers that got a reply ask again.

**Every wait has a deadline**, except for the end of training itself, and for the first worker in ``init()``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from hvdgloo.rendezvous._elastic.attempts import ATTEMPTS, ConnectionAttempts
from hvdgloo.rendezvous._elastic.causes import Causes
from hvdgloo.rendezvous._elastic.departures import Departures
from hvdgloo.rendezvous._elastic.events import (
    RESET_LIMIT_EXCEEDED_MESSAGE,
    Action,
    Changed,
    Dismissed,
    Ended,
    Event,
    Failing,
    Fate,
    Finished,
    Formed,
    Gone,
    HostLost,
    HostsListed,
    Identified,
    Leaving,
    Recalled,
    Registered,
    Rules,
    Silent,
    Synced,
    Tell,
    TimePassed,
    Up,
    Update,
)
from hvdgloo.rendezvous._elastic.newcomers import Newcomers
from hvdgloo.rendezvous._elastic.phases import NEXT, SAY_SOON, Phase, PhaseTracker
from hvdgloo.rendezvous._elastic.pool import Pool, listed
from hvdgloo.rendezvous._elastic.worker import Stage, Worker
from hvdgloo.rendezvous._membership.assignment import NO_MEMBERS, NO_STATE, Assignment, choose
from hvdgloo.topology import abbreviated

ACCUSED_TIME = 2.0
"""Seconds in which a worker that others lost must return, or it is ended: its process may have been stopped."""

UNCONNECTED_TIME = 10.0
"""The same if others could not connect with it: the network may be the cause, and the worker may be waiting, too."""

RETURN_TIME = 2.0
"""Seconds in which the workers of a running job find a restarted server, which forms no other epoch until then."""

P = Phase
_STATE_LOST = "no worker is left that has the state of the training"


class ElasticJob:
    """The members of one elastic job.

    Args:
        rules: the user's options.
        now: current time in seconds, on the clock of all other times.
        chance: returns a random number from 0 to 1, so that hosts do not return all at once.
        hold: seconds in which no epoch is formed, since workers of an earlier server may be in training.
        epochs: number of earlier epochs, with which numbering starts.
    """

    def __init__(
        self,
        rules: Rules,
        now: float,
        chance: Callable[[], float] = random.random,
        *,
        hold: float = 0.0,
        epochs: int = 0,
    ) -> None:
        self.rules = rules
        self._pool = Pool(rules, now, chance)
        self._pool.epoch = epochs - 1
        self._phases = PhaseTracker(self._pool, hold)
        self._causes = Causes(self._pool)
        self._out: list[Action] = []
        self._departures = Departures(self._pool, self._phases, self._causes, self._out)
        self._newcomers = Newcomers(self._pool, self._phases, self._departures, self._out)
        self._has_state = False  # True once any worker had a state to continue from
        self._failed = ""  # why the job failed
        self._attempts = ConnectionAttempts()
        self._held_up_at = math.inf  # time since which the first worker that returned from training has waited
        self._began_at = -math.inf  # begin of the last training
        self._ends_at = self._settled_at = self._next_return = math.inf  # as of the last event that was not routine
        self._owing: set[str] | None = None  # members that owe what the next phase waits for, if that is known

    # Queries.

    @property
    def phase(self) -> Phase:
        """Present phase; changed only by ``feed``."""
        return self._phases.phase

    @property
    def resets(self) -> int:
        """Number of times that workers formed another epoch and reached training."""
        return self._pool.resets

    @property
    def final(self) -> bool:
        return not NEXT[self.phase]

    @property
    def deadline(self) -> float:
        """Time at which to feed ``TimePassed`` if nothing else happens; infinite if time alone changes nothing."""
        if self.final:
            return math.inf
        times = [self._phases.say_at, self._phases.limit, self._ends_at]
        waits = self.phase in (P.WAITING, P.DRAINING) and not self._unused
        if waits or (self._departures.ending and self.phase is P.RUNNING):
            # In WAITING nothing is decided before both are over.
            earliest = self._phases.not_before if self.phase is P.WAITING else -math.inf
            times.append(max(self._phases.patience, earliest))
        if self.phase in (P.WAITING, P.RUNNING, P.DRAINING):
            times += [self._next_return, self._pool.rested_at()]
        if self.phase is P.WAITING and self._phases.not_before > self._pool.now:
            times.append(self._phases.not_before)
        if self.phase is P.RUNNING and not self._newcomers.announced & Update.ADDED:
            times.append(self._settled_at)
        return min(times)

    def feed(self, event: Event, now: float) -> tuple[Action, ...]:
        """Process an event.

        Returns:
            the actions to carry out, in order.
        """
        self._out.clear()
        self._pool.now = now
        if self.final:
            if isinstance(event, Registered):
                self._refuse_after_the_end(event)
            return tuple(self._out)
        match event:
            case Registered():
                self._registered(event)
            case Recalled():
                self._recalled(event)
            case Up() | Synced():
                self._progressed(event)
            case Finished(worker):
                self._worker_finished(worker)
            case Gone():
                self._departures.gone(event)
            case HostLost():
                self._departures.host_lost(event)
            case HostsListed(hosts, machines):
                self._pool.hosts.update(hosts, dict(machines))
                if self.phase is P.WAITING and self.rules.launched:
                    self._phases.say_at = min(self._phases.say_at, now + SAY_SOON)
            case Identified(host, identity):
                self._pool.hosts.identified(host, identity)
            case Leaving():
                self._departures.leaving(event)
            case Silent():
                self._newcomers.silent(event)
            case TimePassed():
                self._departures.end_the_late()
        if not self._is_routine(event):
            self._decide()
        return tuple(self._out)

    def _decide(self) -> None:
        """Do all that follows from the last event. This looks at every worker."""
        while self._step():
            pass
        if not self.final:
            self._newcomers.spawn()
            self._departures.dismiss_spares()
            self._newcomers.announce()
            if text := self._phases.notice():
                self._out.append(Tell(text))
        self._ends_at = min((worker.end_by for worker in self._pool.workers.values()), default=math.inf)
        self._settled_at = self._pool.settled_at()
        self._next_return = self._pool.hosts.next_return(self._now)

    def _is_routine(self, event: Event) -> bool:
        """Return whether nothing follows from an event yet, since other workers owe the same: at the start of thousands
        of workers, only the last one makes a difference.
        """
        owing, self._owing = self._owing, None
        worker = self._pool.workers.get(event.worker) if isinstance(event, Registered | Up | Synced) else None
        if worker is None or self._departures.ending:
            return False
        if isinstance(event, Registered) and (event.after >= 0 or not self._pool.stays(worker)):
            return False
        if isinstance(event, Registered) and self.phase is P.WAITING and not self.rules.launched:
            return not self._has_state and len(self._pool.workers) < self._pool.needed
        if not isinstance(event, _OWED.get(self.phase, ())):
            return False
        if owing is None:
            owing = {other.id for other in self._phases.missing()}
        if not self._phases.owes(worker):
            owing.discard(worker.id)
        self._owing = owing or None
        return bool(owing)

    @property
    def assignment(self) -> Assignment:
        """The newest epoch's members; none before the first one."""
        return self._pool.assignment

    @property
    def waiting_for(self) -> str:
        """Description of what the workers wait for; empty if they do not wait, or nothing more is known."""
        return self._phases.awaited()

    @property
    def _now(self) -> float:
        return self._pool.now

    @property
    def _unused(self) -> bool:
        """True if there are no workers, and no launcher that will start some."""
        return not self.rules.launched and not self._pool.workers

    # Events.

    def _registered(self, event: Registered) -> None:
        self._forget_before(event.after)
        worker = self._pool.workers.get(event.worker)
        if worker is None and self.rules.launched:
            self._out.append(Dismissed(event.worker, Fate.REMOVED, "the job does not know this worker any more"))
            return
        worker = worker or self._meet(event)
        worker.pid = event.pid
        if worker.out:
            self._departures.tell_fate(worker)
        elif worker.pending:
            pass  # it asks again
        elif worker.stage is Stage.MEMBER and event.after < worker.epoch and not self._pool.is_recalled:
            self._out.append(Formed(self.assignment, worker.id))  # the answer was lost
        elif worker.stage in (Stage.MEMBER, Stage.FINISHED):
            self._returned(worker, event)
        elif self._departures.ending:
            self._departures.exclude(worker, Fate.REMOVED, self._departures.ending)
            self._departures.tell_fate(worker)
        elif event.ready:
            worker.stage, worker.ready_at = Stage.STANDBY, self._now
        elif self._pool.collecting:
            worker.stage = Stage.ARRIVED
            if self.phase is P.FORMING:
                self._phases.limit = self._now + self.rules.start_timeout
        else:
            self._newcomers.welcome(worker)

    def _meet(self, event: Registered) -> Worker:
        """Add a worker that was not announced. It may have been a member in the time of an earlier server."""
        if self._unused and self.phase is P.WAITING:
            # The job's time starts with its first worker.
            self._phases.patience = self._now + self.rules.elastic_timeout
        worker = self._pool.meet(event)
        known = event.after == self.assignment.epoch and self._pool.is_free(event.rank)
        if event.after >= 0 and (self.assignment is NO_MEMBERS or known):
            worker.stage, worker.rank, worker.epoch = Stage.MEMBER, event.rank or 0, event.after
            self._pool.epoch = max(self._pool.epoch, event.after)
            self._pool.ran = True
            self._pool.record(worker)
            self._phases.not_before = self._now + RETURN_TIME
        elif self._pool.ran:
            self._departures.mention(f"{worker} has arrived")
        return worker

    def _recalled(self, event: Recalled) -> None:
        """Learn a worker's epoch, which an earlier server formed if this one does not know it."""
        self._forget_before(event.epoch)
        if self.rules.launched or event.worker in self._pool.workers or not self._pool.recall(event):
            return
        self._has_state = self._has_state or event.synced
        if self.phase is P.WAITING:
            size = self.assignment.size
            epoch = f"epoch {event.epoch}, of {size} member{'s' * (size > 1)},"
            self._departures.mention(f"{epoch} has been in training since before this server's start")
            self._phases.patience = math.inf
            self._phases.go(P.RUNNING)
            self._newcomers.welcome_arrived()

    def _forget_before(self, epoch: int) -> None:
        """Forget a recalled epoch that is earlier than one that a worker knows: the others continued without the
        worker that reported it. Its members are new workers when they return.
        """
        if self._pool.is_recalled and epoch > self.assignment.epoch:
            self._pool.forget()
            if self.phase is P.RUNNING:
                self._phases.go(P.DRAINING)
            if self.phase is P.DRAINING:
                self._phases.go(P.WAITING)

    def _returned(self, worker: Worker, event: Registered) -> None:
        worker.serial, worker.digest = event.serial, event.digest
        worker.end_by = math.inf
        self._held_up_at = min(self._held_up_at, max(self._began_at, self._now - event.stood))
        self._has_state = self._has_state or event.serial != NO_STATE
        if event.error:
            self._causes.note(f"{worker}: {event.error}", heard=True)
        grace = UNCONNECTED_TIME if self.phase is P.CONNECTING else ACCUSED_TIME
        for rank in event.accused:
            other = self._pool.at_rank(rank)
            if other is None or other is worker:
                continue
            if self.phase is P.CONNECTING:
                self._attempts.accuse(other.host)
            if other.stage is Stage.MEMBER and self._now + grace < other.end_by:
                other.end_by = self._now + grace
                other.end_reason = f"{worker} has lost it, and it has not returned within {grace:g} s"
        if self._departures.ending:
            self._departures.exclude(worker, Fate.OVER, self._departures.ending)
            self._departures.tell_fate(worker)
        else:
            worker.stage = Stage.RETURNED

    def _progressed(self, event: Up | Synced) -> None:
        worker = self._pool.workers.get(event.worker)
        if worker is None or worker.stage is not Stage.MEMBER or worker.epoch != event.epoch:
            return
        if isinstance(event, Up):
            worker.up = True
        else:
            worker.synced = self._has_state = True

    def _worker_finished(self, id: str) -> None:
        worker = self._pool.workers.get(id)
        if worker is not None and worker.stage is Stage.MEMBER and not worker.out:
            worker.stage = Stage.FINISHED
            self._departures.finish(worker, "has finished its training")

    # Phases.

    def _step(self) -> bool:
        """Go to the next phase if its conditions hold; return False if the phase stays the same."""
        before = self.phase
        if self._departures.ending and self.phase is not P.CONNECTING:
            self._end()
        else:
            _STEPS[self.phase](self)
        return self.phase is not before and not self.final

    def _wait(self) -> None:
        """Form an epoch of the candidates, if there are enough of them (WAITING)."""
        self._newcomers.spawn()
        there = self._pool.candidates()
        if self._now < self._phases.not_before:
            return
        lost = self._has_state and not any(worker.serial != NO_STATE for worker in there if not worker.fresh)
        if lost and (not self._pool.unheard or self._now >= self._phases.patience):
            self._fail(self._state_lost())
        elif lost:
            pass  # a member that has not been heard from may have it, and returns when it finds this server
        elif len(there) >= self._pool.needed:
            self._form(there)
        elif self._pool.hopeless():
            self._fail(f"{self._pool.there()}, and no others can come")
        elif self._now >= self._phases.patience and not self._unused:
            self._fail(f"{self._pool.there()} after {self.rules.elastic_timeout:g} s (--elastic-timeout)")

    def _form(self, there: list[Worker]) -> None:
        if self._pool.ran and self._pool.resets_left <= 0:
            # The failure of a worker that was not a member did not stop the training.
            failure = self._causes.failure or Failing(reason=self._causes.why)
            self._fail(RESET_LIMIT_EXCEEDED_MESSAGE.format(self.rules.reset_limit), failure)
            return
        self._pool.epoch += 1
        self._pool.is_recalled = False
        self._pool.assignment = choose(self._pool.epoch, [worker.candidate() for worker in there], self.rules.largest)
        self._phases.limit = math.inf
        if any(worker.pending for worker in there):
            self._phases.limit = self._now + self.rules.start_timeout
        self._phases.go(P.FORMING)

    def _gather(self) -> None:
        """Reply to the members of the assignment once all of them have registered (FORMING)."""
        members = self._pool.members()
        if len(members) < self.assignment.size or not all(self._pool.stays(worker) for worker in members):
            self._phases.go(P.WAITING)
            if not any(self._pool.stays(worker) for worker in members):
                self._fail("no worker is left that could begin the training")
        elif all(worker.pending for worker in members):
            for worker in members:
                worker.stage, worker.up = Stage.MEMBER, False
                worker.rank, worker.epoch = self.assignment.ranks[worker.id], self.assignment.epoch
            self._out.append(Formed(self.assignment))
            self._causes.trouble = ""
            # Their own deadlines come first, and tell more.
            self._phases.limit = self._now + 3 * self.rules.connect_timeout
            self._phases.go(P.CONNECTING)
        elif self._now >= self._phases.limit:
            for worker in self._phases.missing():
                reason = f"has not called hvd.init() within {self.rules.start_timeout:g} s (--start-timeout)"
                self._causes.blame(worker, None, reason)
                self._departures.count(worker.host, f"{worker} {reason}")
                self._departures.drop(worker, f"it {reason}")
            self._gather()

    def _connect(self) -> None:
        """Wait until all are connected, unless one cannot be (CONNECTING)."""
        members, unconnected = self._pool.members(), self._phases.missing()
        if self._pool.doomed():
            tried = len(members) == self.assignment.size and not any(worker.out for worker in members)
        elif not unconnected:
            self._run()
            return
        elif self._now >= self._phases.limit:
            for worker in unconnected:
                self._attempts.accuse(worker.host)
                worker.end_by, worker.end_reason = self._now + UNCONNECTED_TIME, "it has not connected with the others"
            self._causes.note(f"{unconnected[0]} has not connected with the others")
            tried = True
        else:
            return
        self._departures.void(self._causes.trouble or "its members change")
        self._phases.go(P.DRAINING)
        accused = self._attempts.failed(self.assignment) if tried else None
        if accused:
            self._departures.count(accused, f"others have failed to connect with it {ATTEMPTS} times", at_once=True)
        elif accused is not None:
            self._fail(f"the workers have failed to connect {ATTEMPTS} times: {self._causes.trouble}")

    def _run(self) -> None:
        """Begin or continue training: all members are connected."""
        if self._pool.ran:
            self._pool.resets += 1
        self._pool.ran = True
        stood = self._now - min(self._phases.stopped_at, self._held_up_at)
        self._out.append(Changed(self.assignment, self._causes.why, stood))
        self._began_at, self._held_up_at = self._now, math.inf
        self._causes.clear()
        self._phases.patience = math.inf
        self._newcomers.welcome_arrived()
        self._attempts.clear()
        self._phases.go(P.RUNNING)

    def _watch(self) -> None:
        """End the epoch as soon as one member has returned, has ended, or is being ended (RUNNING)."""
        if self._pool.doomed():
            self._phases.go(P.DRAINING)

    def _drain(self) -> None:
        """Wait until every member is accounted for (DRAINING)."""
        members, awaited = self._pool.members(), self._phases.missing()
        if not awaited:
            # Members that have not been heard from may be on the way to this server.
            self._phases.not_before = self._now + RETURN_TIME if self._pool.unheard else -math.inf
            for worker in members:
                if not self._pool.fits(worker):
                    self._departures.remove(worker)
            self._phases.go(P.WAITING)
            if all(worker.out for worker in members) and not self._pool.unheard:
                left = bool(members) and all(worker.leaving for worker in members)
                lost = self._state_lost() if self._has_state else "all workers have ended, or were removed"
                self._fail("all workers were asked to end, and have left" if left else lost)
        elif self._now >= self._phases.patience:
            self._fail(f"{listed(awaited)} did not come back within {self.rules.elastic_timeout:g} s")

    def _end(self) -> None:
        """Wait until all members have ended, once one has finished its training."""
        members, ending = self._pool.members(), self._departures.ending
        if self.phase is P.FORMING and any(worker.stage is Stage.DISMISSED for worker in members):
            self._fail(f"{ending} without calling hvd.init(), in which others waited for it")
        elif self.phase is P.FORMING and self._causes.has_failed:
            self._fail("a worker has failed before it called hvd.init()")
        elif self.phase is P.FORMING and len(members) + self._done < self.rules.smallest:
            self._fail(f"{ending} without calling hvd.init(), and fewer than --min-np workers are left")
        elif all(not self.rules.launched and (worker.out or worker.stage is Stage.FINISHED) for worker in members):
            if not self._causes.has_failed:
                self._phases.go(P.OVER)
                self._out.append(Ended(f"all workers have finished; {ending}"))
            else:
                self._fail(f"{ending}, but not every worker has ended with status 0")
        elif self._causes.failure is not None and self._phases.patience == math.inf:
            self._phases.patience = self._now + self.rules.elastic_timeout
        elif self.phase is not P.FORMING and self._now >= self._phases.patience:
            self._fail(f"{ending}, and others did not end within {self.rules.elastic_timeout:g} s")

    @property
    def _done(self) -> int:
        """Number of members of the newest epoch that ended with success."""
        return sum(member.worker in self._pool.well for member in self.assignment.members)

    def _state_lost(self) -> str:
        """Say that no worker has the state any more, and why workers whose processes had not ended are out."""
        reasons = list(dict.fromkeys(worker.out for worker in self._pool.members() if worker.out))
        return abbreviated([_STATE_LOST, *reasons], show=4, separator="; ")

    def _fail(self, text: str, failure: Failing | None = None) -> None:
        self._phases.go(P.FAILED)
        self._failed = text
        for worker in self._pool.workers.values():
            if worker.pending:
                self._departures.exclude(worker, Fate.FAILED, text)
        self._out.append(Ended(text, failure or self._causes.failing(text)))

    def _refuse_after_the_end(self, event: Registered) -> None:
        worker = self._pool.workers.get(event.worker)
        if worker is not None and worker.out:
            self._out.append(Dismissed(event.worker, worker.fate, worker.out))
        elif self.phase is P.OVER:
            fate = Fate.REMOVED if event.after < 0 else Fate.OVER
            self._out.append(Dismissed(event.worker, fate, self._departures.ending))
        else:
            self._out.append(Dismissed(event.worker, Fate.FAILED, self._failed))


_OWED: Mapping[Phase, type[Event]] = {P.FORMING: Registered, P.CONNECTING: Up, P.RUNNING: Synced}
"""Event that each member of a new epoch owes in a phase."""

_STEPS: Mapping[Phase, Callable[[ElasticJob], None]] = {
    P.WAITING: ElasticJob._wait,
    P.FORMING: ElasticJob._gather,
    P.CONNECTING: ElasticJob._connect,
    P.RUNNING: ElasticJob._watch,
    P.DRAINING: ElasticJob._drain,
}
