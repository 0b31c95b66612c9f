"""Tiny allreduces that travel inside the agreement itself.

For a few bytes, the agreement is the whole cost of an allreduce. So a rank that has nothing else to do sends a small
tensor's bytes along; if all ranks did, the coordinator reduces them, and its order to execute carries the result. No
data plane takes part. If some rank did not (it has several operations under way, which fuse better), all execute as
usual.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._backends import kernels
from hvdgloo._engine.messages import Request
from hvdgloo.types import Buffer, Collective, ReduceOp


def suits(request: Request, limit: int) -> bool:
    """True if a rank may send the tensor of this request along: one in CPU memory, of 1 to ``limit`` bytes."""
    return (
        request.collective is Collective.ALLREDUCE
        and request.op is not ReduceOp.ADASUM
        and len(request.tensors) == 1
        and request.tensors[0].device == "cpu"
        and 0 < request.tensors[0].nbytes <= limit
    )


def payload(source: Buffer) -> bytes:
    """A tensor's bytes."""
    return ctypes.string_at(source.address, source.nbytes)


def combine(request: Request, payloads: Sequence[bytes], size: int, *, prescale: bool = True) -> bytes:
    """The allreduce of payloads, element by element in the order given, factors applied.

    Args:
        size: of the process set, by which an average divides; members that have joined send no payload.
        prescale: whether the prescale factor is still to be applied.

    Returns:
        the result's bytes; empty if the payloads are not of the request's size.
    """
    total = _total(request, payloads, prescale=prescale)
    if total is None:
        return b""
    factor = request.factor_after(size)
    if factor != 1.0:
        kernels.scale(Buffer.of_array(total, request.tensors[0].dtype), factor)
    return total.tobytes()


def reduced(request: Request, payloads: Sequence[bytes], *, prescale: bool = False) -> bytes:
    """A part of what ``combine`` does, for the payloads of some ranks: a payload that stands for theirs. Empty if they
    are not of the request's size."""
    total = _total(request, payloads, prescale=prescale)
    return b"" if total is None else total.tobytes()


def _total(request: Request, payloads: Sequence[bytes], *, prescale: bool) -> npt.NDArray[Any] | None:
    spec = request.tensors[0]
    for data in payloads:
        if len(data) != spec.nbytes:
            return None
    arrays = [np.frombuffer(data, spec.dtype.numpy_dtype) for data in payloads]
    if prescale and request.prescale != 1.0:
        arrays = [array.copy() for array in arrays]
        for array in arrays:
            kernels.scale(Buffer.of_array(array, spec.dtype), request.prescale)
    return kernels.reduce(arrays, spec.dtype, request.combining)


def deliver(result: bytes, output: Buffer) -> None:
    """Write a result to where it belongs."""
    ctypes.memmove(output.address, result, output.nbytes)
