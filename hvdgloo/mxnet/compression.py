"""Compressors for MXNet's arrays."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo.mxnet._adapter import MXNetAdapter

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compression(compression.Compression, adapter=MXNetAdapter()):
    """The compressors to choose from: how tensors travel in fewer bytes, at the price of rounding."""


FP16Compressor = Compression.fp16
