"""The libraries that benchmarks/collectives.py compares, behind one interface.

All of them work on the same float32 tensors of the same processes, one thread each. Each library is called as its users
would call it: gradients one by one where it fuses on its own, in buckets of 25 MB where its users' framework does that
(torch), in place on each where there is no fusing (Open MPI).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

BUCKET_BYTES = 25 << 20

Tensor = torch.Tensor


class Peer(Protocol):
    """One library, in a job of processes that has begun."""

    name: str

    def barrier(self) -> None: ...

    def allreduce(self, tensor: Tensor) -> None:
        """Sum in place."""

    def allreduce_unnamed(self, tensor: Tensor) -> None:
        """Sum in place, by a call without a name where there are names."""

    def allreduce_async(self, tensor: Tensor) -> None:
        """Sum in place: start, then wait."""

    def gradients(self, tensors: Sequence[Tensor]) -> None:
        """Sum each in place."""

    def blocking(self, tensors: Sequence[Tensor]) -> None:
        """Sum each in place, by a call that waits."""

    def group(self, tensors: Sequence[Tensor]) -> None:
        """Sum all in place by one call, where there is such a call; else as ``gradients``."""

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0, in place."""

    def allgather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, one after another."""

    def alltoall(self, tensor: Tensor) -> Tensor:
        """Equal parts to each rank."""


class Hvdgloo:
    """This library."""

    name = "hvdgloo"

    def __init__(self) -> None:
        import hvdgloo.torch as hvd

        hvd.init()
        self._hvd = hvd

    def barrier(self) -> None:
        self._hvd.barrier()

    def allreduce(self, tensor: Tensor) -> None:
        self._hvd.allreduce_(tensor, op=self._hvd.Sum, name="x")

    def allreduce_unnamed(self, tensor: Tensor) -> None:
        self._hvd.allreduce_(tensor, op=self._hvd.Sum)

    def allreduce_async(self, tensor: Tensor) -> None:
        hvd = self._hvd
        hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="x"))

    def gradients(self, tensors: Sequence[Tensor]) -> None:
        hvd = self._hvd
        handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=str(i)) for i, t in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    def blocking(self, tensors: Sequence[Tensor]) -> None:
        for i, tensor in enumerate(tensors):
            self._hvd.allreduce_(tensor, op=self._hvd.Sum, name=str(i))

    def group(self, tensors: Sequence[Tensor]) -> None:
        self._hvd.grouped_allreduce_(tensors, op=self._hvd.Sum, name="group")

    def broadcast(self, tensor: Tensor) -> None:
        self._hvd.broadcast_(tensor, root_rank=0, name="x")

    def allgather(self, tensor: Tensor) -> Tensor:
        result: Tensor = self._hvd.allgather(tensor, name="x")
        return result

    def alltoall(self, tensor: Tensor) -> Tensor:
        result = self._hvd.alltoall(tensor, name="x")
        assert isinstance(result, Tensor)
        return result


class Horovod(Hvdgloo):
    """The original, on whatever it was built for."""

    name = "horovod"

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd = hvd


class TorchGloo:
    """torch.distributed on Gloo; gradients as DistributedDataParallel sends them: copied into buckets and back."""

    name = "torch"

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self._dist = dist
        self._flat: dict[int, list[tuple[Tensor, list[Tensor]]]] = {}

    def barrier(self) -> None:
        self._dist.barrier()

    def allreduce(self, tensor: Tensor) -> None:
        self._dist.all_reduce(tensor)

    allreduce_unnamed = allreduce

    def allreduce_async(self, tensor: Tensor) -> None:
        self._dist.all_reduce(tensor, async_op=True).wait()

    def gradients(self, tensors: Sequence[Tensor]) -> None:
        works = []
        buckets = self._buckets(tensors)
        for flat, members in buckets:
            torch.cat([member.view(-1) for member in members], out=flat)
            works.append(self._dist.all_reduce(flat, async_op=True))
        for (flat, members), work in zip(buckets, works, strict=True):
            work.wait()
            for member, piece in zip(members, torch.split(flat, [m.numel() for m in members]), strict=True):
                member.view(-1).copy_(piece)

    def blocking(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._dist.all_reduce(tensor)

    def group(self, tensors: Sequence[Tensor]) -> None:
        self.gradients(tensors)

    def broadcast(self, tensor: Tensor) -> None:
        self._dist.broadcast(tensor, 0)

    def allgather(self, tensor: Tensor) -> Tensor:
        result = tensor.new_empty(self._dist.get_world_size() * tensor.numel())
        self._dist.all_gather_into_tensor(result, tensor)
        return result

    def alltoall(self, tensor: Tensor) -> Tensor:
        result = torch.empty_like(tensor)
        self._dist.all_to_all_single(result, tensor)
        return result

    def _buckets(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
        if id(tensors) not in self._flat:
            buckets: list[list[Tensor]] = [[]]
            for tensor in tensors:
                if sum(member.nbytes for member in buckets[-1]) + tensor.nbytes > BUCKET_BYTES and buckets[-1]:
                    buckets.append([])
                buckets[-1].append(tensor)
            self._flat[id(tensors)] = [(torch.empty(sum(m.numel() for m in bucket)), bucket) for bucket in buckets]
        return self._flat[id(tensors)]


class OpenMpi:
    """Open MPI through mpi4py, over shared memory on one host. It does not fuse: each gradient in place, in order."""

    name = "openmpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD

    def barrier(self) -> None:
        self._world.Barrier()

    def allreduce(self, tensor: Tensor) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, tensor.numpy())

    allreduce_unnamed = allreduce

    def allreduce_async(self, tensor: Tensor) -> None:
        self._world.Iallreduce(self._mpi.IN_PLACE, tensor.numpy()).Wait()

    def gradients(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._world.Allreduce(self._mpi.IN_PLACE, tensor.numpy())

    blocking = gradients

    def group(self, tensors: Sequence[Tensor]) -> None:
        self.gradients(tensors)

    def broadcast(self, tensor: Tensor) -> None:
        self._world.Bcast(tensor.numpy(), 0)

    def allgather(self, tensor: Tensor) -> Tensor:
        result = np.empty(self._world.Get_size() * tensor.numel(), np.float32)
        self._world.Allgather(tensor.numpy(), result)
        return torch.from_numpy(result)

    def alltoall(self, tensor: Tensor) -> Tensor:
        result = np.empty(tensor.numel(), np.float32)
        self._world.Alltoall(tensor.numpy(), result)
        return torch.from_numpy(result)


def available(*, mpi: bool) -> list[type[Peer]]:
    """The libraries that can be imported here, ours first.

    Args:
        mpi: these processes were started by mpirun.
    """
    peers: list[type[Peer]] = [Hvdgloo, TorchGloo]
    if mpi:
        peers.append(OpenMpi)
    if importlib.util.find_spec("horovod") is not None:
        peers.append(Horovod)
    return peers
