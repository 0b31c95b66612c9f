"""The members of a job whose number may not change: registrations in, ranks out. Pure, like the elastic job: it uses no
clock, lock or socket, and times are the caller's.

::

                all have registered
    GATHERING ----------------------> COMPLETE
        |
        | no further worker for too long, or ranks that cannot be
        +------------------------------------------------------> FAILED

It knows which workers are expected, admits them, and assigns the ranks once all have registered:

* **with a launcher** the slots are known: ``hosts`` has the number of workers of each host, and each worker brings its
  rank.
* **without one** only the number is known. Workers with the same host identity form a host. Hosts are in order of their
  first worker's arrival, and so are a host's workers; if workers bring an index, the lower index goes first instead.

The deadline moves with each worker that registers, as long as there are more than ever before: a hundred workers on two
cores import one after the other, and the last may register long after the first. But a worker that is restarted again
and again does not keep the others waiting.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from hvdgloo.rendezvous._membership.admission import NotAcceptedError, count_by_host, taken
from hvdgloo.rendezvous._membership.assignment import NO_MEMBERS, Assignment, Candidate, choose
from hvdgloo.rendezvous._worker_info import WorkerInfo
from hvdgloo.topology import abbreviated, ranges


class State(enum.Enum):
    """The state of a FixedMembership."""

    GATHERING = "gathering"
    COMPLETE = "complete"
    FAILED = "failed"


class FixedMembership:
    """The workers of one epoch.

    Args:
        epoch: number of the epoch.
        size: number of expected workers, without a launcher.
        hosts: (name, slots) in order, with a launcher. Exactly one of ``size`` and ``hosts`` is given.
        start_timeout: seconds without a further worker after which the epoch fails.

    Attributes:
        workers: the admitted workers by client, in order of arrival.
        assignment: the members' ranks; without members unless complete.
        failure: reason of the failure, which names the workers that are missing; empty if it has not failed.
        gathered_in: seconds from the first worker's arrival to the last one's; 0 unless complete.

    Raises:
        ValueError: neither or both of ``size`` and ``hosts`` are given, or there is no slot.
    """

    def __init__(
        self,
        epoch: int,
        *,
        size: int | None = None,
        hosts: Sequence[tuple[str, int]] | None = None,
        start_timeout: float = math.inf,
    ) -> None:
        if (size is None) == (hosts is None):
            raise ValueError("an epoch needs either the number of workers (size) or the hosts with their slots (hosts)")
        if any(slots < 1 for _, slots in hosts or ()):
            raise ValueError("every host of an epoch needs at least one slot")
        # With a launcher: each rank's host, by its number and its name. A host may be listed twice.
        self._homes = [(str(host), name) for host, (name, slots) in enumerate(hosts or ()) for _ in range(slots)]
        self.size = len(self._homes) if size is None else size
        if self.size < 1:
            raise ValueError(f"an epoch needs at least one worker, not {self.size}")
        self.epoch = epoch
        self.start_timeout = start_timeout
        self.workers: dict[str, WorkerInfo] = {}
        self.assignment: Assignment = NO_MEMBERS
        self.failure = ""
        self.gathered_in = 0.0
        self._claims: dict[int, str] = {}  # rank or index to the client that has it
        self._most = 0
        self._began_at = self._progress_at = 0.0

    @property
    def launched(self) -> bool:
        """True if a launcher knows the workers' ranks."""
        return bool(self._homes)

    @property
    def state(self) -> State:
        return State.FAILED if self.failure else State.COMPLETE if self.assignment.members else State.GATHERING

    @property
    def arrived(self) -> int:
        return len(self.workers)

    @property
    def deadline(self) -> float:
        """Time at which it fails unless a further worker registers; infinite if there is no worker, or none is missing.

        So the epoch's time starts with the first worker that stays.
        """
        waits = self.state is State.GATHERING and self.workers
        return self._progress_at + self.start_timeout if waits else math.inf

    def idle(self, now: float) -> float:
        """Return the seconds since the number of workers last reached a new maximum."""
        return now - self._progress_at

    def join(self, client: str, info: WorkerInfo, now: float) -> None:
        """Admit a worker; with the last one the epoch is complete, or fails. The same client may repeat the call.

        A failed epoch admits none: all are told of the failure.

        Raises:
            NotAcceptedError: it brings no rank although ranks are known, a rank out of range, or another client's rank,
                or the epoch is full.
        """
        if self.failure:
            return
        known = self.workers.get(client)
        if known is not None:
            if known != info:
                raise NotAcceptedError("this client has already registered as another worker", taken=True)
            return
        claim = self._claim(info)
        if self.arrived == self.size:
            full = f"epoch {self.epoch} is complete: {self.summary()}"
            raise taken(self.workers.values(), info, "a worker", full)
        if not self.workers:
            self._began_at, self._most = now, 0
        self.workers[client] = info
        if claim is not None:
            self._claims[claim] = client
        if self.arrived > self._most:
            self._most, self._progress_at = self.arrived, now
        if self.arrived == self.size:
            self._complete(now)

    def leave(self, client: str) -> bool:
        """Forget a worker that left before all had registered, so that its place is free for one started in its stead.

        Returns:
            False if it had not registered, or if it is too late.
        """
        if self.state is not State.GATHERING or client not in self.workers:
            return False
        claim = _number(self.workers.pop(client))
        if claim is not None:
            del self._claims[claim]
        return True

    def pass_time(self, now: float) -> None:
        """Fail if the deadline has passed."""
        if now >= self.deadline:
            self.failure = (
                f"epoch {self.epoch} did not start: no further worker came for {self.start_timeout:g} s, and "
                f"{self.summary()}. Look at the missing workers' output; if they only need longer, raise the start "
                "timeout"
            )

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not registered; empty without a launcher, since they are not known then."""
        return [rank for rank in range(len(self._homes)) if rank not in self._claims]

    def arrived_by_host(self) -> dict[str, int]:
        """Return the number of admitted workers by host name, hosts in order; a host without any has 0."""
        if not self.launched:
            return count_by_host((info.host_identity, info.host_name) for info in self.workers.values())
        arrived = Counter(self._homes[rank][1] for rank in self._claims)
        return {name: arrived[name] for _, name in self._homes}

    def expected_by_host(self) -> dict[str, int]:
        """Return the number of expected workers by host name; empty without a launcher."""
        return Counter(name for _, name in self._homes)

    def summary(self) -> str:
        """Describe the number of admitted workers, their hosts, and the missing ranks, for errors and for people."""
        expected = self.expected_by_host()
        parts = [
            f"{name} {arrived} of {expected[name]}" if name in expected else f"{name} {arrived}"
            for name, arrived in self.arrived_by_host().items()
        ]
        text = f"{self.arrived} of {self.size} {'worker is' if self.size == 1 else 'workers are'} in"
        if parts:
            text += f" (hosts: {abbreviated(parts)})"
        missing = self.missing_ranks()
        if missing:
            text += f"; missing: rank {ranges(missing)}"
        return text

    def _claim(self, info: WorkerInfo) -> int | None:
        """Return a new worker's claim to a place: a rank, an index, or None."""
        if self.launched and info.rank is None:
            raise NotAcceptedError(
                f"a launcher knows the ranks of epoch {self.epoch}, but this worker brings none (HVDGLOO_RANK)"
            )
        if info.rank is not None and info.rank >= self.size:
            raise NotAcceptedError(f"rank {info.rank} does not exist: epoch {self.epoch} has {self.size} workers")
        kind, others = _kind(info), _kind(next(iter(self.workers.values()), info))  # all admitted workers agree
        if kind != others:
            raise NotAcceptedError(
                f"this worker brings {kind}, but others bring {others}: set HVDGLOO_RANK, or HVDGLOO_INDEX, for all "
                "workers or for none"
            )
        claim = _number(info)
        if claim is not None and claim in self._claims:
            other = self.workers[self._claims[claim]]
            what = "rank" if info.rank is not None else "index"
            raise taken(
                [other],
                info,
                f"{what} {claim}",
                f"{what} {claim} of epoch {self.epoch} is taken by pid {other.pid} on host {other.host_name}; two "
                f"workers were started with the same {what}, or this one was started again",
            )
        return claim

    def _complete(self, now: float) -> None:
        assignment = choose(self.epoch, list(self._candidates()))
        for rank, member in enumerate(assignment.members):
            info = self.workers[member.worker]
            if info.rank not in (None, rank):
                self.failure = (
                    f"epoch {self.epoch} cannot start: rank {info.rank} is on host {info.host_name}, but ranks must "
                    f"fill hosts one after the other: by that order it would be rank {rank}. Number the workers of "
                    "each host consecutively, or leave out their ranks and let the rendezvous server choose"
                )
                return
        self.assignment, self.gathered_in = assignment, now - self._began_at

    def _candidates(self) -> Iterator[Candidate]:
        for arrival, (client, info) in enumerate(self.workers.items()):
            claim = _number(info)
            order = arrival if claim is None else claim
            host, name = self._homes[order] if self.launched else (info.host_identity, info.host_name)
            yield Candidate(client, host, order, None, (order, 0), host_name=name)


def _kind(info: WorkerInfo) -> str:
    return "a rank" if info.rank is not None else "an index" if info.index is not None else "neither rank nor index"


def _number(info: WorkerInfo) -> int | None:
    return info.index if info.rank is None else info.rank
