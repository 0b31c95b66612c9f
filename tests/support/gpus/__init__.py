"""A simulated GPU in the place of ``hvdgloo._backends.gpu``: CUDA's rules without CUDA.

What is written against that module runs here on the CPU, late and out of order, and a checker says which accesses to
memory have no order. See ``machine`` for streams, events and memory, ``tensors`` for what torch does with tensors that
are there, ``nccl`` for collectives, ``clocks`` for the checker.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hvdgloo._backends import gpu
from hvdgloo._engine.handle import Handle
from hvdgloo.types import Buffer
from tests.support.gpus.clocks import Clock
from tests.support.gpus.machine import OFFSET, Event, HostAccessError, Machine, Schedule, Stream
from tests.support.gpus.nccl import Faults, Group, Nccl, Work
from tests.support.gpus.tensors import GpuTensor, Here, copied, copy_, empty_strided, on_gpu

__all__ = ["Event", "Faults", "GpuTensor", "HostAccessError", "Machine", "Schedule", "Simulated", "on_gpu", "simulated"]


class Simulated:
    """The functions of ``hvdgloo._backends.gpu``, for a machine of simulated GPUs.

    Attributes:
        machine: the GPUs.
        nccl: what connects them.
        capturing: streams that are being captured into a CUDA graph.
    """

    def __init__(self, schedule: Schedule | None = None, count: int = 4) -> None:
        self.machine = Machine(count, schedule)
        self.nccl = Nccl()
        self.capturing: set[Stream] = set()
        self._local = threading.local()

    def platform(self) -> str:
        return "cuda"

    def nccl_version(self) -> int:
        return 22703

    def count(self) -> int:
        return self.machine.count

    def choose(self, index: int) -> torch.device:
        return torch.device("cuda", index)  # nothing is ever made here without a GPU's being named

    def identity(self, device: torch.device) -> str:
        return f"simulated GPU {device.index} of rank {self.machine.rank}"

    def host_index(self, device: torch.device) -> int:
        return int(device.index)

    def of(self, tensor: torch.Tensor) -> torch.device | None:
        return tensor.device if isinstance(tensor, GpuTensor) else None

    def current(self, device: torch.device) -> Stream:
        return self.machine.current_stream(device.index)

    def current_key(self, device: torch.device) -> Stream:
        return self.current(device)

    def ignore_captures(self) -> None:
        self._local.ignores_captures = True

    def use_own_stream(self, device: torch.device) -> None:
        if self.current(device) is self.machine.default_stream(device.index):
            self.machine.set_stream(self.machine.new_stream(device.index))

    def use(self, stream: Stream) -> None:
        self.machine.set_stream(stream)

    def record(self, device: torch.device) -> Event:
        return self.machine.record(self.current(device))

    def wait(self, event: Event, device: torch.device) -> None:
        self.machine.wait(self.current(device), event)

    def wait_for(self, stream: Stream, device: torch.device) -> None:
        if stream is not self.current(device):
            self.machine.wait(self.current(device), self.machine.record(stream))

    def has_happened(self, event: Event) -> bool:
        if self.capturing and not getattr(self._local, "ignores_captures", False):
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.machine.query(event)

    def settle(self, device: torch.device) -> None:
        self.machine.settle(self.current(device))

    def is_capturing(self, device: torch.device) -> bool:
        return self.current(device) in self.capturing

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        strides = torch.empty(tuple(shape), dtype=dtype, device="meta").stride()
        return empty_strided(tuple(shape), strides, dtype, device.index)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self.machine.pin(nbytes)

    def used_here(self, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, GpuTensor)
        tensor.record_stream(self.current(tensor.device))

    def view(self, owner: torch.Tensor, address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        assert isinstance(owner, GpuTensor)
        begin = address - OFFSET - owner.block.address
        flat = owner.block.memory[begin : begin + count * dtype.itemsize] if count else owner.block.memory[:0]
        return GpuTensor(flat.view(dtype), owner.storage_)

    def on(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if isinstance(tensor, GpuTensor):
            return tensor if tensor.device == device else copied(tensor, device.index)
        made = empty_strided(tensor.shape, tensor.stride(), tensor.dtype, device.index)
        copy_(made, tensor, True)
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy_(target, source, True)

    def before_threads(self) -> None:
        """No environment is read here."""

    def nccl_group(self, store: Any, rank: int, size: int) -> Any:
        return self.nccl.group(store, rank, size)

    def nccl_abort(self, group: Group) -> None:
        group.abort()

    def nccl_close(self, group: Group) -> None:
        group.shutdown()

    def nccl_failure(self, work: Work) -> str:
        return self.nccl.faults.errors.get(self.machine.rank, "")

    def outdated_torch(self) -> str:
        return ""


AS_THEY_ARE = frozenset({"fuse", "scatter", "scale"})
"""Functions of ``gpu`` that work on simulated tensors, too: they call nothing but torch's operations."""


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions of ``hvdgloo._backends.gpu``."""
    return {
        name: function
        for name, function in inspect.getmembers(gpu, inspect.isfunction)
        if function.__module__ == gpu.__name__ and not name.startswith("_")
    }


@contextmanager
def simulated(schedule: Schedule | None = None, count: int = 4) -> Iterator[Simulated]:
    """Simulated GPUs for as long as the block lasts; at its end, races and faults of kernels are errors."""
    made = Simulated(schedule, count)
    before = Here.machine
    with pytest.MonkeyPatch.context() as patch:
        for name in functions().keys() - AS_THEY_ARE:
            patch.setattr(gpu, name, getattr(made, name))
        patch.setattr("hvdgloo._backends.nccl._stuck", [])  # one test's group that does not end is not another's
        _watch_the_host(patch, made.machine)
        _tell_who_waits(patch, made.machine)
        Here.machine = made.machine
        try:
            yield made
        finally:
            made.nccl.faults.over.set()
            Here.machine = before
    gc.collect()
    made.machine.check()


def _watch_the_host(patch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Make it an error for the host to use a GPU's memory."""
    array, move, read = Buffer.array, ctypes.memmove, ctypes.string_at

    def watched_array(buffer: Buffer) -> Any:
        machine.require_host(buffer.address)
        return array(buffer)

    def watched_move(target: int, source: int, nbytes: int) -> Any:
        machine.require_host(target)
        machine.require_host(source)
        return move(target, source, nbytes)

    def watched_read(address: int, nbytes: int = -1) -> bytes:
        machine.require_host(address)
        return read(address, nbytes)

    patch.setattr(Buffer, "array", watched_array)
    patch.setattr(ctypes, "memmove", watched_move)
    patch.setattr(ctypes, "string_at", watched_read)


def _tell_who_waits(patch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Have a thread that finds a handle resolved know what the thread that resolved it knew."""
    done, resolve, wait = Handle.done, Handle.resolve, Handle.wait
    told: dict[int, Clock] = {}  # by the handle's id; what belonged to one that is gone is overwritten

    def telling_resolve(handle: Handle, *args: Any, **kwargs: Any) -> bool:
        if not done(handle):
            told[id(handle)] = Clock(machine.knowledge)
        return resolve(handle, *args, **kwargs)

    def told_done(handle: Handle) -> bool:
        answer = done(handle)
        if answer:
            machine.knowledge.join(told.get(id(handle), {}))
        return answer

    def told_wait(handle: Handle, timeout: float | None = None) -> tuple[Buffer, ...]:
        try:
            return wait(handle, timeout)
        finally:
            told_done(handle)

    patch.setattr(Handle, "resolve", telling_resolve)
    patch.setattr(Handle, "done", told_done)
    patch.setattr(Handle, "wait", told_wait)


class OnTheHost:
    """A backend in CPU memory; whatever it is given must not be in a GPU's hands any more."""

    def __init__(self, machine: Machine, backend: Any) -> None:
        self._machine, self._backend = machine, backend

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            for buffer in args:
                if isinstance(buffer, Buffer):
                    self._machine.host_uses(buffer.address, buffer.nbytes)
            return found(*args)

        return call
