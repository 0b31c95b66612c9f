"""The phases of an elastic job, how long each of them waits, and the notices about workers that are waited for."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

from hvdgloo.rendezvous._elastic.pool import Pool, listed
from hvdgloo.rendezvous._elastic.worker import Stage, Worker

SAY_AFTER = 10.0
"""Seconds after which a line says which workers are waited for; then again after twice as long."""

SAY_SOON = 2.0
"""The same if there are too few workers or slots, which the user can change."""


class Phase(enum.Enum):
    """A job's phase."""

    WAITING = "there are too few workers or slots"
    FORMING = "the members of the next epoch are known, and some have not registered yet"
    CONNECTING = "the members of an epoch connect with each other"
    RUNNING = "the members of an epoch are in training"
    DRAINING = "the epoch is over, and not all of its members are accounted for"
    FAILED = "the job has failed"
    OVER = "the job has succeeded"


P = Phase
NEXT: Mapping[Phase, frozenset[Phase]] = {
    P.WAITING: frozenset({P.FORMING, P.RUNNING, P.FAILED}),
    P.FORMING: frozenset({P.WAITING, P.CONNECTING, P.FAILED, P.OVER}),
    P.CONNECTING: frozenset({P.RUNNING, P.DRAINING, P.FAILED, P.OVER}),
    P.RUNNING: frozenset({P.DRAINING, P.FAILED, P.OVER}),
    P.DRAINING: frozenset({P.WAITING, P.FAILED, P.OVER}),
    P.FAILED: frozenset(),
    P.OVER: frozenset(),
}
"""The phases that may follow each phase."""


class PhaseTracker:
    """The present phase, and its deadlines.

    Args:
        hold: seconds in which no epoch is formed.

    Attributes:
        phase: present phase; changed only by ``go``.
        patience: time at which missing workers are given up.
        limit: deadline of FORMING and CONNECTING.
        not_before: time before which no epoch is formed.
        stopped_at: time at which the last training stopped.
        say_at: time of the next notice.
    """

    def __init__(self, pool: Pool, hold: float) -> None:
        self._pool = pool
        self._rules = pool.rules
        self.phase = P.WAITING
        self.patience = pool.now + self._rules.elastic_timeout
        self.limit = math.inf
        self.not_before = pool.now + hold
        self.stopped_at = pool.now
        self.say_at, self._say_pause = pool.now + SAY_AFTER, SAY_AFTER

    def go(self, phase: Phase) -> None:
        """Enter another phase."""
        assert phase in NEXT[self.phase], f"{phase.name} cannot follow {self.phase.name}"
        now = self._pool.now
        if self.phase is P.RUNNING:
            self.stopped_at = now
        self.phase = phase
        if phase is P.DRAINING:
            self.patience = now + self._rules.elastic_timeout
        if phase not in (P.FORMING, P.CONNECTING):
            self.limit = math.inf
        self._say_pause = SAY_AFTER
        pause = SAY_SOON if phase is P.WAITING and self._rules.launched else SAY_AFTER
        self.say_at = math.inf if phase in (P.RUNNING, P.OVER) else now + pause

    def notice(self) -> str:
        """Return a line that says what is waited for; empty if it is not time for that, or nothing is known."""
        if self._pool.now < self.say_at:
            return ""
        self._say_pause *= 2
        self.say_at = self._pool.now + self._say_pause
        awaited = self.awaited()
        return f"waiting for {awaited}{self._terms()}" if awaited else ""

    def _terms(self) -> str:
        """Say for how long workers are waited for, and what sets that; empty where it was said at the start."""
        if self.phase is not P.WAITING or not self._rules.launched:
            return ""
        many = "--min-np" if self._pool.ran else "-np"
        left = max(0.0, self.patience - self._pool.now)
        return f". The job ends if they do not arrive within {left:.0f} s; --elastic-timeout and {many} set that"

    def awaited(self) -> str:
        """Describe what the workers wait for; empty if they do not wait, or nothing more is known."""
        missing = self.missing()
        match self.phase:
            case P.WAITING:
                return f"workers: {self._pool.there()}"
            case P.FORMING if len(missing) < len(self._pool.members()):
                return f"{listed(missing)} to call hvd.init()"
            case P.CONNECTING:
                return f"{listed(missing)} to be connected with the others"
            case P.DRAINING if missing:
                return f"{listed(missing)} to come back to elastic.run"
        return ""

    def missing(self) -> list[Worker]:
        """Return the members that owe what the next phase waits for."""
        return [worker for worker in self._pool.members() if self.owes(worker)]

    def owes(self, worker: Worker) -> bool:
        """Return whether a member has not done what the next phase waits for."""
        match self.phase:
            case P.FORMING:
                return not worker.pending
            case P.CONNECTING:
                return not worker.up and worker.stage is not Stage.FINISHED
            case P.RUNNING:
                return not worker.synced
        return self.phase is P.DRAINING and not self._pool.accounted(worker)
