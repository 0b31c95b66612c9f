"""This rank's reports, and where they go: see ``hvdgloo._observe``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdgloo._backends.plane_reason import why
from hvdgloo._net.event_loop import WakeUp
from hvdgloo._observe import samples
from hvdgloo._observe.counters import Counters
from hvdgloo._observe.outlets import AgentOutlet, Outlet, ServerOutlet
from hvdgloo._observe.reporter import RankInEpoch, Reporter
from hvdgloo._observe.settings import shown
from hvdgloo.config import Config

if TYPE_CHECKING:
    from hvdgloo._engine.engine import Engine
    from hvdgloo.rendezvous import RendezvousClient

_RANKS_PER_SECOND = 100
"""The approximate number of observations per second that a job without agents sends to a rendezvous server."""

_ANSWER_SECONDS = 2.0


def reporter_of(
    config: Config,
    engine: Engine,
    counters: Counters,
    client: RendezvousClient,
    clock_offset: float,
    wake_up: WakeUp,
) -> Reporter:
    """Return what reports on an engine's rank: to the agent that has started this worker, otherwise to the server.

    Args:
        counters: what the engine writes into.
        client: of the rendezvous server.
        clock_offset: seconds that rank 0's clock is ahead of this host's.
        wake_up: ends its waits.
    """
    size, interval = engine.topology.size, config.observe_interval
    outlet: Outlet
    if config.observer:
        outlet = AgentOutlet(config.observer)
    else:
        outlet = ServerOutlet(partial(client.observe, timeout=_ANSWER_SECONDS))
        interval = max(interval, size / _RANKS_PER_SECOND)
    return Reporter(counters, _Rank(config, engine, clock_offset), outlet, interval, wake_up)


class _Rank:
    """The rank as a Reporter sees it, see ``reporter.Subject``."""

    def __init__(self, config: Config, engine: Engine, clock_offset: float) -> None:
        self._config, self._engine, self._clock_offset = config, engine, clock_offset
        topology = engine.topology
        self.place = RankInEpoch(engine.rank, topology.size, topology.epoch)
        self.oldest_pending: Callable[[], tuple[str, float]] = engine.oldest_pending
        self.stop_trace: Callable[[], None] = partial(engine.timelines.stop, asked_for=True)

    def planes(self) -> Sequence[samples.Plane]:
        topology = self._engine.topology
        return [
            samples.Plane(plane.label, number, device, why(plane.backend.name, topology, ranks, device))
            for number, device, plane, ranks in self._engine.planes
        ]

    def gpu(self) -> int:
        found = [getattr(plane.memory, "gpu_index", -1) for _, _, plane, _ in self._engine.planes]
        return max(found, default=-1)

    def settings(self) -> dict[str, Any] | None:
        if self.place.rank:
            return None
        in_use = self._engine.settings_in_use
        now: dict[str, Any] = {
            "fusion_threshold": in_use.fusion_threshold,
            "cycle_time": in_use.cycle_time * 1000,
            "inline_threshold": in_use.inline_threshold,
        }
        if in_use.hierarchical_threshold:
            now["hierarchical_threshold"] = in_use.hierarchical_threshold
        return shown(replace(self._config, **now))

    def missing(self, least: float) -> tuple[Sequence[samples.Missing], Sequence[tuple[int, str]]]:
        overdue, stacks = self._engine.overdue(least)
        now = time.monotonic()
        missing = [
            samples.Missing(each.name, now - each.since, each.missing[:16], len(each.missing)) for each in overdue
        ]
        return missing, [*stacks.items()]

    def start_trace(self, path: str) -> bool:
        return self._engine.timelines.start(path, clock_offset=self._clock_offset, asked_for=True)
