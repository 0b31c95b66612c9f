"""Compressors for torch tensors."""

from __future__ import annotations

import torch

from hvdgloo.compression import NoneCompressor, compress_fp16, decompress_fp16
from hvdgloo.torch.adapter import TorchAdapter
from hvdgloo.types import DType

__all__ = ["Compression", "FP16Compressor", "NoneCompressor"]

_adapter = TorchAdapter()


class FP16Compressor:
    """Sends float32 and float64 as float16; other types as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, DType | None]:
        return compress_fp16(_adapter, tensor)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: DType | None) -> torch.Tensor:
        return decompress_fp16(_adapter, tensor, ctx)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
