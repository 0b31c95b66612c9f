"""The route of CUDA tensors: over NCCL if every member of a process set has a GPU of its own, else through host memory.

Through host memory means: fused on the GPU, copied to page-locked memory, exchanged by whatever carries CPU tensors,
and copied back. What happens is decided by all members alike, when they first have CUDA tensors to exchange.

All of it runs on the data thread, on a CUDA stream of its own. That stream waits for the tensors' producers
(``TensorAdapter.fence``); the thread that submitted them never does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from hvdgloo._backends import gpu, nccl
from hvdgloo._backends.alone import AloneBackend
from hvdgloo._backends.base import Backend, Done, Encoding, Mark, Plane, RendezvousStore, wait_for
from hvdgloo._backends.memory import HostMemory
from hvdgloo._backends.process_group import SIGNED, tensor_of
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer, DType, TensorSpec

logger = logging.getLogger(__name__)

_REPORT_BYTES = 256
_ENCODES_NOT = (
    "CUDA tensors travel over NCCL here, which sends them as they are. Choose --gpu-operations gloo "
    "(HVDGLOO_GPU_OPERATIONS), which takes them through host memory, or leave out --wire and Compression.int8 or int4"
)


@dataclass(frozen=True)
class Gpu:
    """A rank's description of the GPU that it uses, for the others.

    Attributes:
        identity: equal only for the same GPU; empty if there is none.
        nccl: the version code of NCCL; 0 without it.
        outdated: the version of torch, if it is too old for NCCL.
    """

    identity: str = ""
    nccl: int = 0
    outdated: str = ""

    @classmethod
    def of(cls, device: torch.device | None) -> Gpu:
        """This process's."""
        if device is None:
            return cls()
        if device.type != "cuda":  # ranks of a test
            return cls(str(device))
        version = gpu.nccl_version()
        return cls(gpu.identity(device), version, gpu.outdated_torch() if version else "")


def obstacle(gpus: Sequence[Gpu], ranks: Sequence[int]) -> str:
    """Return the reason why these ranks cannot use NCCL with each other, as a clause; empty if they can."""
    seen: dict[str, int] = {}
    for own, rank in zip(gpus, ranks, strict=True):
        if not own.identity:
            return f"rank {rank} has no GPU"
        if not own.nccl:
            return f"the torch of rank {rank} was built without NCCL"
        if own.nccl != gpus[0].nccl:
            return f"rank {ranks[0]} has version {gpus[0].nccl} of NCCL and rank {rank} {own.nccl}"
        if own.identity in seen:
            return f"ranks {seen[own.identity]} and {rank} use the same GPU, which NCCL refuses"
        seen[own.identity] = rank
    return ""


def open_planes(
    host: Backend,
    example: Buffer,
    *,
    store: RendezvousStore,
    prefix: str,
    ranks: Sequence[int],
    rank: int,
    local_rank: int,
    operations: str,
    timeout: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[Plane, Plane]:
    """The planes for a process set's CUDA tensors; see ``planes.OpenDevice``. Called by all members at once.

    Args:
        host: the set's backend for CPU tensors.
        example: one of this rank's tensors, perhaps a stand-in of a rank that has joined.
        store, prefix: see ``NcclBackend``.
        ranks: the members' global ranks; this process is ``ranks[rank]``.
        local_rank: its number on its host, which determines its GPU if ``example`` does not.
        operations: "auto", "nccl" or "gloo", the same on all ranks.
        timeout: how many seconds the members wait for each other.
        cancelled: polled meanwhile to see whether to give up.

    Raises:
        BackendError: NCCL was asked for and cannot be used, some rank's torch is too old for it, or opening was
            cancelled.
        ConnectError: the ranks cannot be connected with each other.
    """
    device = _device(example, local_rank)
    if device is not None and device.type == "cuda":
        gpu.ignore_captures()
        gpu.use_own_stream(device)
    staged = Plane(host, HostMemory() if device is None else PinnedMemory(device))
    if operations == "gloo":
        return staged, staged
    if operations == "auto" and len(ranks) == 1 and device is not None and device.type == "cuda":
        return Plane(AloneBackend(device), DeviceMemory(device)), staged
    deadline = time.monotonic() + timeout
    gpus = _exchange(host, Gpu.of(device), rank, len(ranks), timeout)
    reason = obstacle(gpus, ranks)
    if not reason:
        assert device is not None
        _refuse_outdated(gpus, ranks)
        left = max(0.0, deadline - time.monotonic())
        backend = nccl.NcclBackend(store, prefix, rank, len(ranks), device, left, cancelled)
        return Plane(backend, DeviceMemory(device), _ENCODES_NOT if isinstance(host, Encoding) else ""), staged
    if operations == "nccl":
        raise BackendError(
            f"HVDGLOO_GPU_OPERATIONS=nccl, but {reason}. Give each rank a GPU of its own "
            "(torch.cuda.set_device(hvd.local_rank()) before the first tensor is put there), or leave the setting out "
            "to send CUDA tensors through host memory"
        )
    if rank == 0:
        logger.warning("CUDA tensors are sent through host memory, not over NCCL: %s", reason)
    return staged, staged


def _refuse_outdated(gpus: Sequence[Gpu], ranks: Sequence[int]) -> None:
    for own, rank in zip(gpus, ranks, strict=True):
        if own.outdated:
            raise BackendError(
                f"CUDA tensors travel over NCCL with torch 2.6 or newer, and rank {rank} has torch {own.outdated}: "
                "upgrade it, or set HVDGLOO_GPU_OPERATIONS=gloo to send them through host memory"
            )


def _device(example: Buffer, local_rank: int) -> torch.device | None:
    """The GPU that this rank uses: its tensor's if it has one there."""
    if isinstance(example.owner, torch.Tensor):
        return example.owner.device
    count = gpu.count()
    return torch.device("cuda", local_rank % count) if count else None


def _exchange(host: Backend, own: Gpu, rank: int, size: int, timeout: float) -> list[Gpu]:
    """Every member's GPU."""
    text = json.dumps(asdict(own)).encode().ljust(_REPORT_BYTES)
    source = Buffer.of_array(np.frombuffer(bytearray(text), np.uint8))
    target = Buffer.of_array(np.empty(_REPORT_BYTES * size, np.uint8))
    work = host.allgather(source, target, [_REPORT_BYTES] * size)
    wait_for(work, timeout, "the ranks did not exchange which GPUs they use")
    reports = target.array().tobytes()
    return [Gpu(**json.loads(reports[at : at + _REPORT_BYTES])) for at in range(0, len(reports), _REPORT_BYTES)]


def _host_index(device: torch.device) -> int:
    return gpu.host_index(device) if device.type == "cuda" else -1


class DeviceMemory:
    """A GPU's memory. All work on it is ordered on the current stream.

    Args:
        device: the GPU. (A CPU works as well, which is how this is tested without a GPU.)

    Attributes:
        gpu_index: its number among the host's GPUs; -1 if that is not known.
    """

    in_order = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gpu_index = _host_index(device)

    def holds(self, buffer: Buffer) -> bool:
        owner = buffer.owner
        return isinstance(owner, torch.Tensor) and buffer.device != "cpu" and owner.device == self._device

    def empty(self, nbytes: int) -> Buffer:
        memory = gpu.empty((nbytes,), torch.uint8, self._device)
        return Buffer(memory.data_ptr(), TensorSpec(DType.UINT8, (nbytes,), "cuda"), memory)

    def pack(self, target: Buffer, sources: Sequence[Buffer]) -> None:
        views, kind = _views(sources, target.dtype)
        gpu.fuse([gpu.on(view, self._device) for view in views], tensor_of(target, kind))

    def unpack(self, source: Buffer, pieces: Iterable[tuple[Buffer, int, int]]) -> None:
        _distribute(tensor_of(source, DType.UINT8), pieces)

    def mark(self) -> Mark:
        return nccl.Passed(self._device) if self._device.type == "cuda" else Done()


class PinnedMemory:
    """Page-locked host memory, which a GPU reads and writes at full speed.

    Args:
        device: the GPU whose tensors are staged there.

    Attributes:
        gpu_index: as of ``DeviceMemory``.
    """

    in_order = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gpu_index = _host_index(device)

    def holds(self, buffer: Buffer) -> bool:
        return buffer.device == "cpu"

    def empty(self, nbytes: int) -> Buffer:
        if self._device.type == "cuda":
            memory = gpu.pinned(nbytes)
        else:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return Buffer(memory.data_ptr(), TensorSpec(DType.UINT8, (nbytes,)), memory)

    def pack(self, target: Buffer, sources: Sequence[Buffer]) -> None:
        views, kind = _views(sources, target.dtype)
        # Fused on the GPU: many small copies to the host would cost more than all of them at once.
        whole = views[0]
        if len(views) > 1:
            whole = gpu.empty((sum(len(view) for view in views),), whole.dtype, self._device)
            gpu.fuse([gpu.on(view, self._device) for view in views], whole)
        gpu.copy(tensor_of(target, kind), whole)
        self._settle()

    def unpack(self, source: Buffer, pieces: Iterable[tuple[Buffer, int, int]]) -> None:
        _distribute(gpu.on(tensor_of(source, DType.UINT8), self._device), pieces)
        self._settle()

    def mark(self) -> Mark:
        return Done()

    def _settle(self) -> None:
        """Copies to and from the host are not ordered with what the host does."""
        if self._device.type == "cuda":
            gpu.settle(self._device)


def _views(sources: Sequence[Buffer], wanted: DType) -> tuple[list[torch.Tensor], DType]:
    """Flat tensors over the sources, of the wanted element type if all have it and torch computes with it, else of
    bytes."""
    same = wanted not in SIGNED and all(source.dtype is wanted for source in sources)
    kind = wanted if same else DType.UINT8
    return [tensor_of(source, kind) for source in sources], kind


def _distribute(whole: torch.Tensor, pieces: Iterable[tuple[Buffer, int, int]]) -> None:
    """Copy bytes to where they belong; see ``Memory.unpack``."""
    targets, parts = [], []
    begin = 0
    for buffer, offset, nbytes in pieces:
        targets.append(tensor_of(buffer, DType.UINT8)[offset : offset + nbytes])
        parts.append(whole[begin : begin + nbytes])
        begin += nbytes
    gpu.scatter(targets, parts)
