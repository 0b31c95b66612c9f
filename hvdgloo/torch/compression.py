"""Compressors for torch tensors."""

from __future__ import annotations

import torch

from hvdgloo._collectives.compression import Compressor, NoneCompressor, narrow, widen
from hvdgloo.torch._adapter import TorchAdapter
from hvdgloo.torch._powersgd import PowerSGD
from hvdgloo.types import DType

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "PowerSGD"]

_adapter = TorchAdapter()


class FP16Compressor:
    """Sends float32 and float64 as float16; other types as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, DType | None]:
        return narrow(_adapter, tensor, DType.FLOAT16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: DType | None) -> torch.Tensor:
        return widen(_adapter, tensor, ctx)


class BF16Compressor:
    """Sends float32 and float64 as bfloat16, which keeps float32's range; other types as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, DType | None]:
        return narrow(_adapter, tensor, DType.BFLOAT16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: DType | None) -> torch.Tensor:
        return widen(_adapter, tensor, ctx)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    powersgd = PowerSGD
    """Only for DistributedOptimizer, one instance for each: ``compression=hvd.Compression.powersgd(rank=4)``."""
