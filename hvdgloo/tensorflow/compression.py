"""Compressors for TensorFlow's tensors."""

from __future__ import annotations

from hvdgloo._collectives.compression import Compressor, NoneCompressor, narrow, widen
from hvdgloo.tensorflow._adapter import Tensor, TensorFlowAdapter
from hvdgloo.types import DType

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

_adapter = TensorFlowAdapter()


class FP16Compressor:
    """Sends float32 and float64 as float16; other types as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, DType | None]:
        return narrow(_adapter, tensor, DType.FLOAT16)

    @staticmethod
    def decompress(tensor: Tensor, ctx: DType | None) -> Tensor:
        return widen(_adapter, tensor, ctx)


class BF16Compressor:
    """Sends float32 and float64 as bfloat16, which keeps float32's range; other types as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, DType | None]:
        return narrow(_adapter, tensor, DType.BFLOAT16)

    @staticmethod
    def decompress(tensor: Tensor, ctx: DType | None) -> Tensor:
        return widen(_adapter, tensor, ctx)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
