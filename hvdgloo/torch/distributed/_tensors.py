"""torch.distributed's tensors and reductions in terms of a data plane: contiguous memory, an element type, factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch._memory import refusal
from hvdgloo.types import Buffer, DType, ReduceOp, TensorSpec

DTYPES: dict[torch.dtype, DType] = {getattr(torch, dtype.value): dtype for dtype in DType}

Finish = Callable[[], object]
"""Copies results to where they belong."""

_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.SUM,
    dist.ReduceOp.PREMUL_SUM: ReduceOp.SUM,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
}
_BITWISE: dict[Any, np.ufunc] = {
    dist.ReduceOp.BAND: np.bitwise_and,
    dist.ReduceOp.BOR: np.bitwise_or,
    dist.ReduceOp.BXOR: np.bitwise_xor,
}
_specs: dict[tuple[torch.dtype, int], TensorSpec] = {}


@dataclass(frozen=True)
class Reduction:
    """A combination of elements.

    Attributes:
        name: torch's.
        op: of the data plane.
        prescale, postscale: factors of each rank's elements before, and of the results.
        bitwise: combines integers bit by bit instead of ``op``.
    """

    name: str
    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0
    bitwise: np.ufunc | None = None

    @classmethod
    def of(cls, given: Any, size: int) -> Reduction:
        """Return the meaning of one of torch's reductions among ``size`` ranks.

        Raises:
            InvalidArgumentError: (a ValueError) there is no such reduction.
        """
        kind = getattr(given, "op", given)
        bitwise = _BITWISE.get(kind)
        if bitwise is not None:
            return cls(kind.name, ReduceOp.SUM, bitwise=bitwise)
        op = _OPS.get(kind)
        if op is None:
            raise InvalidArgumentError(f"the backend hvdgloo cannot reduce with {given}")
        if kind == dist.ReduceOp.AVG:
            return cls(kind.name, op, postscale=1.0 / size)
        if kind == dist.ReduceOp.PREMUL_SUM:
            factor = given.__getstate__()[1]
            return cls(kind.name, op, prescale=float(factor))
        return cls(kind.name, op)

    def check(self, dtype: torch.dtype) -> None:
        """Check that elements of a type can be combined so.

        Raises:
            InvalidArgumentError: (a ValueError) they cannot.
        """
        if self.bitwise is not None and (dtype.is_floating_point or dtype.is_complex):
            raise InvalidArgumentError(
                f"the bits of {dtype} cannot be combined; BAND, BOR and BXOR are for integers and bools"
            )
        if dtype.is_complex and self.op is not ReduceOp.SUM:
            raise InvalidArgumentError(f"complex numbers can be summed or averaged, but have no {self.name}")


def check(tensor: torch.Tensor) -> None:
    """Check that a tensor is memory on the CPU.

    Raises:
        InvalidArgumentError: (a ValueError) it is on another device, sparse, or has no memory of its own; the text says
            what to do.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_cpu:
        reason = refusal(tensor)
        if reason is not None:
            raise InvalidArgumentError(reason)
    if not tensor.is_cpu:
        raise InvalidArgumentError(
            f"the backend hvdgloo is for CPU tensors, and this one is on {tensor.device}; move it with tensor.cpu(), "
            "or make a group of its own for that device, as in new_group(backend='nccl')"
        )
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(f"the backend hvdgloo takes no {tensor.layout} tensors; send tensor.to_dense()")
    # Nearly all addresses are higher than any place in a storage.
    if not tensor.data_ptr() >> 40 and (reason := refusal(tensor)) is not None:
        raise InvalidArgumentError(reason)


def source(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in contiguous memory: its own, or a copy."""
    check(tensor)
    return tensor.detach().contiguous() if _is_plain(tensor) else _copy(tensor)


def target(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """Return contiguous memory for results: the tensor's own, or memory from which they are copied at the end."""
    check(tensor)
    if tensor.is_contiguous() and _is_plain(tensor):
        return tensor.detach(), None
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return staged, lambda: tensor.detach().copy_(staged)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values are what stands in its memory."""
    return not tensor.is_conj() and not tensor.is_neg() and not tensor._is_zerotensor()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def inout(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """Return ``target``'s memory, with the tensor's elements in it."""
    memory, finish = target(tensor)
    if finish is not None:
        memory.copy_(tensor.detach())
    return memory, finish


def numbers(tensor: torch.Tensor) -> Buffer:
    """Return a contiguous tensor's memory as elements to compute with; complex numbers are pairs.

    Raises:
        InvalidArgumentError: (a ValueError) nothing computes with such elements.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidArgumentError(
            f"the backend hvdgloo cannot reduce tensors of {tensor.dtype}; it can move them unchanged"
        )
    return Buffer(tensor.data_ptr(), _spec(tensor.dtype, tensor.numel()), tensor)


def content(tensor: torch.Tensor) -> Buffer:
    """Return a contiguous tensor's memory as bytes."""
    return Buffer(tensor.data_ptr(), _spec(torch.uint8, tensor.nbytes), tensor)


def _spec(dtype: torch.dtype, count: int) -> TensorSpec:
    key = dtype, count
    known = _specs.get(key)
    if known is None:
        if len(_specs) > 4096:
            _specs.clear()
        known = _specs[key] = TensorSpec(DTYPES[dtype], (count,))
    return known


def joined(finishes: Sequence[Finish | None]) -> Finish | None:
    """Return one function that calls all; None if there is none to call."""
    given = [finish for finish in finishes if finish is not None]
    if len(given) < 2:
        return given[0] if given else None

    def finish() -> None:
        for each in given:
            each()

    return finish
