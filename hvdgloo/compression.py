"""Fewer bytes on the wire: a Compressor changes a tensor before a collective and changes the result back.

Horovod's programs write ``Compression.fp16`` and derive their own classes from ``Compression.none``, so compressors are
classes with static methods. The only framework-specific part is the cast, which an adapter brings.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from hvdgloo.adapters import TensorAdapter
from hvdgloo.types import DType

T = TypeVar("T")


class Compressor(Protocol[T]):
    """Two functions that undo each other, up to rounding. A class with static methods serves as well as an instance."""

    def compress(self, tensor: T) -> tuple[T, Any]:
        """The tensor to send, and whatever ``decompress`` needs to know. The tensor given is not written."""

    def decompress(self, tensor: T, ctx: Any) -> T:
        """The reduced tensor in the form that the original had."""


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: T) -> tuple[T, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: T, ctx: None) -> T:
        return tensor


def compress_fp16(adapter: TensorAdapter[T], tensor: T) -> tuple[T, DType | None]:
    """Halve (float32) or quarter (float64) a tensor's bytes.

    Other types are left alone: bfloat16 would gain nothing and lose range, integers would lose digits.

    Returns:
        the float16 tensor and the original type, or the very tensor and None.
    """
    dtype = adapter.describe(tensor).dtype
    if not dtype.is_floating or dtype.itemsize <= DType.FLOAT16.itemsize:
        return tensor, None
    return adapter.cast(tensor, DType.FLOAT16), dtype


def decompress_fp16(adapter: TensorAdapter[T], tensor: T, dtype: DType | None) -> T:
    """The inverse of ``compress_fp16``."""
    return tensor if dtype is None else adapter.cast(tensor, dtype)
