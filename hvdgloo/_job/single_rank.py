"""Engines of one rank: of a job that consists of one process, and of a newcomer until it is let into a job."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from hvdgloo._backends.local import LocalGroup
from hvdgloo._backends.select import Planes, plane_settings
from hvdgloo._engine.engine import Engine
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.submission import PersistentRequest
from hvdgloo._job.settings import engine_settings
from hvdgloo._observe.counters import Counters
from hvdgloo.config import Config
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.topology import Topology
from hvdgloo.types import Buffer, TensorSpec

logger = logging.getLogger(__name__)


def open_single_rank(config: Config, kind: type[Engine] = Engine, *, counters: Counters | None = None) -> Engine:
    """Start the engine, of class ``kind``, of a process that is all ranks itself; it writes into ``counters``."""
    topology = Topology.local(1, pid=os.getpid(), name=host_name(config.hostname))
    alone = LocalGroup(1).backend(0)
    planes = Planes(config, plane_settings(config), topology, 0, MemoryStore(), "", "127.0.0.1")
    engine = kind(
        0,
        topology,
        {},
        alone,
        engine_settings(config),
        lambda number, ranks, cancelled: alone,
        planes.open_device,
        counters=counters,
    )
    engine.start()
    return engine


class ProvisionalEngine(Engine):
    """The engine of a newcomer to an elastic job, before it reaches ``elastic.run``.

    Programs for elastic jobs call collectives there, in the belief that the others do so, too. They are in training,
    so these act on this worker alone, and a broadcast takes what is its own for the root's.
    """

    _told = False

    def launch(
        self,
        persistent: PersistentRequest,
        handle: Handle,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer] | None = None,
        *,
        allocate: Callable[[int, TensorSpec], Buffer] | None = None,
        ready: Callable[[], None] | None = None,
        splits: Sequence[int] = (),
        waits: bool = False,
    ) -> None:
        """See ``Engine``."""
        request = persistent.request
        if not self._told:
            self._told = True
            logger.warning(
                "%s: this worker joined while others are in training, so until it is in elastic.run, collectives act "
                "on it alone. state.sync() there gives it what the others have",
                request.name,
            )
        if request.collective.has_root and request.root:
            persistent = PersistentRequest(replace(request, root=0))
        arguments: dict[str, Any] = {"allocate": allocate, "ready": ready, "splits": splits, "waits": waits}
        super().launch(persistent, handle, inputs, outputs, **arguments)
