"""Compressors for TensorFlow's tensors."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo.tensorflow._adapter import Tensor, TensorFlowAdapter

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(compression.FP16Compressor[Tensor]):
    __doc__ = compression.FP16Compressor.__doc__
    adapter = TensorFlowAdapter()


class BF16Compressor(compression.BF16Compressor[Tensor]):
    __doc__ = compression.BF16Compressor.__doc__
    adapter = TensorFlowAdapter()


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
