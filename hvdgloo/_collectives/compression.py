"""Fewer bytes on the wire: a Compressor changes a tensor before a collective and changes the result back.

Horovod's programs write ``Compression.fp16`` and derive their own classes from ``Compression.none``, so compressors are
classes that are never instantiated. The only framework-specific part is the cast, which an adapter provides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import DType, TensorSpec

T = TypeVar("T")


class Compressor(Protocol[T]):
    """Two functions, each the inverse of the other up to rounding. A class with static methods serves as well as an
    instance."""

    def compress(self, tensor: T) -> tuple[T, Any]:
        """The tensor to send, and whatever ``decompress`` needs to know. The tensor given is not written."""

    def decompress(self, tensor: T, ctx: Any) -> T:
        """The reduced tensor in the original's form."""


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: T) -> tuple[T, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: T, ctx: None) -> T:
        return tensor


class Casts(Protocol[T]):
    """What casting compressors need from an adapter."""

    def describe(self, tensor: T) -> TensorSpec:
        """As ``TensorAdapter.describe``."""

    def cast(self, tensor: T, dtype: DType) -> T:
        """As ``TensorAdapter.cast``."""


class _CastCompressor(Generic[T]):
    # A front-end derives its own from the two below, and gives them its adapter.
    adapter: ClassVar[Casts[Any]]
    dtype: ClassVar[DType]

    @classmethod
    def compress(cls, tensor: T) -> tuple[T, DType | None]:
        """The tensor in fewer bytes, and its original type; or the tensor itself and None.

        Two-byte types would gain nothing, and integers would lose digits. What cannot be sent (complex numbers) is
        not compressed either.
        """
        try:
            dtype = cls.adapter.describe(tensor).dtype
        except InvalidArgumentError:
            return tensor, None
        if not dtype.is_floating or dtype.itemsize <= cls.dtype.itemsize:
            return tensor, None
        narrow: T = cls.adapter.cast(tensor, cls.dtype)
        return narrow, dtype

    @classmethod
    def decompress(cls, tensor: T, ctx: DType | None) -> T:
        """The tensor in its original type."""
        wide: T = tensor if ctx is None else cls.adapter.cast(tensor, ctx)
        return wide


class FP16Compressor(_CastCompressor[T]):
    """Sends float32 and float64 as float16; other types as they are."""

    dtype = DType.FLOAT16


class BF16Compressor(_CastCompressor[T]):
    """Sends float32 and float64 as bfloat16, which keeps float32's range; other types as they are."""

    dtype = DType.BFLOAT16


class MultiStep(Protocol[T]):
    """What a compressor that needs several collectives for one gradient has in addition, for GradientReducer."""

    def begin(self, frontend: Any, operation: Any, name: str, gradients: Sequence[T]) -> Steps[T]:
        """Begin with gradients that travel together. Called while the backward pass runs; must not block."""


class Steps(Protocol[T]):
    """Gradients whose compression such a compressor has begun."""

    def advance(self) -> None:
        """Wait for the collective under way, and start the next. Called once, before ``wait``."""

    def wait(self) -> list[T]:
        """The reduced gradients."""
