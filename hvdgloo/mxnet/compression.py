"""Compressors for MXNet's arrays."""

from __future__ import annotations

from hvdgloo._collectives.compression import Compressor, NoneCompressor, narrow, widen
from hvdgloo.mxnet._adapter import MXNetAdapter, Tensor
from hvdgloo.types import DType

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

_adapter = MXNetAdapter()


class FP16Compressor:
    """Sends float32 and float64 as float16; other types as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, DType | None]:
        return narrow(_adapter, tensor, DType.FLOAT16)

    @staticmethod
    def decompress(tensor: Tensor, ctx: DType | None) -> Tensor:
        return widen(_adapter, tensor, ctx)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
