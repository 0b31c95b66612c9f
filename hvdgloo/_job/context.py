"""One rank's membership in a job: settings, topology and engine, opened and closed together.

Front-ends work in the process's only Context, which ``process.current()`` returns; tests and embedding programs
construct their own, which allows many ranks in one process.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from hvdgloo.config import Config
from hvdgloo.topology import Topology
from hvdgloo.types import Metrics, PlaneMetrics

if TYPE_CHECKING:
    from hvdgloo._engine.engine import Engine
    from hvdgloo._job.reporting import Reporting
    from hvdgloo._observe.counters import Counters
    from hvdgloo.rendezvous import Alone, RendezvousClient


class Follower(Protocol):
    """An object that keeps state for a job's Context and lives on in the next one, such as an optimizer."""

    def job_ended(self) -> None:
        """Note that the Context was closed; none of its collectives is under way. Must not raise."""
        ...


class Context:
    """One rank of a job.

    Args:
        config: its settings.
        topology: of the whole job.
        rank: this rank.
        engine: started; the Context owns it from now on.
        clock_offset: seconds that rank 0's clock is ahead of this host's.
        job_rank: this rank among all of the job's, if the Context's world consists of some of them only.
        plan: of a newcomer to an elastic job that works alone so far: the place that it will probably get. It is what
            the program is told; ``topology`` and the engine know this process only.
        world: tells this world from all others that the secret's holders have formed or will form, the same on all its
            ranks.
        client: of the rendezvous server. It stays connected while the rank is part of the job, since the server lists
            connected ranks.
        reporting: of this rank, which ends with the Context; None if no observer could look at it.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        rank: int,
        engine: Engine,
        client: RendezvousClient | None = None,
        clock_offset: float = 0.0,
        job_rank: int | None = None,
        world: str = "",
        plan: Alone | None = None,
        reporting: Reporting | None = None,
    ) -> None:
        self._client = client
        self._reporting = reporting
        self.plan = plan
        self.traced: tuple[str, bool] | None = None
        self.world = world
        self.job_rank = rank if job_rank is None else job_rank
        self.clock_offset = clock_offset
        self.config = config
        self.topology = topology
        self.rank = rank if plan is None else plan.rank
        self.engine = engine
        self.closed = False
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()

    @property
    def secret(self) -> bytes | None:
        """The job's secret; None in a job of a single process, which has none."""
        return self.config.secret

    @property
    def size(self) -> int:
        return self.topology.size if self.plan is None else self.plan.size

    @property
    def local_rank(self) -> int:
        return self.topology.workers[self.rank].local_rank if self.plan is None else self.plan.local_rank

    @property
    def local_size(self) -> int:
        return self.topology.local_size(self.rank) if self.plan is None else self.plan.local_size

    @property
    def cross_rank(self) -> int:
        return self.topology.cross_rank(self.rank) if self.plan is None else self.plan.cross_rank

    @property
    def cross_size(self) -> int:
        return self.topology.cross_size(self.rank) if self.plan is None else self.plan.cross_size

    def is_root(self, root: int) -> bool:
        """Return whether a broadcast from that rank sends this process's value."""
        return self.rank == root or self.plan is not None

    @property
    def is_homogeneous(self) -> bool:
        return self.topology.is_homogeneous

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Trace collectives; on rank 0, or if ``path`` has ``{rank}`` in it, on every rank; see ``OpenTimelines``.

        Ranks are numbered as in the whole job, even in a world of only some of them: two worlds must not write to one
        file. In an elastic job each epoch but the first has a file of its own (``path.e2.json``), and a newcomer writes
        none before it is in an epoch.
        """
        if self.traced is None:
            self.traced = path, mark_cycles
        if self.plan is not None:
            return
        if self.topology.epoch and self.config.elastic:
            stem, suffix = os.path.splitext(path)
            path = f"{stem}.e{self.topology.epoch}{suffix}"
        if "{rank}" in path or self.job_rank == 0:
            own = path.replace("{rank}", str(self.job_rank))
            self.engine.timelines.start(own, clock_offset=self.clock_offset, mark_cycles=mark_cycles)

    def stop_timeline(self) -> None:
        """End the trace, if there is one; its file is complete then."""
        self.traced = None
        self.engine.timelines.stop()

    def metrics(self) -> Metrics:
        """Return this process's counts so far; nothing but zeros with ``HVDGLOO_OBSERVE=0``."""
        return counted(self.engine.counters, self.rank, self.size)

    def end_step(self) -> None:
        """Count a training step that has ended, such as an ``optimizer.step()``."""
        if self.engine.counters is not None:
            self.engine.counters.step()

    def count_outer_steps(self, count: int, nbytes: int, seconds: float, *, every: int) -> None:
        """Count outer steps, and the time for which one kept the program from its inner steps.

        Args:
            count: number of outer steps that ended; 0 if one has only begun.
            nbytes: size of what this rank sent in them.
            seconds: time that this took.
            every: number of inner steps from one outer step to the next.
        """
        if self.engine.counters is not None:
            self.engine.counters.count_outer_steps(count, nbytes, seconds, every)

    def tell_of_end(self, follower: Follower) -> None:
        """Have ``follower``, which is not kept alive for this, told once when the Context has been closed."""
        self._followers.add(follower)

    def close(self, reason: str = "") -> None:
        """End this rank's part of the job; see ``Engine.close``."""
        self.closed = True
        if self._reporting is not None:
            self._reporting.close(failing=bool(reason))
        self.engine.close(reason)
        followers, self._followers = list(self._followers), weakref.WeakSet()
        for follower in followers:
            follower.job_ended()
        if self._client is not None:
            self._client.close()


def counted(counters: Counters | None, rank: int, size: int) -> Metrics:
    """Return a process's counts so far; nothing but zeros where none are kept."""
    if counters is None:
        return Metrics(rank, size)
    from hvdgloo._observe.resources import cpu_seconds, resident_bytes

    waiting, communicating = counters.blocked(time.monotonic())
    planes: dict[str, PlaneMetrics] = {}
    for traffic in [*counters.traffic.values()]:
        before = planes.get(traffic.plane, PlaneMetrics())
        planes[traffic.plane] = PlaneMetrics(
            before.operations + traffic.operations,
            before.bytes + traffic.bytes,
            before.seconds + traffic.seconds,
            before.wire_bytes + traffic.wire_bytes,
            max(before.wire_error, traffic.error),
        )
    return Metrics(
        rank,
        size,
        operations=counters.operations,
        bytes=counters.bytes,
        steps=counters.steps,
        step_seconds=counters.step_seconds,
        step_waiting=counters.step_waiting,
        step_communicating=counters.step_communicating,
        step_before_first=counters.before_first,
        last_step=counters.last_step,
        outer_steps=counters.outer_steps,
        outer_bytes=counters.outer_bytes,
        outer_seconds=counters.outer_seconds,
        since_outer_step=max(0.0, time.time() - counters.outer_ended) if counters.outer_steps else 0.0,
        waiting=waiting,
        communicating=communicating,
        negotiation=counters.negotiation,
        queue=counters.queue,
        data=counters.data,
        copy=counters.copy,
        wire=counters.wire,
        cpu_seconds=cpu_seconds(),
        memory=resident_bytes(),
        planes=planes,
        logged=counters.logged,
    )
