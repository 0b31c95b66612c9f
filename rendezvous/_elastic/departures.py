"""Workers of an elastic job that leave it: by their own end, with their host, or because they are ended."""

from __future__ import annotations

import math

from hvdgloo.rendezvous._elastic.causes import Causes
from hvdgloo.rendezvous._elastic.events import Action, Dismissed, Fate, Gone, HostLost, Leaving, Stop, Tell, Voided
from hvdgloo.rendezvous._elastic.phases import Phase, PhaseTracker
from hvdgloo.rendezvous._elastic.pool import Pool
from hvdgloo.rendezvous._elastic.worker import Stage, Worker
from hvdgloo.topology import counted_slots

LEAVING_TIME = 30.0
"""Seconds in which a worker of a removed host must end by itself."""


class Departures:
    """Everything about workers that are in no further epoch.

    Args:
        out: receives the actions to carry out.

    Attributes:
        ending: the reason why there will be no further epoch; empty as long as there may be one.
    """

    def __init__(self, pool: Pool, phases: PhaseTracker, causes: Causes, out: list[Action]) -> None:
        self.ending = ""
        self._pool = pool
        self._rules = pool.rules
        self._phases = phases
        self._causes = causes
        self._out = out
        self._voided = -1  # last epoch that was declared void

    def gone(self, event: Gone) -> None:
        """Process the end of a worker's process."""
        worker = self._pool.workers.get(event.worker)
        if worker is None:
            return
        fits = self._pool.fits(worker)
        self._pool.remove(worker)
        if self._pool.ran and worker.stage is not Stage.FINISHED and not worker.out:
            self.mention(f"{worker} {event.reason}")
        if not self._rules.launched and self._phases.phase is Phase.RUNNING and worker.stage is Stage.MEMBER:
            # If its host was cut off, no connection closes: the others would wait for it.
            self.void(f"{worker} {event.reason}")
        told_over = bool(worker.out) and worker.fate is Fate.OVER
        if not event.status and worker.stage is Stage.FINISHED:
            self._pool.well.add(worker.id)
        elif event.status == 0 and self._may_finish(worker):
            self._pool.well.add(worker.id)
            self.finish(worker, "has ended with status 0")
        elif worker.stage is Stage.FINISHED or (told_over and event.status) or (fits and not worker.out):
            self._causes.blame(worker, event.status, event.reason)
            self._pool.failed(worker)
            self.count(worker.host, f"{worker} {event.reason}")

    def _may_finish(self, worker: Worker) -> bool:
        """Return whether a worker that ended with status 0 without reporting so has finished its training."""
        if self._phases.phase is Phase.WAITING or worker.pending or worker.out or not self._pool.is_member(worker):
            return False
        return not (worker.fresh and self._pool.ran)

    def finish(self, worker: Worker, how: str) -> None:
        """End training after a member that ended as it should: there is no further epoch."""
        if self.ending:
            return
        self.ending = f"{worker} {how}"
        for other in self._pool.workers.values():
            if other.stage in (Stage.RETURNED, Stage.STANDBY, Stage.ARRIVED):
                fate = Fate.REMOVED if other.fresh and self._pool.ran else Fate.OVER
                self.exclude(other, fate, self.ending)

    def host_lost(self, event: HostLost) -> None:
        """Process the loss of a host with all of its workers."""
        lost = [worker for worker in self._pool.workers.values() if worker.host == event.host]
        blamed = [worker for worker in lost if not worker.out and self._pool.fits(worker)]
        for worker in lost:
            self._pool.remove(worker)
        for worker in blamed:
            if worker.stage is Stage.STARTING:
                self._causes.could_not_start(worker, event)
            else:
                self._causes.blame(worker, event.status, f"was lost: {event.reason}", event.reason)
        self.count(event.host, event.reason)
        if self._phases.phase is Phase.RUNNING and any(self._pool.is_member(worker) for worker in lost):
            # A host that was cut off closes no connection: without this its peers would wait for it.
            self.void(f"host {event.host} was lost: {event.reason}")

    def leaving(self, event: Leaving) -> None:
        """Process a worker's notice that its host is about to be given back."""
        self._pool.hosts.leaves(event.host)
        worker = self._pool.workers.get(event.worker)
        if worker is not None:
            worker.leaving = True

    def end_the_late(self) -> None:
        """End the workers whose time to return or to end is over."""
        for worker in list(self._pool.workers.values()):
            if self._pool.now >= worker.end_by:
                worker.end_by = math.inf
                reason = worker.end_reason
                if not worker.out:
                    self._causes.blame(worker, None, f"was ended: {reason}")
                    self.count(worker.host, f"{worker} was ended: {reason}")
                if self._rules.launched or worker.out:
                    self.drop(worker, reason)
                else:  # no launcher can end it: if it returns after all, it is a new worker
                    self._pool.remove(worker)
                    self.mention(f"{worker} is no longer waited for: {reason}")

    def count(self, host: str, reason: str, *, at_once: bool = False) -> None:
        """Count a failure against its host, which is left out if there were too many."""
        until = self._pool.hosts.failed(host, reason, self._pool.now, at_once=at_once)
        if until is None or self.ending:
            return
        back = "" if until == math.inf else f" for {until - self._pool.now:.0f} s"
        shown = self._pool.hosts.shown(host)
        self._out.append(Tell(f"host {shown} is left out{back}: {reason}", (host, shown)))
        for worker in list(self._pool.workers.values()):
            if worker.host == host:
                self.drop(worker, f"host {host} is left out: {reason}")

    def drop(self, worker: Worker, reason: str) -> None:
        """End a worker, which is in no further epoch."""
        self.exclude(worker, Fate.REMOVED, reason)
        worker.end_by = math.inf
        if self._rules.launched and not worker.stopped:
            worker.stopped = True
            self._out.append(Stop(worker.id, reason))

    def exclude(self, worker: Worker, fate: Fate, reason: str) -> None:
        """Exclude a worker from all further epochs. It is told so now if it waits, and otherwise when it asks."""
        if not worker.out:
            worker.out, worker.fate = reason, fate
            if worker.pending:
                self.tell_fate(worker)

    def tell_fate(self, worker: Worker) -> None:
        """Tell a waiting worker that it is in no further epoch."""
        worker.stage = Stage.DISMISSED
        self._out.append(Dismissed(worker.id, worker.fate, worker.out))

    def remove(self, worker: Worker) -> None:
        """Give a worker whose slot can no longer be used time to end by itself."""
        reason = self._why_unfit(worker)
        self.exclude(worker, Fate.REMOVED, reason)
        worker.end_by, worker.end_reason = self._pool.now + LEAVING_TIME, reason
        self._causes.note(reason)
        self.mention(reason)

    def _why_unfit(self, worker: Worker) -> str:
        if worker.leaving:
            return f"{worker} leaves, as it was asked to end"
        slots = self._pool.slots(worker.host)
        return f"host {worker.host} {f'has only {counted_slots(slots)} now' if slots else 'was removed'}"

    def dismiss_spares(self) -> None:
        """End workers that are in no epoch and whose slot cannot be used."""
        for worker in list(self._pool.workers.values()):
            if worker.out or self._pool.fits(worker):
                continue
            if worker.stage is Stage.RETURNED and self._phases.phase is Phase.WAITING:
                self.remove(worker)
            elif worker.fresh and not (self._phases.phase is Phase.FORMING and self._pool.is_member(worker)):
                self.drop(worker, self._why_unfit(worker))
                self.mention(worker.out)

    def void(self, reason: str) -> None:
        """Tell the members of the epoch once not to wait for each other."""
        if self._voided < self._pool.assignment.epoch:
            self._voided = self._pool.assignment.epoch
            self._out.append(Voided(self._pool.assignment.epoch, reason))

    def mention(self, text: str) -> None:
        """Report a worker that arrived or left, unless a launcher does."""
        if not self._rules.launched:
            self._out.append(Tell(text))
