"""Arithmetic on flat CPU memory, in numpy: what a backend that only moves bytes needs in order to reduce and scale.

numpy has no bfloat16. Its 16 bits are the upper half of a float32 (IEEE 754 binary32), so it is widened to one by a
shift, and narrowed by rounding to nearest, ties to even, as hardware does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo.types import Buffer, DType, ReduceOp

Array = npt.NDArray[Any]

_CHUNK = 1 << 18
"""Elements handled at a time where a temporary is needed, so that it stays in the cache."""

_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
_BOOL_UFUNCS = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
}


def widen_bfloat16(array: Array) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 elements (any array of two bytes each)."""
    values: npt.NDArray[np.float32] = (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def narrow_bfloat16(values: npt.NDArray[np.float32]) -> Array:
    """The bfloat16 elements nearest to float32 values; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    narrowed: npt.NDArray[np.uint16] = np.where(np.isnan(values), quiet, rounded >> np.uint32(16)).astype(np.uint16)
    return narrowed.view(DType.BFLOAT16.numpy_dtype)


def widen(array: Array, dtype: DType) -> Array:
    """The float32 values of a half type's elements."""
    return widen_bfloat16(array) if dtype is DType.BFLOAT16 else array.astype(np.float32)


def narrow(values: Array, dtype: DType) -> Array:
    """Float32 values rounded to a half type."""
    return narrow_bfloat16(values) if dtype is DType.BFLOAT16 else values.astype(np.float16)


def is_half(dtype: DType) -> bool:
    """True for the types whose arithmetic is done in float32."""
    return dtype in (DType.FLOAT16, DType.BFLOAT16)


def to_ordered(values: Array, op: ReduceOp) -> Array:
    """Signed integers in the order of float32, float64 or uint64 values, for a MIN or MAX of integers; there NaN wins,
    as it must.

    The bits of a float are sign and magnitude; the bits of negative numbers are reversed into the order of two's
    complement. An unsigned integer's highest bit becomes a sign.
    """
    if values.dtype.kind == "u":
        return _signed(values)
    bits = values.view(f"i{values.itemsize}")
    extreme = np.iinfo(bits.dtype).min if op is ReduceOp.MIN else np.iinfo(bits.dtype).max  # both mean NaN
    ordered: Array = np.where(np.isnan(values), extreme, _turned(bits))
    return ordered


def from_ordered(ordered: Array, dtype: DType) -> Array:
    """The inverse of ``to_ordered``, which was given values of this type, or of float32 for a half type."""
    if dtype is DType.UINT64:
        return _signed(ordered).view(np.uint64)
    values: Array = _turned(ordered).view(f"f{ordered.itemsize}")
    return values


def _signed(values: Array) -> Array:
    """64-bit integers with the highest bit flipped; its own inverse."""
    flipped: Array = values.view(np.int64) ^ np.iinfo(np.int64).min
    return flipped


def _turned(bits: Array) -> Array:
    """Its own inverse."""
    turned: Array = bits ^ ((bits >> (8 * bits.itemsize - 1)) & np.iinfo(bits.dtype).max)
    return turned


def divisor_of(factor: float) -> int:
    """The whole number that a factor is the reciprocal of; 0 if it is none.

    Integers are divided by it: 49 times the double nearest to 1/49 is less than 1, and would be truncated to 0.
    """
    divisor = round(1 / factor) if abs(factor) > 1e-9 else 0
    return divisor if divisor > 1 and 1.0 / divisor == factor else 0


def float_divisor_of(factor: float) -> int:
    """The same for floating-point numbers; also 0 where a product is as exact, as for powers of two.

    They are divided by it: 2 times the double nearest to 1/3 is 2/3, but 49 times the one nearest to 1/49 is not 1.
    """
    divisor = divisor_of(factor)
    return divisor if divisor & (divisor - 1) else 0


def ufunc(dtype: DType, op: ReduceOp) -> np.ufunc:
    """Return the function that combines two elements: for bool "or" (SUM, MAX) and "and" (MIN, PRODUCT)."""
    return _BOOL_UFUNCS[op] if dtype is DType.BOOL else _UFUNCS[op]


def scale(buffer: Buffer, factor: float) -> None:
    """Multiply every element of a CPU buffer in place; see ``Backend.scale``."""
    array, dtype = buffer.array(), buffer.dtype
    divisor = float_divisor_of(factor) if dtype.is_floating else divisor_of(factor)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in (DType.FLOAT32, DType.FLOAT64):
            if divisor:
                np.divide(array, array.dtype.type(divisor), out=array)
            else:
                np.multiply(array, array.dtype.type(factor), out=array)
            return
        for start in range(0, array.size, _CHUNK):
            chunk = array[start : start + _CHUNK]
            if is_half(dtype):
                wide = widen(chunk, dtype)
                chunk[:] = narrow(wide / np.float32(divisor) if divisor else wide * np.float32(factor), dtype)
            elif divisor and dtype is DType.UINT64:
                chunk //= np.uint64(divisor)
            elif divisor:
                wide = chunk.astype(np.int64)
                chunk[:] = wide // divisor + ((wide % divisor != 0) & (wide < 0))  # // rounds down
            else:
                # As C does it: the element times a double, truncated toward zero.
                chunk[:] = np.trunc(chunk.astype(np.float64) * factor).astype(chunk.dtype)


def reduce(arrays: Sequence[Array], dtype: DType, op: ReduceOp) -> Array:
    """Combine equally long arrays element by element, in the order given, into a new one.

    Half types are accumulated in float32 and rounded once; bool knows "or" (SUM, MAX) and "and" (MIN, PRODUCT).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if is_half(dtype):
            return narrow(_fold(ufunc(dtype, op), [widen(array, dtype) for array in arrays]), dtype)
        return _fold(ufunc(dtype, op), list(arrays))


def _fold(combine: np.ufunc, arrays: list[Array]) -> Array:
    result: Array = arrays[0].copy()
    for array in arrays[1:]:
        combine(result, array, out=result)
    return result
