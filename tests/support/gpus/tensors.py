"""Tensors on a simulated GPU: torch's own operations on them wait in a stream's queue.

A ``GpuTensor`` is a wrapper around a tensor in a block of simulated memory. Views are made at once, since they touch no
memory; everything else is given to the current stream of the calling thread, with what it reads and writes. Automatic
differentiation, modules and optimizers work as on any tensor.

torch imports ``torch.distributed.tensor`` when it first meets a subclass of tensors that has a dispatcher of its own.
That is done here, ahead of the ranks' threads: it holds locks for as long as 500 modules take to be read from a disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed.tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.gpus.machine import OFFSET, Block, HostAccessError, Machine, Storage, Stream

aten: Any = torch.ops.aten


class Here:
    """The machine that tensors are on; see ``tests.support.gpus.simulated``."""

    machine: Machine | None = None


def machine() -> Machine:
    assert Here.machine is not None, "there are no simulated GPUs outside of the fixture"
    return Here.machine


class GpuTensor(torch.Tensor):
    """A tensor on a simulated GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    inner: torch.Tensor
    storage_: Storage

    @staticmethod
    def __new__(cls, inner: torch.Tensor, storage: Storage) -> GpuTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="cpu"
        )
        made.inner, made.storage_ = inner, storage
        return made  # type: ignore[no-any-return]

    def __init__(self, inner: torch.Tensor, storage: Storage) -> None:
        """Do nothing: ``__new__`` has set everything."""

    @property
    def block(self) -> Block:
        return self.storage_.block

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.block.device)

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.inner.data_ptr() + OFFSET

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to_host(self)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        wanted = args[0] if args else kwargs.get("device")
        if isinstance(wanted, (str, torch.device)):
            wanted = torch.device(wanted)
            rest = {k: v for k, v in kwargs.items() if k != "device"}
            if wanted.type == "cpu":
                return to_host(self).to(*args[1:], **rest)
            moved = self if wanted.index in (None, self.block.device) else copied(self, wanted.index)
            return torch.Tensor.to(moved, *args[1:], **rest) if args[1:] or rest else moved
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        return to_host(self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("can't convert a simulated GPU's tensor to numpy; copy it to the host first")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise HostAccessError("numpy reads the memory of a GPU")

    def untyped_storage(self) -> NoReturn:
        raise HostAccessError("a simulated GPU's storage is not to be used; see gpu.view")

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.users.add(stream)

    def __repr__(self, **kwargs: Any) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, dict(kwargs or {}))


def empty_strided(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: int) -> GpuTensor:
    """Memory of the current stream of this thread."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    storage = machine().allocate(extent * dtype.itemsize, device)
    typed = storage.block.memory[: extent * dtype.itemsize].view(dtype)
    return GpuTensor(typed.as_strided(tuple(shape), tuple(stride)), storage)


def like(inner: torch.Tensor, device: int) -> GpuTensor:
    return empty_strided(inner.shape, inner.stride(), inner.dtype, device)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses where a strided tensor begins and ends."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.dtype.itemsize


def ranges(tensors: Sequence[GpuTensor]) -> list[tuple[Block, int, int]]:
    return [(tensor.block, *extent(tensor.inner)) for tensor in tensors]


def on_gpu(tensor: torch.Tensor, device: int = 0) -> GpuTensor:
    """A copy on a GPU, made at once: what a test begins with."""
    made = empty_strided(tensor.shape, tensor.stride(), tensor.dtype, device)
    source, inner = tensor.detach().clone(memory_format=torch.preserve_format), made.inner
    launch("upload", lambda: inner.copy_(source), device, [], [made])
    return made


def launch(
    what: str, run: Any, device: int, reads: Sequence[GpuTensor], writes: Sequence[GpuTensor], host: Any = ()
) -> None:
    """Give an operation to the current stream of this thread.

    Args:
        host: ranges of page-locked memory that it reads and writes.
    """
    there = machine()
    reading, writing = host or ((), ())
    there.launch(there.current_stream(device), what, run, [*ranges(reads), *reading], [*ranges(writes), *writing])


def to_host(tensor: GpuTensor) -> torch.Tensor:
    """Return a tensor's content once its GPU has got that far; the host waits."""
    there = machine()
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    inner = tensor.inner
    launch("download", lambda: result.copy_(inner), tensor.block.device, [tensor], [])
    there.settle(there.current_stream(tensor.block.device))
    return result


def copied(tensor: GpuTensor, device: int) -> GpuTensor:
    """A copy on another GPU."""
    target = like(tensor.inner, device)
    copy_between(target, tensor)
    return target


def copy_between(target: GpuTensor, source: GpuTensor) -> None:
    """As torch does it: on the source's stream, after the target's, which then waits."""
    there = machine()
    ours, theirs = there.current_stream(source.block.device), there.current_stream(target.block.device)
    if ours is not theirs:
        there.wait(ours, there.record(theirs))
    inner, wrapped = source.inner, target.inner
    there.launch(ours, "copy", lambda: wrapped.copy_(inner), ranges([source]), ranges([target]))
    if ours is not theirs:
        there.wait(theirs, there.record(ours))


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """``Tensor.copy_`` with a GPU on at least one side."""
    there = machine()
    if isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
        copy_between(target, source)
        return
    on_device, on_host = (target, source) if isinstance(target, GpuTensor) else (source, target)
    assert isinstance(on_device, GpuTensor)
    device = on_device.block.device
    page_locked = there.pinned_block(on_host.data_ptr()) if on_host.numel() else None
    if page_locked is None and on_device is target:  # torch copies what is not page-locked before it returns
        kept, inner = source.clone(), on_device.inner
        launch("upload", lambda: inner.copy_(kept), device, [], [on_device])
        return
    ends = [] if page_locked is None else [(page_locked, *extent(on_host))]
    inner, outer = on_device.inner, on_host.detach()
    if on_device is target:
        launch("upload", lambda: inner.copy_(outer), device, [], [on_device], (ends, []))
    else:
        launch("download", lambda: outer.copy_(inner), device, [on_device], [], ([], ends))
    if page_locked is None or not non_blocking:
        there.settle(there.current_stream(device))


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, bool]]:
    """All arguments with whether they are written."""
    arguments = func._schema.arguments
    for argument, value in zip(arguments, args, strict=False):
        yield value, argument.alias_info is not None and argument.alias_info.is_write
    named = {argument.name: argument for argument in arguments}
    for name, value in kwargs.items():
        alias = named[name].alias_info
        yield value, alias is not None and alias.is_write


def _tensors(values: Any, kind: type = GpuTensor) -> list[Any]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, kind)]


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, GpuTensor) else value


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """One of torch's operations with a GPU's tensor among its arguments."""
    if func in (aten.copy_.default,):
        copy_(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return args[0]
    if func is aten._foreach_copy_.default:
        for target, source in zip(args[0], args[1], strict=True):
            copy_(target, source, True)
        return None
    if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
        there = machine()
        for device in {tensor.block.device for tensor in _tensors(args)}:
            there.settle(there.current_stream(device))
        return func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    everything = list(_tensors((args, kwargs), torch.Tensor))
    ours = [tensor for tensor in everything if isinstance(tensor, GpuTensor)]
    devices = {tensor.block.device for tensor in ours}
    if len(devices) > 1 or any(tensor.dim() and not isinstance(tensor, GpuTensor) for tensor in everything):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    (device,) = devices
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    inner_args, inner_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
    if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
        views = func(*inner_args, **inner_kwargs)  # touches no memory
        return tree_map(lambda view: GpuTensor(view, ours[0].storage_) if _is_tensor(view) else view, views)
    flagged = list(_arguments(func, args, kwargs))
    writes = [tensor for value, written in flagged if written for tensor in _tensors(value)]
    reads = [tensor for value, written in flagged if not written for tensor in _tensors(value)]
    own = [each.alias_info is not None for each in func._schema.returns]  # returns what it has written
    result: Any = None
    outputs: list[GpuTensor] = []
    if not all(own) or (not own and not writes):
        # For the results' shapes: on whatever is there now, and on copies of what would be written.
        kept = {id(tensor.inner): tensor.inner.clone() for tensor in writes}
        trial = tree_map(lambda value: kept.get(id(value), value), (inner_args, inner_kwargs))
        tried = func(*trial[0], **trial[1])
        result = tree_map(lambda value: like(value, device) if _is_tensor(value) else value, tried)
        outputs = _tensors(result)
    elif own:
        result = writes[0] if len(own) == 1 else tuple(writes)
    filled = [output.inner for output in outputs]

    def run() -> None:
        for target, source in zip(
            filled, _tensors(func(*inner_args, **inner_kwargs), torch.Tensor), strict=bool(filled)
        ):
            target.copy_(source)

    if not func.__name__.startswith(("empty", "new_empty")):  # these write nothing
        launch(str(func), run, device, reads, [*writes, *outputs])
    return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
