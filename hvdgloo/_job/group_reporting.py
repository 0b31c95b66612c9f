"""Reports and timeline of a process that exchanges tensors in groups of its own, as torch.distributed's are, and has no
Context whose reports and timeline would show them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hvdgloo._engine.open_timelines import OpenTimelines
from hvdgloo._job.reporting import Reporting
from hvdgloo._net.event_loop import WakeUp
from hvdgloo._observe.counters import Counters
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError

if TYPE_CHECKING:
    from hvdgloo._observe import samples
    from hvdgloo._observe.reporter import RankInEpoch, Reporter

logger = logging.getLogger(__name__)


class Groups(Protocol):
    """The groups of a process; any thread may call."""

    def oldest_pending(self) -> tuple[str, float]:
        """Return the operation waited for longest, and since when; an empty name if there is none."""
        ...

    def planes(self) -> Sequence[samples.Plane]:
        """Return what the groups' operations go over."""
        ...

    def missing(self, least: float) -> Sequence[samples.Missing]:
        """Return the operations that have waited at least ``least`` seconds for other ranks."""
        ...


class GroupReporting:
    """The reports of one process, to the agent that started it, and its timeline, from now on.

    Args:
        counters: of the process.
        groups: of the process.
        rank, size: of the group that has all ranks.
        timeline_number: 1 for the process's first timeline; later ones have it in the names of their files.
    """

    def __init__(
        self,
        config: Config,
        counters: Counters,
        groups: Groups,
        rank: int,
        size: int,
        *,
        timeline_number: int = 1,
    ) -> None:
        self._counters, self._groups = counters, groups
        self._rank, self._size = rank, size
        self._timelines = OpenTimelines(rank, partial(setattr, counters, "timeline"))
        self._reporting: Reporting | None = None
        path = config.first_timeline
        if path and timeline_number > 1:
            root, extension = os.path.splitext(path)
            path = f"{root}-{timeline_number}{extension}"
        if path and ("{rank}" in path or self._rank == 0):
            try:
                self._timelines.start(path.replace("{rank}", str(self._rank)))
            except ConfigError as error:
                logger.warning("%s", error)
        # Processes that a worker has started have its environment, but other ranks.
        if config.observe and config.observer and config.rank == rank and not config.elastic:
            if self._rank == 0 and self._size > 1:
                from hvdgloo._observe.lateness import LatenessBook  # the other ranks do not need it

                counters.lateness = LatenessBook()
            observer = config.observer
            interval = config.observe_interval

            def make(wake_up: WakeUp) -> Reporter:
                from hvdgloo._observe.outlets import AgentOutlet
                from hvdgloo._observe.reporter import Reporter  # which jobs that are not observed hardly need

                return Reporter(counters, self, AgentOutlet(observer), interval, wake_up)

            self._reporting = Reporting(make, interval, lambda: os.path.exists(observer))

    def close(self) -> None:
        """Send a last report, and end the timeline."""
        if self._reporting is not None:
            self._reporting.close()
            self._counters.lateness = None
        self._timelines.close()

    # What the Reporter asks, see ``reporter.Subject`` ----------------------------------------------------------------

    @property
    def place(self) -> RankInEpoch:
        from hvdgloo._observe.reporter import RankInEpoch

        return RankInEpoch(self._rank, self._size, 0)

    def planes(self) -> Sequence[samples.Plane]:
        return self._groups.planes()

    def gpu(self) -> int:
        return -1

    def settings(self) -> dict[str, Any] | None:
        return None

    def oldest_pending(self) -> tuple[str, float]:
        return self._groups.oldest_pending()

    def missing(self, least: float) -> tuple[Sequence[samples.Missing], Sequence[tuple[int, str]]]:
        return self._groups.missing(least), ()

    def start_trace(self, path: str) -> bool:
        return self._timelines.start(path, asked_for=True)

    def stop_trace(self) -> None:
        self._timelines.stop(asked_for=True)
