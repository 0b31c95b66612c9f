"""numpy arrays as the Frontend sees them: the reference adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.adapter import Tape, kind_of, not_sendable
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import Buffer, DType, TensorSpec

Array = npt.NDArray[Any]

# By name, not by numpy type: ml_dtypes registers a bfloat16 that numpy itself does not know.
_DTYPES = {dtype.value: dtype for dtype in DType}


class NumpyAdapter:
    """TensorAdapter for ``numpy.ndarray`` and for the scalars that numpy's functions return.

    C-contiguous arrays in native byte order are shared with the engine, others staged. numpy records no gradients.
    """

    def owns(self, tensor: object) -> bool:
        return isinstance(tensor, (np.ndarray, np.generic))

    def describe(self, tensor: Array) -> TensorSpec:
        dtype = _DTYPES.get(tensor.dtype.name)
        if dtype is None:
            pairs = "numpy.stack([array.real, array.imag])"
            raise not_sendable(kind_of(np.asarray(tensor)), "arrays", _DTYPES, pairs)
        return TensorSpec(dtype, tensor.shape)

    def export(self, tensor: Array, *, writable: bool = False, known: TensorSpec | None = None) -> Buffer:
        if not self.owns(tensor):
            raise InvalidArgumentError(
                f"expected a numpy array, not {type(tensor).__name__}; numpy.asarray makes one of numbers and lists"
            )
        spec = self.describe(tensor)
        if writable and not tensor.flags.writeable:
            raise InvalidArgumentError("the array is read-only, so a result cannot be written into it")
        owner = tensor
        if not (isinstance(tensor, np.ndarray) and tensor.flags.c_contiguous and tensor.dtype.isnative):
            owner = np.array(tensor, dtype=tensor.dtype.newbyteorder("="), order="C", copy=True, subok=False)
        return Buffer(owner.__array_interface__["data"][0], spec, owner)

    def allocate(self, spec: TensorSpec, like: Array) -> Array:
        return np.empty(
            spec.shape, like.dtype.newbyteorder("=") if spec.dtype.value == like.dtype.name else spec.dtype.numpy_dtype
        )

    def deliver(self, result: Array, target: Array, *, in_place: bool) -> Array:
        if not in_place:
            return result
        if result is not target:
            target[...] = result
        return target

    def values(self, tensor: Array) -> Array:
        return tensor

    def cast(self, tensor: Array, dtype: DType) -> Array:
        return tensor.astype(dtype.numpy_dtype)

    def fence(self, tensors: Sequence[Array]) -> Callable[[], None] | None:
        return None

    def differentiable(
        self,
        forward: Callable[[Sequence[Array]], list[Array]],
        backward: Callable[[Tape[Array], Sequence[Array]], Sequence[Array]],
        inputs: Sequence[Array],
        *,
        keep: bool,
    ) -> list[Array]:
        return forward(inputs)
