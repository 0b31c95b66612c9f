"""Compressors for MXNet's arrays."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo.mxnet._adapter import MXNetAdapter, Tensor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(compression.FP16Compressor[Tensor]):
    __doc__ = compression.FP16Compressor.__doc__
    adapter = MXNetAdapter()


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
