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


if keras.backend.backend() == "jax":
    _home = importlib.import_module("hvdgloo.keras._on_jax")
    Compression.fp16, Compression.bf16 = _home.JaxFP16Compressor, _home.JaxBF16Compressor
elif keras.backend.backend() in ("tensorflow", "torch"):
    _home = importlib.import_module(f"hvdgloo.{keras.backend.backend()}.compression")
    Compression.fp16, Compression.bf16 = _home.FP16Compressor, _home.BF16Compressor
