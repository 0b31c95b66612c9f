"""The two libraries called Keras: Keras 3 on one of its backends, and tf_keras, which is Keras 2.

An estimator's model, optimizer, losses and metrics belong to one of them. Ranks must use the same library on the same
backend, and Keras chooses its backend when it is imported. So this module imports neither: a rank calls
``Library.use()`` before it unpickles anything that does.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from hvdgloo.errors import ConfigError, MissingDependencyError

_NAMES = ("keras", "tf_keras")


@dataclass(frozen=True)
class Library:
    """One of the libraries, with the backend that a process uses.

    Args:
        name: the module's name, ``"keras"`` or ``"tf_keras"``.
        backend: ``"tensorflow"``, ``"torch"`` or ``"jax"``; for tf_keras always ``"tensorflow"``.
    """

    name: str
    backend: str

    @property
    def module(self) -> Any:
        """The library's module, imported at first use."""
        return importlib.import_module(self.name)

    @property
    def floatx(self) -> str:
        """The library's default floating-point type."""
        return str(self.module.backend.floatx())

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make a new process use this library and backend."""
        # The second one lets a model's code find tf_keras as tf.keras.
        return {"KERAS_BACKEND": self.backend, **({"TF_USE_LEGACY_KERAS": "1"} if self.name == "tf_keras" else {})}

    @classmethod
    def here(cls, name: str) -> Library:
        """Return the library of this name, with this process's backend.

        Raises:
            ConfigError: (a ValueError) it is neither of the two; the name may have been read from a file.
            MissingDependencyError: it is not installed.
        """
        if name not in _NAMES:
            raise ConfigError(f"this object belongs to {name!r}, but a KerasEstimator needs {' or '.join(_NAMES)}")
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"this object belongs to {name}, which is not installed here") from error
        return cls(name, "tensorflow" if name == "tf_keras" else module.backend.backend())

    @property
    def title(self) -> str:
        """Name for messages."""
        return "tf_keras" if self.name == "tf_keras" else f"Keras 3 on {self.backend}"

    def use(self) -> None:
        """Make this process use the library with this backend. Must be called before anything imports it.

        Raises:
            ConfigError: (a ValueError) this process has already imported Keras with another backend.
            MissingDependencyError: the library or its backend is not installed here.
        """
        is_first = "keras" not in sys.modules
        if is_first:
            os.environ.update(self.environment)
        try:
            keras = importlib.import_module("keras")
            backend = keras.backend.backend()
            importlib.import_module(self.name)
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"the model belongs to {self.title}, but {error.name} is not installed on this host"
            ) from error
        if backend != self.backend:
            raise ConfigError(
                f"the model belongs to {self.title}, but this process has imported Keras on {backend}; set "
                f"KERAS_BACKEND={self.backend}"
            )
        if is_first and backend != "tensorflow":
            _look_for_tensorflow(keras)


def _look_for_tensorflow(keras: Any) -> None:
    """Make Keras conclude that TensorFlow is not installed, and so not expect its tensors.

    Otherwise Keras imports an installed TensorFlow when it first saves or loads something, which takes seconds and
    hundreds of MB in every rank and Python worker with another backend. Later imports of TensorFlow work as usual.
    """
    if "tensorflow" in sys.modules:
        return
    sys.modules["tensorflow"] = None  # type: ignore[assignment] # makes importing it fail
    try:
        keras.saving.serialize_keras_object(keras.layers.Flatten())
    finally:
        del sys.modules["tensorflow"]


def library_of(value: Any) -> Library | None:
    """Return the library of a model, optimizer, loss, metric or callback; None if it belongs to neither.

    Raises:
        MissingDependencyError: it belongs to a Keras older than 3.
    """
    for base in type(value).__mro__:
        name = base.__module__.partition(".")[0]
        if name not in _NAMES:
            continue
        if name == "keras" and int((version := importlib.import_module(name).__version__).partition(".")[0]) < 3:
            raise MissingDependencyError(
                f"KerasEstimator needs Keras 3 or tf_keras, but Keras {version} is installed: pip install --upgrade "
                "'hvdgloo[keras]'"
            )
        return Library.here(name)
    return None


def library_of_model(model: Any) -> Library:
    """Return a model's library.

    Raises:
        ConfigError: (a ValueError) it is not a model of Keras 3 or tf_keras.
    """
    library = library_of(model)
    if library is None or not isinstance(model, library.module.Model):
        kind = type(model)
        is_torch = any(base.__module__.startswith("torch.") for base in kind.__mro__)
        raise ConfigError(
            f"model= is {kind.__module__}.{kind.__qualname__}, not a model of Keras 3 or tf_keras"
            f"{'; TorchEstimator trains it' if is_torch else ''}"
        )
    return library
