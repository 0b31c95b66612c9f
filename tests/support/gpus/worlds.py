"""Ranks, as threads of one process, that have simulated GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdgloo._backends import cuda
from hvdgloo._backends.base import Backend, Plane
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer
from tests.support.gpus import OnTheHost, Simulated
from tests.support.world import World


def world(
    gpus: Simulated, size: int = 2, operations: str = "nccl", connect_timeout: float = 10.0, **settings: Any
) -> World:
    """Ranks whose CUDA tensors travel as in a job, over NCCL or through the host.

    Args:
        operations: as HVDGLOO_GPU_OPERATIONS.
        connect_timeout: seconds.
        settings: as World's.
    """
    store = MemoryStore()

    def open_device(
        rank: int, number: int, ranks: Sequence[int], host: Backend, example: Buffer, **more: Any
    ) -> Sequence[Plane]:
        return cuda.open_planes(
            host,
            example,
            store=store,
            prefix=f"{number}/",
            ranks=ranks,
            rank=ranks.index(rank),
            local_rank=rank,
            operations=operations,
            timeout=connect_timeout,
            **more,
        )

    return World(size, wrap=lambda _, backend: OnTheHost(gpus.machine, backend), open_device=open_device, **settings)
