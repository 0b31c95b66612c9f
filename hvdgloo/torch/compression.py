"""Compressors for torch tensors."""

from __future__ import annotations

import torch

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo.torch._adapter import TorchAdapter
from hvdgloo.torch._powersgd import PowerSGD

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "PowerSGD"]


class FP16Compressor(compression.FP16Compressor[torch.Tensor]):
    __doc__ = compression.FP16Compressor.__doc__
    adapter = TorchAdapter()


class BF16Compressor(compression.BF16Compressor[torch.Tensor]):
    __doc__ = compression.BF16Compressor.__doc__
    adapter = TorchAdapter()


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    powersgd = PowerSGD
    """Only for DistributedOptimizer, one instance for each: ``compression=hvd.Compression.powersgd(rank=4)``."""
