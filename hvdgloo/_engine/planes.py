"""A process set as one rank's data thread sees it: its members, and the data planes between them.

The plane of CPU memory exists from the beginning. The planes of CUDA memory are opened when the members first have CUDA
tensors to exchange: only then does each know which GPU it uses. All members reach this point at the same place in the
common order, so the opening may itself exchange messages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from hvdgloo._backends.base import Backend, Memory, Plane, Tunable
from hvdgloo._backends.memory import HostMemory
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer, TensorSpec

logger = logging.getLogger(__name__)

DEPTH = 2
"""Buckets under way at once."""

OpenDevice = Callable[[Backend, Buffer], Sequence[Plane]]
"""Makes the planes for a device's tensors from the plane for CPU memory and a tensor of this rank: the best one, and
one on that same CPU backend through which the tensors are staged; both may be the same."""


class Staging:
    """Memory for fused buckets: DEPTH blocks used in turn, each free again when its bucket has completed, or at once
    where the memory keeps the order."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._blocks: deque[Buffer | None] = deque([None] * DEPTH)

    def take(self, nbytes: int, like: TensorSpec, at_least: int) -> Buffer:
        """Room for ``nbytes`` of a dtype.

        Args:
            at_least: minimum size of a new block, so that it is large enough for later buckets too.
        """
        block = self._blocks.popleft()
        if block is None or block.nbytes < nbytes:
            block = self._memory.empty(max(nbytes, at_least))  # the old one lives as long as its bucket
        self._blocks.append(block)
        return Buffer(
            block.address, TensorSpec(like.dtype, (nbytes // like.dtype.itemsize,), block.device), block.owner
        )


class Group:
    """One rank's part in a process set.

    Args:
        backend: its data plane in CPU memory.
        ranks: its global ranks in ascending order.
        rank: this process's place among them.
        open_device: see ``OpenDevice``; called on the data thread.
    """

    def __init__(
        self, backend: Backend, ranks: tuple[int, ...], rank: int, open_device: OpenDevice | None = None
    ) -> None:
        self.ranks = ranks
        self.rank = rank
        self.host = Plane(backend, HostMemory())
        self._open_device = open_device
        self._device: Plane | None = None
        self._staged: Plane | None = None
        self._staging: dict[int, Staging] = {}

    @property
    def backends(self) -> list[Backend]:
        """All open planes, each once."""
        planes = [self.host, *(plane for plane in (self._device,) if plane is not None)]
        return list({id(plane.backend): plane.backend for plane in planes}.values())

    @property
    def planes(self) -> list[tuple[str, Plane]]:
        """The open planes, each with the kind of device whose tensors it carries."""
        device = self._device
        return [("cpu", self.host), *([] if device is None else [("cuda", device)])]

    def tune(self, hierarchical_threshold: int) -> None:
        """Change the setting of a plane that has it."""
        if isinstance(self.host.backend, Tunable):
            self.host.backend.tune(hierarchical_threshold)

    def abort(self) -> None:
        """Abort all open planes."""
        for backend in self.backends:
            try:
                backend.abort()
            except Exception:  # one that does not end must not keep the others from it
                logger.exception("the %s data plane could not be aborted", backend.name)

    def plane(self, device: str, example: Buffer | None, *, on_host: bool = False) -> Plane:
        """The plane for tensors of one kind of device, opened if this is the first of them.

        Args:
            example: one of this rank's tensors.
            on_host: the operation needs its data in CPU memory.

        Raises:
            BackendError: there is no such plane here.
        """
        if device == "cpu" or example is None:
            return self.host
        if self._device is None or self._staged is None:
            if self._open_device is None:
                raise BackendError(f"there is no way here to exchange tensors of a {device} device")
            self._device, self._staged = self._open_device(self.host.backend, example)
        return self._staged if on_host else self._device

    def is_in_order(self, device: str) -> bool:
        """Return whether tensors of one kind of device travel on a plane that is open and keeps the order by itself."""
        return device != "cpu" and self._device is not None and self._device.memory.in_order

    def stage(self, plane: Plane, nbytes: int, like: TensorSpec, at_least: int) -> Buffer:
        """Room for a fused bucket in a plane's memory; see ``Staging``."""
        staging = self._staging.get(id(plane))
        if staging is None:
            staging = self._staging[id(plane)] = Staging(plane.memory)
        return staging.take(nbytes, like, at_least)
