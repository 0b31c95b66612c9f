"""torch tensors as the Frontend sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from hvdgloo._backends import gpu
from hvdgloo._collectives.adapter import Tape, not_sendable
from hvdgloo._platform.huge_pages import LARGE_BYTES, advise_large_pages
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch._compilation import uncompiled
from hvdgloo.torch._memory import is_null, refusal
from hvdgloo.types import Buffer, DType, TensorSpec

_DTYPES: dict[torch.dtype, DType] = {getattr(torch, dtype.value): dtype for dtype in DType}
_TORCH_DTYPES: dict[DType, torch.dtype] = {dtype: torch_dtype for torch_dtype, dtype in _DTYPES.items()}

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes whose tensors are memory, or say clearly that they are not; a subclass may consist of other tensors."""

Forward = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Backward = Callable[[Tape[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class TorchAdapter:
    """TensorAdapter for ``torch.Tensor``.

    Contiguous CPU and CUDA tensors are shared with the engine; others are staged in contiguous memory, on the same GPU
    or, for other kinds of devices, on the CPU. A CUDA event fences what runs on the tensor's current stream.
    """

    def on_gpu(self, tensor: torch.Tensor) -> bool:
        """Tell whether the engine decides how the tensor gets to the other ranks' GPUs."""
        return gpu.of(tensor) is not None

    def owns(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor)

    def describe(self, tensor: torch.Tensor) -> TensorSpec:
        _refuse(tensor)
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise not_sendable(str(tensor.dtype), "tensors", _DTYPES, "torch.view_as_real(tensor)")
        return TensorSpec(dtype, tuple(tensor.shape), "cuda" if self.on_gpu(tensor) else "cpu")

    def export(self, tensor: torch.Tensor, *, writable: bool = False, known: TensorSpec | None = None) -> Buffer:
        try:
            if (
                known is not None
                and type(tensor) in _PLAIN
                and known.device == "cpu"
                and tensor.is_cpu
                and tensor.layout is torch.strided
                and tensor.dtype is _TORCH_DTYPES[known.dtype]
                and tensor.shape == known.shape
                and tensor.is_contiguous()
                and not tensor.is_neg()
                # Nearly all addresses are higher than any place in a storage.
                and ((address := tensor.data_ptr()) >> 40 or not is_null(tensor, address))
            ):
                return Buffer(address, known, tensor)
        except RuntimeError:  # from a tensor without a shape or an address, about which there is more to say below
            pass
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"expected a torch.Tensor, not {type(tensor).__name__}")
        spec = self.describe(tensor)
        if tensor.layout is not torch.strided:
            raise InvalidArgumentError(f"a {tensor.layout} tensor cannot be sent; tensor.to_dense() gives one that can")
        on_device = self.on_gpu(tensor)
        if (tensor.is_cpu or on_device) and tensor.is_contiguous() and not (tensor.is_neg() or tensor._is_zerotensor()):
            return Buffer(tensor.data_ptr(), spec, tensor)
        if writable and overlaps_itself(tensor):
            raise InvalidArgumentError(
                "elements of the tensor share memory (it was expanded), so a result cannot be written into it"
            )
        device = gpu.of(tensor)
        if device is None:
            staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        else:
            staged = gpu.empty(tensor.shape, tensor.dtype, device)
        _refuse(staged)  # a mode of torch's may have made something else than memory
        staged.copy_(tensor.detach())
        return Buffer(staged.data_ptr(), spec, staged)

    def allocate(self, spec: TensorSpec, like: torch.Tensor) -> torch.Tensor:
        # Not empty_like: ``like`` may be a subclass, or in another memory format.
        device = gpu.of(like) if spec.device == "cuda" else None
        if device is not None:
            return gpu.empty(spec.shape, _TORCH_DTYPES[spec.dtype], device)
        tensor = torch.empty(spec.shape, dtype=_TORCH_DTYPES[spec.dtype], device="cpu")
        if spec.nbytes >= LARGE_BYTES and tensor.is_cpu:
            advise_large_pages(tensor.data_ptr(), spec.nbytes)  # as numpy does on its own
        return tensor

    def deliver(self, result: torch.Tensor, target: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        if result is not target and gpu.of(result) is not None:
            gpu.used_here(result)  # the engine's thread may have allocated it, on a stream of its own
        if not in_place:
            device = gpu.of(target)
            return result.to(target.device) if device is None else gpu.on(result, device)
        if result is target:
            # The engine wrote behind autograd's back: a backward pass that saved the old values must learn of it.
            if not target.is_inference():
                increment_version(target)
        else:
            with torch.no_grad():
                target.copy_(result)
        return target

    def values(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        _refuse(tensor)
        here = tensor.detach().cpu()
        array: npt.NDArray[Any] = (here.float() if here.dtype is torch.bfloat16 else here).numpy()
        return array

    def cast(self, tensor: torch.Tensor, dtype: DType) -> torch.Tensor:
        return tensor.to(_TORCH_DTYPES[dtype])

    def fence(self, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        devices = {device for tensor in tensors if (device := gpu.of(tensor)) is not None}
        if not devices:
            return None
        if any(gpu.is_capturing(device) for device in devices):
            raise InvalidArgumentError(
                "a collective cannot be captured into a CUDA graph, as ranks agree on it each time: capture the work "
                "before and after it, and call it in between"
            )
        events = [(gpu.record(device), device) for device in devices]

        def ready() -> None:
            for event, device in events:
                gpu.wait(event, device)

        return ready

    def differentiable(
        self, forward: Forward, backward: Backward, inputs: Sequence[torch.Tensor], *, keep: bool
    ) -> list[torch.Tensor]:
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
            return forward(inputs)
        for tensor in inputs:
            _refuse(tensor)  # torch would complain about how the gradient is defined
        outputs: tuple[torch.Tensor, ...] = _Differentiable.apply(forward, backward, keep, *inputs)  # type: ignore[no-untyped-call]
        return list(outputs)


class _Differentiable(torch.autograd.Function):
    """A collective as a node of torch's graph; which one, and its gradient, are the arguments."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, keep: bool, *inputs: torch.Tensor) -> Any:
        outputs = tuple(forward(inputs))
        ctx.rule, ctx.keep = backward, keep
        ctx.shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        ctx.floating = [tensor.is_floating_point() for tensor in inputs]
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        if keep and len(inputs) == 1:
            ctx.save_for_backward(*inputs, *outputs)
        elif keep:
            # Outputs of a group may be differentiated one after the other; what torch saves is gone after the first.
            ctx.kept = [(tensor.detach(), tensor._version) for tensor in (*inputs, *outputs)]
        return outputs

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.keep and torch.is_grad_enabled():
            raise InvalidArgumentError("the gradient of a Min, Max or Product allreduce cannot be differentiated again")
        saved, count = _kept(ctx), len(ctx.shapes)
        # Integer members of a group have no gradient, on any rank; leaving them out spares every rank their transfer.
        chosen = [index for index, floating in enumerate(ctx.floating) if floating]
        tape = Tape(
            tuple(ctx.shapes[index] for index in chosen),
            tuple(saved[index] for index in chosen if ctx.keep),
            tuple(saved[count + index] for index in chosen if ctx.keep),
        )
        results: list[torch.Tensor | None] = [None] * count
        for index, result in zip(chosen, ctx.rule(tape, [gradients[index] for index in chosen]), strict=True):
            results[index] = result
        return None, None, None, *results


def _kept(ctx: Any) -> Sequence[torch.Tensor]:
    """Return the inputs and outputs that the rule reads; not looked for if it reads none, as they may be gone then."""
    if not ctx.keep:
        return ()
    if len(ctx.shapes) == 1:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        return saved
    if any(tensor._version != version for tensor, version in ctx.kept):
        raise InvalidArgumentError(
            "a tensor that the gradient of a grouped Min, Max or Product allreduce needs has been changed in place"
        )
    return [tensor for tensor, _ in ctx.kept]


def _refuse(tensor: torch.Tensor) -> None:
    reason = refusal(tensor)
    if reason is not None:
        raise InvalidArgumentError(reason)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether some elements share their memory, as they do in what was expanded."""
    extent, places = 0, [(step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    for step, size in sorted(places):
        if step <= extent:
            break
        extent += step * (size - 1)
    else:
        return False
    if not tensor.numel():
        return False
    # Dimensions that reach into each other need not meet, but nearly always do.
    offsets = np.zeros((), np.int64)
    for step, size in places:
        offsets = np.add.outer(offsets, step * np.arange(size, dtype=np.int64))
    return len(np.unique(offsets)) < offsets.size
