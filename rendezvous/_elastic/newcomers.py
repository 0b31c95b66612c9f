"""New workers of an elastic job: started in free slots, and announced to the members, which they join later."""

from __future__ import annotations

import math

from hvdgloo.rendezvous._elastic.departures import Departures
from hvdgloo.rendezvous._elastic.events import Action, Alone, Announce, Join, Silent, Spawn, Tell, Update
from hvdgloo.rendezvous._elastic.phases import Phase, PhaseTracker
from hvdgloo.rendezvous._elastic.pool import Pool
from hvdgloo.rendezvous._elastic.worker import Stage, Worker


class Newcomers:
    """The starts of workers, and the announcements of changes.

    Args:
        out: receives the actions to carry out.

    Attributes:
        announced: the last announcement.
    """

    def __init__(self, pool: Pool, phases: PhaseTracker, departures: Departures, out: list[Action]) -> None:
        self.announced = Update.NONE
        self._pool = pool
        self._rules = pool.rules
        self._phases = phases
        self._departures = departures
        self._out = out
        self._serial = 0
        self._told_of_slots = False

    def spawn(self) -> None:
        """Start workers in the free slots, if they can ever join."""
        phase = self._phases.phase
        if not self._rules.launched or self._departures.ending or phase in (Phase.FORMING, Phase.CONNECTING):
            return
        if not self._pool.ran and (phase is not Phase.WAITING or self._pool.capacity() < self._rules.size):
            return
        if phase is Phase.RUNNING and self._pool.resets_left == 0:
            return
        entered = phase is Phase.WAITING or all(worker.synced for worker in self._pool.members())
        if not entered and self._told_of_slots:
            return
        free = self._pool.free_slots()
        if free and not entered:
            self._told_of_slots = True
            hosts = ", ".join(dict.fromkeys(host for host, _ in free))
            self._out.append(
                Tell(
                    f"there are free slots ({hosts}); they are used once all workers have entered elastic.run. A "
                    "program that never does keeps its size"
                )
            )
        if not free or not entered:
            return
        started = [self._pool.create(host, slot) for host, slot in free]
        plan = self._pool.plan()
        self._out += [Spawn(worker.id, worker.host, worker.slot, plan) for worker in started]

    def announce(self) -> None:
        """Announce the change at the members' next commit, if it differs from the last announcement."""
        update = Update.NONE
        if self._phases.phase is Phase.RUNNING and not self._departures.ending:
            staying = sum(self._pool.fits(worker) for worker in self._pool.members()) + self._pool.unheard
            if staying < self._pool.assignment.size:
                update |= Update.REMOVED
            settled_at = self._pool.settled_at()
            settled = self._rules.join is Join.NOW or settled_at == math.inf or self._pool.now >= settled_at
            room = self._rules.largest is None or staying < self._rules.largest
            if room and settled and self._pool.resets_left > 0 and self._pool.joinable():
                update |= Update.ADDED
        if update != self.announced:
            self._serial += 1
            self.announced = update
            self._out.append(Announce(self._serial, update))

    def silent(self, event: Silent) -> None:
        """End a silent worker that is the only member, if others want to join it. Other members lose it anyway."""
        worker = self._pool.workers.get(event.worker)
        alone = worker is not None and self._pool.is_member(worker) and self._pool.assignment.size == 1
        if worker is not None and alone and self._phases.phase is Phase.RUNNING and self.announced & Update.ADDED:
            worker.end_by = self._pool.now
            worker.end_reason = f"it has not answered for {event.seconds:.0f} s, and others want to join it"
            self._departures.end_the_late()

    def welcome_arrived(self) -> None:
        """Let workers that wait in ``init()`` continue alone, since others are in training."""
        for worker in self._pool.workers.values():
            if worker.stage is Stage.ARRIVED and not self._pool.collecting:
                self.welcome(worker)

    def welcome(self, worker: Worker) -> None:
        """Let a worker in ``init()`` continue alone, until it is at ``elastic.run``."""
        worker.stage = Stage.ALONE
        self._out.append(Alone(worker.id, self._pool.plan()))
