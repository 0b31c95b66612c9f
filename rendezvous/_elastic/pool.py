"""The pool of an elastic job's workers, their hosts, and the candidates for the next epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hvdgloo.rendezvous._elastic.events import Join, Recalled, Registered, Rules
from hvdgloo.rendezvous._elastic.hosts import Hosts
from hvdgloo.rendezvous._elastic.worker import Stage, Worker
from hvdgloo.rendezvous._membership.admission import count_by_host
from hvdgloo.rendezvous._membership.assignment import NO_MEMBERS, Assignment, Member, choose
from hvdgloo.topology import abbreviated

SETTLE_TIME = 1.0
"""Seconds for which ready workers wait for others that are about to be ready, before training is interrupted."""

SHORTEST_REST, LONGEST_REST = 0.5, 5.0
"""Seconds for which a slot stays empty after its second failure in a row before training, and from the fifth on, so
that a program that fails at its start is not started as fast as it fails."""

UNHEARD = Member("", "", 0, 0)
"""Placeholder for a member that a restarted server has not heard from yet."""


class Pool:
    """All hosts of one job, and its workers whose processes are alive as far as is known.

    Args:
        rules: the user's options.
        now: current time in seconds, on the clock of all other times.
        chance: see ``Hosts``.

    Attributes:
        workers: workers by id.
        assignment: assignment of the newest epoch.
        epoch: highest epoch number that was ever used.
        is_recalled: True if an earlier server formed that epoch.
        ran: True if any epoch has reached training.
        resets: number of times that workers formed another epoch and reached training.
        well: members that ended with success.
        now: time of the present decision.
    """

    def __init__(self, rules: Rules, now: float, chance: Callable[[], float]) -> None:
        self.rules = rules
        # Without a launcher, a worker's end tells nothing about its host: its starter starts another one.
        limit = rules.failures_per_host if rules.launched else 1 << 30
        self.hosts = Hosts(limit, rules.cooldown, chance)
        self.workers: dict[str, Worker] = {}
        self.assignment = NO_MEMBERS
        self.epoch = -1
        self.is_recalled = False
        self.ran = False
        self.resets = 0
        self.well: set[str] = set()
        self.now = now
        self._numbers = 0
        self._taken: dict[str, set[int]] = {}  # slots of workers, by host
        self._rests: dict[tuple[str, int], tuple[int, float]] = {}  # slot: failures in a row, end of rest

    def create(self, host: str, slot: int) -> Worker:
        """Add a worker that is about to be started."""
        self._numbers += 1
        place = (self.hosts.order(host), slot)
        machine = self.hosts.machine(host)
        return self._add(Worker(f"{host}/{slot}/{self._numbers}", host, slot, place, machine, host_name=host))

    def meet(self, event: Registered | Recalled) -> Worker:
        """Add a worker that registered without having been announced."""
        taken = self._taken.get(event.host, ())
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        host_name = event.host_name or event.host
        self.hosts.note(event.host, host_name)
        self._numbers += 1
        index = event.index if isinstance(event, Registered) else None
        place = (self._numbers if index is None else index, 0)
        return self._add(Worker(event.worker, event.host, slot, place, pid=event.pid, host_name=host_name))

    def _add(self, worker: Worker) -> Worker:
        self.workers[worker.id] = worker
        self._taken.setdefault(worker.host, set()).add(worker.slot)
        return worker

    def remove(self, worker: Worker) -> None:
        """Remove a worker whose process has ended, or that does not count any more."""
        del self.workers[worker.id]
        self._taken[worker.host].remove(worker.slot)

    def recall(self, event: Recalled) -> bool:
        """Record a member of an epoch that an earlier server formed; return False if it is too late."""
        if self.assignment is NO_MEMBERS:
            self.assignment = Assignment(event.epoch, (UNHEARD,) * event.size)
            self.is_recalled = True
            self.epoch = max(self.epoch, event.epoch)
            self.ran = True
            for worker in self.workers.values():  # returned before others were heard from
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
        """Forget the epoch that an earlier server formed, and its members."""
        for worker in self.members():
            self.remove(worker)
        self.assignment, self.is_recalled = NO_MEMBERS, False

    def is_free(self, rank: int | None) -> bool:
        """Return whether no member with this rank has been heard from yet."""
        return rank is not None and rank < self.assignment.size and self.assignment.members[rank] == UNHEARD

    def record(self, worker: Worker) -> None:
        """Record a member that was heard from in the assignment."""
        if worker.rank is not None and self.is_free(worker.rank):
            members = list(self.assignment.members)
            members[worker.rank] = Member(worker.id, worker.host, worker.slot, worker.slot, worker.host_name)
            self.assignment = Assignment(self.assignment.epoch, tuple(members))

    @property
    def unheard(self) -> int:
        """Number of members of the assignment that have not been heard from."""
        return self.assignment.members.count(UNHEARD)

    @property
    def collecting(self) -> bool:
        """True if new workers wait in ``init()`` for the next epoch rather than continue alone."""
        return not self.ran or self.rules.join is Join.NOW

    @property
    def resets_left(self) -> float:
        """Number of further resets that the rules allow."""
        return math.inf if self.rules.reset_limit is None else self.rules.reset_limit - self.resets

    def members(self) -> list[Worker]:
        """Return the members whose processes have not ended, by rank."""
        return [self.workers[member.worker] for member in self.assignment.members if member.worker in self.workers]

    def at_rank(self, rank: int) -> Worker | None:
        """Return the member of this rank; None if its process has ended, or there is no such rank."""
        return self.workers.get(self.assignment.members[rank].worker) if 0 <= rank < self.assignment.size else None

    def is_member(self, worker: Worker) -> bool:
        return worker.id in self.assignment.ranks

    def fits(self, worker: Worker) -> bool:
        """Return whether the worker's slot can be used."""
        return not worker.leaving and worker.slot < self.slots(worker.host)

    def slots(self, host: str) -> int:
        """Return the number of usable slots of a host."""
        return self.hosts.slots(host, self.now)

    def stays(self, worker: Worker) -> bool:
        return not worker.out and self.fits(worker)

    def accounted(self, worker: Worker) -> bool:
        """Return whether a member whose process has not ended is accounted for: it returned, or is out."""
        return worker.stage is Stage.RETURNED or not self.stays(worker)

    def doomed(self) -> bool:
        """Return whether the epoch is over: a member has ended or returned, or is to end."""
        return any(
            worker is None or worker.out or worker.stage is Stage.RETURNED
            for worker in (self.workers.get(id) for id in self.assignment.ranks if id and id not in self.well)
        )

    def candidates(self) -> list[Worker]:
        """Return the workers of which the next epoch could be formed now."""
        return [
            worker
            for worker in self.workers.values()
            if self.stays(worker) and (worker.pending or (self.collecting and worker.stage is Stage.STARTING))
        ]

    def plan(self) -> Assignment:
        """Return the next epoch if all possible workers joined, even those for which there is no room."""
        all_of_them = [worker.candidate() for worker in self.workers.values() if self.stays(worker)]
        return choose(self.epoch + 1, all_of_them)

    def capacity(self) -> int:
        return sum(slots for _, slots in self.hosts.usable(self.now))

    def hopeless(self) -> bool:
        """Return whether there can never be as many workers as needed."""
        if not self.rules.launched:
            return False
        fixed = not self.rules.hosts_may_come and self.hosts.next_return(self.now) == math.inf
        return self.hosts.all_out(self.now) or (fixed and self.capacity() < self.needed)

    @property
    def needed(self) -> int:
        """Least number of workers of the next epoch."""
        return self.rules.smallest if self.ran else self.rules.size

    def there(self) -> str:
        """Describe the available slots or workers, for messages."""
        hosts = self.hosts.account(self.now) if self.rules.launched else ""
        if self.rules.launched and not self.ran:
            return f"{self.capacity()} of {self.needed} slots are available ({hosts})"
        there = self.candidates()
        if not self.rules.launched:
            counts = count_by_host((worker.host, worker.host_name) for worker in there)
            hosts = abbreviated([f"{name} {count}" for name, count in counts.items()])
        return f"{len(there)} of {self.needed} workers are ready" + (f" ({hosts})" if hosts else "")

    def free_slots(self) -> list[tuple[str, int]]:
        """Return the free slots for further workers, in the order in which they are to be filled."""
        room = math.inf
        if self.rules.largest is not None:
            room = self.rules.largest - sum(self.stays(worker) for worker in self.workers.values())
        resting = {slot for slot, (_, until) in self._rests.items() if until > self.now}
        free: list[tuple[str, int]] = []
        for host, slots in self.hosts.usable(self.now):
            for slot in range(slots):
                if len(free) >= room:
                    return free
                if slot not in self._taken.get(host, ()) and (host, slot) not in resting:
                    free.append((host, slot))
        return free

    def failed(self, worker: Worker) -> None:
        """Let the worker's slot rest, unless the worker was in training or was the first to fail there."""
        slot = (worker.host, worker.slot)
        failures = self._rests.pop(slot, (0, 0.0))[0] + 1
        if not worker.synced:
            rest = min(SHORTEST_REST * 2.0 ** (failures - 2), LONGEST_REST) if failures > 1 else 0.0
            self._rests[slot] = (failures, self.now + rest)

    def rested_at(self) -> float:
        """Return the time at which the next slot has rested; infinite if none rests."""
        return min((until for _, until in self._rests.values() if until > self.now), default=math.inf)

    def joinable(self) -> list[Worker]:
        """Return the new workers for which training would be interrupted."""
        stages = {Stage.STANDBY}
        if self.rules.join is Join.NOW:
            stages |= {Stage.STARTING, Stage.ARRIVED}
        return [w for w in self.workers.values() if w.fresh and w.stage in stages and self.stays(w)]

    def settled_at(self) -> float:
        """Return the time until which ready workers wait for others, so that training is interrupted only once."""
        ready = [worker.ready_at for worker in self.workers.values() if worker.stage is Stage.STANDBY]
        others = any(w.stage in (Stage.STARTING, Stage.ALONE) and not w.out for w in self.workers.values())
        return min(ready) + SETTLE_TIME if ready and others else math.inf


def listed(workers: Sequence[Worker], show: int = 8) -> str:
    """Return workers as a list for messages."""
    return abbreviated(list(map(str, workers)), show)
