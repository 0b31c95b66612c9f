"""A Keras model in the form that Spark's Python workers load for ``transform``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from hvdgloo.spark.keras._layout import Layout
from hvdgloo.spark.keras._library import Library
from hvdgloo.spark.keras._models import model_of, register

Array = NDArray[Any]


@dataclass(frozen=True)
class KerasPredictor:
    """A model that can be pickled.

    Args:
        library: the library to set up before ``packed`` is unpickled, which may import it.
        archive: the model.
        packed: the archive's custom objects and a ``Layout``, pickled by cloudpickle.
    """

    library: Library
    archive: bytes
    packed: bytes

    def load(self) -> Callable[[list[Array]], list[Array]]:
        """Return a function from columns to columns, of shapes (rows,) or (rows, ...).

        Raises:
            ConfigError: (a ValueError) this process has imported Keras on another backend, or the model cannot be read.
            MissingDependencyError: the library or its backend is not installed here.
        """
        self.library.use()
        custom_objects, layout = cloudpickle.loads(self.packed)
        register(self.library, custom_objects)
        return applying(model_of(self.library, self.archive, custom_objects), layout)


def applying(model: Any, layout: Layout) -> Callable[[list[Array]], list[Array]]:
    """Return a function from columns to columns that applies a model."""

    def apply(columns: list[Array]) -> list[Array]:
        outputs = model.predict_on_batch(layout.features(columns))
        return [np.asarray(array) for array in layout.targets.arrays(outputs)]

    return apply
