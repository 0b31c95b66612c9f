"""Compressors for numpy arrays."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import NoneCompressor
from hvdgloo.numpy._adapter import Array, NumpyAdapter

__all__ = ["Compression", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(compression.FP16Compressor[Array]):
    __doc__ = compression.FP16Compressor.__doc__
    adapter = NumpyAdapter()


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
