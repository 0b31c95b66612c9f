"""Compressors for numpy arrays."""

from __future__ import annotations

from hvdgloo._collectives.compression import NoneCompressor, narrow, widen
from hvdgloo.numpy._adapter import Array, NumpyAdapter
from hvdgloo.types import DType

__all__ = ["Compression", "FP16Compressor", "NoneCompressor"]

_adapter = NumpyAdapter()


class FP16Compressor:
    """Sends float32 and float64 as float16; other types as they are."""

    @staticmethod
    def compress(tensor: Array) -> tuple[Array, DType | None]:
        return narrow(_adapter, tensor, DType.FLOAT16)

    @staticmethod
    def decompress(tensor: Array, ctx: DType | None) -> Array:
        return widen(_adapter, tensor, ctx)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
