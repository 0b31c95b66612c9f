"""Compressors for TensorFlow's tensors."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo.tensorflow._adapter import TensorFlowAdapter

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compression(compression.Compression, adapter=TensorFlowAdapter()):
    """The compressors to choose from: how tensors travel in fewer bytes, at the price of rounding."""

    bf16 = compression.BF16Compressor


FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
