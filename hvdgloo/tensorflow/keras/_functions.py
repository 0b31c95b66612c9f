"""``load_model`` for programs of ``tf.keras``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo.keras import _functions as functions
from hvdgloo.keras import _legacy as legacy
from hvdgloo.keras._distributed import KerasOptions

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Compressor[Any] = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """``hvdgloo.keras.load_model``; where ``tf.keras`` is tf_keras (TF_USE_LEGACY_KERAS=1), for what that has saved.

    Args:
        filepath: of a ``.keras`` or ``.h5`` file; with tf_keras, also of a SavedModel's folder.
        custom_optimizers, custom_objects, compression, legacy_opts: see there.
    """
    if not tf.keras.Model.__module__.startswith("tf_keras."):
        return functions.load_model(filepath, custom_optimizers, custom_objects, compression, legacy_opts)
    names = functions.names_in_file(custom_optimizers, custom_objects)
    return legacy.load_model(filepath, names, KerasOptions(compression=compression))
