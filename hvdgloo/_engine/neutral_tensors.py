"""The contribution of a rank that has joined to operations that the others go on with: tensors that change nothing.

For a sum these are zeros (an average still divides by all ranks); for a minimum the largest number, for a maximum the
smallest, for a product one.
"""

from __future__ import annotations

import numpy as np

from hvdgloo._backends.kernels import narrow_bfloat16
from hvdgloo._engine.messages import Request
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo.types import Buffer, DType, ReduceOp, TensorSpec


def stand_in(request: Request) -> Submission:
    """Make a submission of neutral tensors, in memory of its own, whose results are never read."""
    buffers = [_neutral(spec, request.op) for spec in request.tensors]
    return Submission(PersistentRequest(request), buffers, buffers)


def _neutral(spec: TensorSpec, op: ReduceOp) -> Buffer:
    array = np.full(spec.shape, _element(spec.dtype, op), spec.dtype.numpy_dtype)
    return Buffer.of_array(array, spec.dtype)


def _element(dtype: DType, op: ReduceOp) -> object:
    """The neutral element of ``op``, which leaves the other operand as it is."""
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return _encoded(1.0 if op is ReduceOp.PRODUCT else 0.0, dtype)
    if dtype is DType.BOOL:
        return op is ReduceOp.MIN
    if not dtype.is_floating:
        limits = np.iinfo(dtype.numpy_dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return _encoded(np.inf if op is ReduceOp.MIN else -np.inf, dtype)


def _encoded(value: float, dtype: DType) -> object:
    return narrow_bfloat16(np.array([value], np.float32))[0] if dtype is DType.BFLOAT16 else value
