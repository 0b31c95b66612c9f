"""Fewer bytes on the wire: a Compressor changes a tensor before a collective and changes the result back.

Horovod's programs write ``Compression.fp16`` and derive their own classes from ``Compression.none``, so compressors are
classes with static methods. The only framework-specific part is the cast, which an adapter brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hvdgloo._collectives.adapter import TensorAdapter
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


class MultiStep(Protocol[T]):
    """What a compressor that needs several collectives for one gradient has besides, for GradientReducer."""

    def begin(self, frontend: Any, operation: Any, name: str, gradients: Sequence[T]) -> Steps[T]:
        """Start on gradients that travel together. Called while the backward pass runs; must not block."""


class Steps(Protocol[T]):
    """Gradients that such a compressor has begun with."""

    def advance(self) -> None:
        """Wait for the collective under way, and start the next. Called once, before ``wait``."""

    def wait(self) -> list[T]:
        """The reduced gradients."""


def narrow(adapter: TensorAdapter[T], tensor: T, to: DType) -> tuple[T, DType | None]:
    """Halve (float32) or quarter (float64) a tensor's bytes.

    Other types are left alone: those of two bytes would gain nothing, integers would lose digits.

    Args:
        to: FLOAT16 (more digits) or BFLOAT16 (float32's range).

    Returns:
        the narrow tensor and the original type, or the very tensor and None.
    """
    dtype = adapter.describe(tensor).dtype
    if not dtype.is_floating or dtype.itemsize <= to.itemsize:
        return tensor, None
    return adapter.cast(tensor, to), dtype


def widen(adapter: TensorAdapter[T], tensor: T, dtype: DType | None) -> T:
    """The inverse of ``narrow``."""
    return tensor if dtype is None else adapter.cast(tensor, dtype)
