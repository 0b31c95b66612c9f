"""Compressors for numpy arrays."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo.numpy._adapter import NumpyAdapter

__all__ = ["Compression"]


class Compression(compression.Compression, adapter=NumpyAdapter()):
    """The compressors to choose from: how tensors travel in fewer bytes, at the price of rounding."""
