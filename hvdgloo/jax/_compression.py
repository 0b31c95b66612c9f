"""Compressors for JAX's arrays, also in functions that are being traced."""

from __future__ import annotations

from hvdgloo._collectives import compression
from hvdgloo.jax._adapter import JaxAdapter

__all__ = ["Compression"]


class Compression(compression.Compression, adapter=JaxAdapter()):
    """The compressors to choose from."""

    bf16 = compression.BF16Compressor
