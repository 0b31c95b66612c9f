"""Who is there, where, and who could be in the next epoch: what an elastic job looks up before it decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from hvdgloo.rendezvous._elastic.assignment import Assignment, Member, choose
from hvdgloo.rendezvous._elastic.events import Join, Recalled, Registered, Rules
from hvdgloo.rendezvous._elastic.hosts import Hosts, shortened
from hvdgloo.rendezvous._elastic.worker import Stage, Worker

SETTLE_TIME = 1.0
"""Seconds for which those that are ready wait for others that are about to be, before training is interrupted."""

SHORTEST_REST, LONGEST_REST = 0.5, 5.0
"""Seconds for which a slot stays empty after its second failure in a row before training, and after the fifth: a
program that fails at its start is not started as fast as it fails."""

NOBODY = Assignment(-1, ())
"""The assignment before the first epoch."""

UNHEARD = Member("", "", 0, 0)
"""Placeholder for a member that a restarted server has not heard from yet."""


class Pool:
    """All workers of one job whose processes are, as far as is known, alive, and all of its hosts.

    Args:
        rules: what the user has asked for.
        now: in seconds, on the clock of all other times.
        chance: see ``Hosts``.

    Attributes:
        workers: by id.
        assignment: of the newest epoch.
        epoch: the highest number that was ever used.
        is_recalled: that epoch was formed by a server before this one.
        ran: whether any epoch has come to training.
        well: members that have ended with success.
        now: the time of what is being decided.
    """

    def __init__(self, rules: Rules, now: float, chance: Callable[[], float]) -> None:
        self.rules = rules
        # Without a launcher a worker that has ended says nothing about its host: whatever started it starts another.
        limit = rules.failures_per_host if rules.launched else 1 << 30
        self.hosts = Hosts(limit, rules.cooldown, chance)
        self.workers: dict[str, Worker] = {}
        self.assignment = NOBODY
        self.epoch = -1
        self.is_recalled = False
        self.ran = False
        self.well: set[str] = set()
        self.now = now
        self._numbers = 0
        self._rests: dict[tuple[str, int], tuple[int, float]] = {}  # slot: failures in a row, and until when it rests

    def create(self, host: str, slot: int) -> Worker:
        """A worker that is about to be started."""
        self._numbers += 1
        place = (self.hosts.order(host), slot)
        machine = self.hosts.machine(host)
        worker = Worker(f"{host}/{slot}/{self._numbers}", host, slot, place, machine, host_name=host)
        self.workers[worker.id] = worker
        return worker

    def meet(self, event: Registered | Recalled) -> Worker:
        """A worker that nobody has announced."""
        taken = {worker.slot for worker in self.workers.values() if worker.host == event.host}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        host_name = event.host_name or event.host
        self.hosts.note(event.host, host_name)
        self._numbers += 1
        index = event.index if isinstance(event, Registered) else None
        place = (self._numbers if index is None else index, 0)
        worker = Worker(event.worker, event.host, slot, place, pid=event.pid, host_name=host_name)
        self.workers[worker.id] = worker
        return worker

    def recall(self, event: Recalled) -> bool:
        """Take note of a member of an epoch that a server before this one has formed; False if it is too late."""
        if self.assignment is NOBODY:
            self.assignment = Assignment(event.epoch, (UNHEARD,) * event.size)
            self.is_recalled = True
            self.epoch = max(self.epoch, event.epoch)
            self.ran = True
            for worker in self.workers.values():  # who has come back from there before the others were heard of
                if worker.stage is Stage.RETURNED and worker.epoch == event.epoch:
                    self.record(worker)
        if event.epoch != self.assignment.epoch or not self.is_free(event.rank):
            return False
        worker = self.meet(event)
        worker.stage, worker.rank, worker.epoch = Stage.MEMBER, event.rank, event.epoch
        worker.up, worker.synced = True, event.synced
        self.record(worker)
        return True

    def forget(self) -> None:
        """Know nothing any more of the epoch that a server before this one has formed, nor of its members."""
        for worker in self.members():
            del self.workers[worker.id]
        self.assignment, self.is_recalled = NOBODY, False

    def is_free(self, rank: int | None) -> bool:
        """Whether nobody has been heard of yet who has this rank."""
        return rank is not None and rank < self.assignment.size and self.assignment.members[rank] == UNHEARD

    def record(self, worker: Worker) -> None:
        """A member that has been heard of takes its member."""
        if worker.rank is not None and self.is_free(worker.rank):
            members = list(self.assignment.members)
            members[worker.rank] = Member(worker.id, worker.host, worker.slot, worker.slot, worker.host_name)
            self.assignment = Assignment(self.assignment.epoch, tuple(members))

    @property
    def unheard(self) -> int:
        """Of how many members of the assignment nothing has been heard."""
        return self.assignment.members.count(UNHEARD)

    @property
    def collecting(self) -> bool:
        """Whether newcomers wait in ``init()`` for the next epoch rather than go on alone."""
        return not self.ran or self.rules.join is Join.NOW

    def members(self) -> list[Worker]:
        """Those of the assignment whose processes have not ended, by rank."""
        return [self.workers[member.worker] for member in self.assignment.members if member.worker in self.workers]

    def at_rank(self, rank: int) -> Worker | None:
        """The member of this rank; None if its process has ended, or there is no such rank."""
        return self.workers.get(self.assignment.members[rank].worker) if 0 <= rank < self.assignment.size else None

    def is_member(self, worker: Worker) -> bool:
        return worker.id in self.assignment.ranks

    def fits(self, worker: Worker) -> bool:
        """Whether its slot can be used."""
        return not worker.leaving and worker.slot < self.slots(worker.host)

    def slots(self, host: str) -> int:
        """How many slots of a host can be used."""
        return self.hosts.slots(host, self.now)

    def stays(self, worker: Worker) -> bool:
        return not worker.out and self.fits(worker)

    def accounted(self, worker: Worker) -> bool:
        """Whether it is known what becomes of a member whose process has not ended."""
        return worker.stage is Stage.RETURNED or not self.stays(worker)

    def doomed(self) -> bool:
        """Whether the epoch is over: a member has ended, or is to, or has come back."""
        return any(
            worker is None or worker.out or worker.stage is Stage.RETURNED
            for worker in (self.workers.get(id) for id in self.assignment.ranks if id and id not in self.well)
        )

    def candidates(self) -> list[Worker]:
        """Those of which the next epoch could be formed now."""
        return [
            worker
            for worker in self.workers.values()
            if self.stays(worker) and (worker.pending or (self.collecting and worker.stage is Stage.STARTING))
        ]

    def plan(self) -> Assignment:
        """The next epoch, if all came that could, those included for which there would be no room."""
        all_of_them = [worker.candidate() for worker in self.workers.values() if self.stays(worker)]
        return choose(self.epoch + 1, all_of_them)

    def capacity(self) -> int:
        return sum(slots for _, slots in self.hosts.usable(self.now))

    def hopeless(self) -> bool:
        """Whether there will never be as many workers as are needed."""
        if not self.rules.launched:
            return False
        fixed = not self.rules.hosts_may_come and self.hosts.next_return(self.now) == math.inf
        return self.hosts.all_out(self.now) or (fixed and self.capacity() < self.needed)

    @property
    def needed(self) -> int:
        """How many workers the next epoch must have at least."""
        return self.rules.smallest if self.ran else self.rules.size

    def there(self) -> str:
        """How many of them there are, for messages."""
        hosts = self.hosts.account(self.now) if self.rules.launched else ""
        if self.rules.launched and not self.ran:
            return f"{self.capacity()} of {self.needed} slots are there ({hosts})"
        there = self.candidates()
        if not self.rules.launched:
            counts = Counter(worker.host_name for worker in there)
            hosts = ", ".join(shortened([f"{name} {count}" for name, count in counts.items()]))
        return f"{len(there)} of {self.needed} workers are there" + (f" ({hosts})" if hosts else "")

    def free_slots(self) -> list[tuple[str, int]]:
        """Slots for further workers, in the order in which they are to be filled, and no more than may be used."""
        room = math.inf
        if self.rules.largest is not None:
            room = self.rules.largest - sum(self.stays(worker) for worker in self.workers.values())
        taken = {(worker.host, worker.slot) for worker in self.workers.values()}
        taken |= {slot for slot, (_, until) in self._rests.items() if until > self.now}
        free: list[tuple[str, int]] = []
        for host, slots in self.hosts.usable(self.now):
            for slot in range(slots):
                if len(free) >= room:
                    return free
                if (host, slot) not in taken:
                    free.append((host, slot))
        return free

    def failed(self, worker: Worker) -> None:
        """Its slot rests, unless it was in training, or was the first to fail there."""
        slot = (worker.host, worker.slot)
        failures = self._rests.pop(slot, (0, 0.0))[0] + 1
        if not worker.synced:
            rest = min(SHORTEST_REST * 2.0 ** (failures - 2), LONGEST_REST) if failures > 1 else 0.0
            self._rests[slot] = (failures, self.now + rest)

    def rested_at(self) -> float:
        """When the next slot has rested; infinite if none does."""
        return min((until for _, until in self._rests.values() if until > self.now), default=math.inf)

    def joinable(self) -> list[Worker]:
        """Newcomers for which training would be interrupted."""
        stages = {Stage.STANDBY}
        if self.rules.join is Join.NOW:
            stages |= {Stage.STARTING, Stage.ARRIVED}
        return [w for w in self.workers.values() if w.fresh and w.stage in stages and self.stays(w)]

    def settled_at(self) -> float:
        """Until when those that are ready wait for others that will be, so that training is interrupted once."""
        ready = [worker.ready_at for worker in self.workers.values() if worker.stage is Stage.STANDBY]
        others = any(w.stage in (Stage.STARTING, Stage.ALONE) and not w.out for w in self.workers.values())
        return min(ready) + SETTLE_TIME if ready and others else math.inf


def listed(workers: Sequence[Worker], show: int = 8) -> str:
    """Workers as in messages."""
    more = len(workers) - show
    return ", ".join(map(str, workers[:show])) + (f" and {more} more" if more > 0 else "")
