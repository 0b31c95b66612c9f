"""Compressors for the tensors of Keras's backend."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import Compressor, is_elementwise

__all__ = ["Compression", "Compressor"]


class Compression(compression.Compression):
    """The compressors to choose from: how tensors travel in fewer bytes, at the price of rounding."""

    bf16: Any


_HOMES = {
    "jax": "hvdgloo.jax._compression",
    "tensorflow": "hvdgloo.tensorflow.compression",
    "torch": "hvdgloo.torch.compression",
}

if keras.backend.backend() in _HOMES:
    for _name, _compressor in vars(importlib.import_module(_HOMES[keras.backend.backend()]).Compression).items():
        if is_elementwise(_compressor):
            setattr(Compression, _name, _compressor)
