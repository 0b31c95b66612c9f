"""Ranks, as threads of one process, that have simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdgloo._backends import cuda
from hvdgloo._backends.base import Backend, Plane
from hvdgloo._job.context import Context
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer
from tests.support.gpus import OnTheHost, Simulated
from tests.support.gpus.clocks import Clock
from tests.support.world import DEADLINE, World

T = TypeVar("T")


class GpuWorld(World):
    """A World whose every run ends with the checker's verdict, while it is the test's own."""

    def __init__(self, gpus: Simulated, size: int, **options: Any) -> None:
        self._gpus = gpus
        super().__init__(size, **options)

    def run(
        self, function: Callable[[Any], T], made: Callable[[Context], Any] | None = None, deadline: float = DEADLINE
    ) -> list[T]:
        """As World's.

        Raises:
            AssertionError: two accesses to one memory had no order.
        """
        machine = self._gpus.machine
        known = Clock(machine.knowledge)

        def knowing(context: Context) -> T:  # a thread that begins, and one that ends, has told the other what it knew
            machine.knowledge.join(known)
            try:
                return function(context if made is None else made(context))
            finally:
                with machine.lock:
                    known.join(machine.knowledge)

        results = super().run(knowing, deadline=deadline)
        machine.knowledge.join(known)
        machine.check()
        return results


def planes(timeout: float = 10.0, operations: str = "auto") -> Callable[..., Sequence[Plane]]:
    """Return a function that opens the planes of a world's ranks, each on a GPU of its own.

    Args:
        timeout: seconds that connecting may take.
        operations: as HVDGLOO_GPU_OPERATIONS.
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
            timeout=timeout,
            **more,
        )

    return open_device


def world(
    gpus: Simulated, size: int = 2, operations: str = "nccl", connect_timeout: float = 10.0, **settings: Any
) -> World:
    """Ranks whose CUDA tensors travel as in a job, over NCCL or through the host.

    Args:
        operations: as HVDGLOO_GPU_OPERATIONS.
        connect_timeout: seconds.
        settings: as World's.
    """
    return GpuWorld(
        gpus,
        size,
        wrap=lambda _, backend: OnTheHost(gpus.machine, backend),
        open_device=planes(connect_timeout, operations),
        **settings,
    )
