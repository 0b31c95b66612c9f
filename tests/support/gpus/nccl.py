"""NCCL between simulated GPUs: a process group with the methods of torch's that are used here.

A collective waits at the head of a stream of NCCL's own until all ranks' do, and is then done for all of them
at once. The group connects when it is first used; that may never return. After ``abort`` a collective ends by itself,
with rubbish in its memory, unless the GPU hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hvdgloo._backends import gpu
from tests.support.gpus.machine import POISON, Event, Machine, Stream
from tests.support.gpus.tensors import GpuTensor, machine, ranges


@dataclass
class Faults:
    """Planned faults, by rank.

    Attributes:
        connects_never: connecting does not return before ``over``.
        connects_badly: connecting fails.
        begins_never: nor does the first collective of a kind, which connects others, before ``over`` or ``abort``.
        abort_blocks: neither does ``abort``.
        shutdown_blocks: nor ``shutdown``.
        errors: what NCCL reports of everything that a rank has under way.
        hangs_after_abort: what an aborted rank's GPU was given never ends.
        lost: it takes no part in collectives any more, whatever it has been given.
        over: set when the test ends, so that no thread is left.
    """

    connects_never: set[int] = field(default_factory=set)
    connects_badly: set[int] = field(default_factory=set)
    begins_never: dict[str, set[int]] = field(default_factory=dict)
    abort_blocks: set[int] = field(default_factory=set)
    shutdown_blocks: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)
    hangs_after_abort: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)


class Communicator:
    """The shared state of a group's ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.connected: set[int] = set()
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, tuple[Any, Stream]]] = {}
        self.done: set[int] = set()


@dataclass
class _Part:
    """A rank's part in one collective."""

    kind: str
    source: torch.Tensor
    target: torch.Tensor
    detail: Any = None


class Nccl:
    """Makes groups; ranks that give the same prefix to their stores meet."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.groups: list[Group] = []
        self.submitted = 0
        self._communicators: dict[str, Communicator] = {}
        self._lock = threading.Lock()

    def group(self, store: Any, rank: int, size: int) -> Group:
        """As ``gpu.nccl_group``."""
        if rank == 0:
            with self._lock:
                key = f"communicator {len(self._communicators)}"
                self._communicators[key] = Communicator(size)
            store.set("0", key.encode())
        made = Group(self, store, rank, size)
        self.groups.append(made)
        return made

    def communicator(self, key: str) -> Communicator:
        return self._communicators[key]


class Work:
    """The result object of a collective."""

    def __init__(self, there: Machine, device: int, end: Event, keep: Any) -> None:
        self._machine, self._device, self._end, self._keep = there, device, end, keep

    def wait(self) -> bool:
        """Make the current stream wait; from then on torch does not keep the tensors."""
        self._machine.wait(self._machine.current_stream(self._device), self._end)
        self._keep = None
        return True


class Group:
    """One rank's process group."""

    def __init__(self, nccl: Nccl, store: Any, rank: int, size: int) -> None:
        self._nccl, self._store, self._rank, self._size = nccl, store, rank, size
        self._stream: Stream | None = None
        self._communicator: Communicator | None = None
        self._rounds = 0
        self.is_aborted = False
        self.is_shut_down = False

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Work:
        (tensor,) = tensors
        return self._start(_Part("allreduce", _of(tensor), _of(tensor), _op(options)), [tensor], [tensor])

    def _allgather_base(self, target: torch.Tensor, source: torch.Tensor) -> Work:
        return self._start(_Part("allgather", _of(source), _of(target)), [source], [target])

    def allgather(self, targets: Sequence[Sequence[torch.Tensor]], sources: Sequence[torch.Tensor]) -> Work:
        """Of blocks that differ in size, one after another in one piece of memory."""
        (blocks,), (source,) = targets, sources
        first = next(block for block in blocks if len(block))
        whole = gpu.view(first, first.data_ptr(), first.dtype, sum(map(len, blocks)))
        return self._start(_Part("allgather", _of(source), _of(whole)), [source], [whole])

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        (tensor,) = tensors
        return self._start(_Part("broadcast", _of(tensor), _of(tensor), options.rootRank), [tensor], [tensor])

    def alltoall_base(
        self, target: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        return self._start(_Part("alltoall", _of(source), _of(target), list(sent)), [source], [target])

    def _reduce_scatter_base(self, target: torch.Tensor, source: torch.Tensor, options: Any) -> Work:
        return self._start(_Part("reducescatter", _of(source), _of(target), options.reduceOp), [source], [target])

    def abort(self) -> None:
        if self._rank in self._nccl.faults.abort_blocks:
            self._nccl.faults.over.wait()
        self.is_aborted = True
        if self._communicator is not None:
            with self._communicator.changed:
                self._communicator.changed.notify_all()

    def shutdown(self) -> None:
        if self._rank in self._nccl.faults.shutdown_blocks:
            self._nccl.faults.over.wait()
        self.is_shut_down = True

    def _connect(self, device: int) -> tuple[Communicator, Stream]:
        if self._communicator is None or self._stream is None:
            faults = self._nccl.faults
            if self._rank in faults.connects_never:
                faults.over.wait()
            if self._rank in faults.connects_badly:
                raise RuntimeError("NCCL error: unhandled system error")
            self._communicator = self._nccl.communicator(self._store.get("0").decode())
            with self._communicator.changed:
                self._communicator.connected.add(self._rank)
                self._communicator.changed.notify_all()
                while len(self._communicator.connected) < self._size:
                    if self.is_aborted or faults.over.is_set():
                        raise RuntimeError("NCCL communicator was aborted")
                    self._communicator.changed.wait(0.01)
            self._stream = machine().new_stream(device)
        return self._communicator, self._stream

    def _start(self, part: _Part, reads: Sequence[Any], writes: Sequence[Any]) -> Work:
        if self.is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        there, device = machine(), writes[0].block.device
        while self._rank in self._nccl.faults.begins_never.get(part.kind, ()):
            if self.is_aborted or self._nccl.faults.over.wait(0.01):
                raise RuntimeError("NCCL communicator was aborted")
        communicator, stream = self._connect(device)
        self._nccl.submitted += 1
        there.wait(stream, there.record(there.current_stream(device)))
        with there.lock:
            number, self._rounds = self._rounds, self._rounds + 1
            meeting = communicator.rounds.setdefault(number, {})

            def ready() -> bool:
                if number in communicator.done:
                    return True
                if self.is_aborted:
                    return self._rank not in self._nccl.faults.hangs_after_abort
                return (
                    not self._nccl.faults.lost
                    and len(meeting) == self._size
                    and all(each.queue and each.queue[0] is operation for operation, each in meeting.values())
                )

            def run() -> None:
                if number in communicator.done:
                    return
                if self.is_aborted:
                    part.target.view(torch.uint8).fill_(POISON)
                    return
                parts = [meeting[rank][0].part for rank in range(self._size)]
                for each, result in zip(parts, _results(parts), strict=True):
                    each.target.copy_(result)
                communicator.done.add(number)

            there.launch(
                stream,
                f"NCCL {part.kind}",
                run,
                ranges(reads),
                ranges(writes),
                ready=ready,
                needs=lambda: [each for _, each in meeting.values()],
                on_queue=lambda operation: _meet(meeting, self._rank, operation, part, stream),
            )
            return Work(there, device, there.record(stream), (reads, writes))


def _meet(meeting: dict[int, Any], rank: int, operation: Any, part: _Part, stream: Stream) -> None:
    operation.part = part
    meeting[rank] = operation, stream


def _of(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, GpuTensor), "NCCL takes tensors of GPUs only"
    return tensor.inner


_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0, dtype=stack.dtype),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
    dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0, dtype=stack.dtype),
}


def _reduced(parts: Sequence[_Part]) -> torch.Tensor:
    reduce = next(function for op, function in _REDUCTIONS.items() if parts[0].detail == op)
    return reduce(torch.stack([part.source for part in parts]))


def _results(parts: Sequence[_Part]) -> list[torch.Tensor]:
    """Return the result for every rank's target."""
    kind = parts[0].kind
    assert all(part.kind == kind for part in parts), "ranks have given NCCL different collectives"
    if kind == "allreduce":
        return [_reduced(parts)] * len(parts)
    if kind == "allgather":
        return [torch.cat([part.source for part in parts])] * len(parts)
    if kind == "broadcast":
        return [parts[parts[0].detail].source.clone()] * len(parts)
    if kind == "reducescatter":
        return list(_reduced(parts).chunk(len(parts)))
    blocks = [part.source.split(part.detail) for part in parts]
    return [torch.cat([sent[rank] for sent in blocks]) for rank in range(len(parts))]


def _op(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else options.reduceOp
