"""The Keras 3 front-end, on its TensorFlow, torch and JAX backends: ``import hvdgloo.keras as hvd``.

::

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    model.fit(own_part_of_the_data, callbacks=callbacks, verbose=hvd.rank() == 0)
"""

from __future__ import annotations

from hvdgloo.errors import MissingDependencyError

try:
    import keras
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing in ("tensorflow", "torch", "jax"):
        raise MissingDependencyError(
            f"Keras is set to use {missing}, which is not installed: pip install {missing}, or set KERAS_BACKEND "
            "to another of tensorflow, torch and jax"
        ) from error
    if missing != "keras":
        raise
    raise MissingDependencyError(
        "hvdgloo.keras needs Keras 3: pip install 'hvdgloo[keras]'; and a backend for it: pip install one of "
        "tensorflow, torch and jax, and name it by KERAS_BACKEND unless it is tensorflow"
    ) from error

if int(keras.__version__.partition(".")[0]) < 3:
    raise MissingDependencyError(
        f"hvdgloo.keras needs Keras 3, and Keras {keras.__version__} is installed: pip install --upgrade "
        "'hvdgloo[keras]' (programs of Keras 2 run with tf_keras: docs/migrating.md says how)"
    )

from hvdgloo._collectives.names import BASE, OBJECTS, VALUES, bind
from hvdgloo.keras import (
    _compression,
    _functions,
    _optimizer,
    callbacks,  # noqa: F401 - exported below
    elastic,  # noqa: F401 - programs write hvd.elastic.run, and import only hvd
)
from hvdgloo.numpy._frontend import FRONTEND

__all__ = bind(
    globals(),
    [_functions, _optimizer, _compression, FRONTEND],
    [*BASE, *OBJECTS, *VALUES],
    own=[
        "Compression",
        "DistributedOptimizer",
        "PartialDistributedOptimizer",
        "allgather",
        "allreduce",
        "broadcast",
        "broadcast_global_variables",
        "callbacks",
        "load_model",
        "reducescatter",
    ],
)
