"""Compressors for torch tensors."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo.torch._adapter import TorchAdapter
from hvdgloo.torch._powersgd import PowerSGD

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "PowerSGD"]


class Compression(compression.Compression, adapter=TorchAdapter()):
    """The compressors to choose from: how tensors travel in fewer bytes, at the price of rounding."""

    bf16 = compression.BF16Compressor
    powersgd = PowerSGD
    """Only for DistributedOptimizer, one instance for each: ``compression=hvd.Compression.powersgd(rank=4)``."""


FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
