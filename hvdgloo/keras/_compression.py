"""Compressors for the tensors of Keras's backend."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from hvdgloo._collectives.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor"]


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16: Any
    bf16: Any


_HOMES = {
    "jax": "hvdgloo.keras._on_jax",
    "tensorflow": "hvdgloo.tensorflow.compression",
    "torch": "hvdgloo.torch.compression",
}

if keras.backend.backend() in _HOMES:
    _home = importlib.import_module(_HOMES[keras.backend.backend()])
    Compression.fp16, Compression.bf16 = _home.FP16Compressor, _home.BF16Compressor
