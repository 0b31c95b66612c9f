"""Compressors for numpy arrays."""

from __future__ import annotations

from hvdgloo.compression import NoneCompressor, compress_fp16, decompress_fp16
from hvdgloo.numpy.adapter import Array, NumpyAdapter
from hvdgloo.types import DType

__all__ = ["Compression", "FP16Compressor", "NoneCompressor"]

_adapter = NumpyAdapter()


class FP16Compressor:
    """Sends float32 and float64 as float16; other types as they are."""

    @staticmethod
    def compress(tensor: Array) -> tuple[Array, DType | None]:
        return compress_fp16(_adapter, tensor)

    @staticmethod
    def decompress(tensor: Array, ctx: DType | None) -> Array:
        return decompress_fp16(_adapter, tensor, ctx)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
