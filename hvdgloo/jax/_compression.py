"""Compressors for JAX's arrays, also in functions that are being traced."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo.jax._adapter import JaxAdapter

__all__ = ["Compression"]


class Compression(compression.Compression, adapter=JaxAdapter()):
    """The compressors to choose from: how tensors travel in fewer bytes, at the price of rounding."""

    bf16 = compression.BF16Compressor
