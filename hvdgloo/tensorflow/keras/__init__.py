"""``import hvdgloo.tensorflow.keras as hvd``: ``hvdgloo.keras`` for programs that train ``tf.keras`` models."""

from __future__ import annotations

from hvdgloo import keras
from hvdgloo._collectives.names import bind
from hvdgloo.tensorflow.keras import (
    _functions,
    _optimizer,
    callbacks,  # noqa: F401 - exported below
    elastic,  # noqa: F401 - programs write hvd.elastic.run, and import only hvd
)

__all__ = bind(globals(), [_functions, _optimizer, keras], keras.__all__)
