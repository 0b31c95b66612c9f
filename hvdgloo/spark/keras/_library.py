"""The two libraries that are called Keras: Keras 3 on one of its backends, and tf_keras, which is Keras 2.

An estimator's model, optimizer, losses and metrics belong to one of them. Ranks must use the same one, on the same
backend, and Keras chooses its backend when it is imported. So this module imports neither of them: a rank calls
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
    """One of the libraries, in the way that one process uses it.

    Args:
        name: of its module, ``"keras"`` or ``"tf_keras"``.
        backend: ``"tensorflow"``, ``"torch"`` or ``"jax"``; of tf_keras always ``"tensorflow"``.
    """

    name: str
    backend: str

    @property
    def module(self) -> Any:
        """The library itself, imported when it is first asked for."""
        return importlib.import_module(self.name)

    @property
    def floatx(self) -> str:
        """The type of floating-point numbers that it computes with by default."""
        return str(self.module.backend.floatx())

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a new process use it."""
        # With the second one, a model's code finds tf_keras as tf.keras.
        return {"KERAS_BACKEND": self.backend, **({"TF_USE_LEGACY_KERAS": "1"} if self.name == "tf_keras" else {})}

    @classmethod
    def here(cls, name: str) -> Library:
        """The library of this name, in the way that this process uses it.

        Raises:
            ConfigError: (a ValueError) it is neither of the two; the name may have been read from a file.
            MissingDependencyError: it is not installed.
        """
        if name not in _NAMES:
            raise ConfigError(f"this belongs to {name!r}, and a KerasEstimator knows {' and '.join(_NAMES)} only")
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"this belongs to {name}, which is not installed here") from error
        return cls(name, "tensorflow" if name == "tf_keras" else module.backend.backend())

    @property
    def title(self) -> str:
        """What messages call it."""
        return "tf_keras" if self.name == "tf_keras" else f"Keras 3 on {self.backend}"

    def use(self) -> None:
        """Make this process use the library in this way. To be called before anything imports it.

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
                f"the model is one of {self.title}, and {error.name} is not installed where it is to be used"
            ) from error
        if backend != self.backend:
            raise ConfigError(
                f"the model is one of {self.title}, and this process has imported Keras on {backend}; set "
                f"KERAS_BACKEND={self.backend}"
            )
        if is_first and backend != "tensorflow":
            _look_for_tensorflow(keras)


def _look_for_tensorflow(keras: Any) -> None:
    """Have Keras find out that it need not expect tensors of TensorFlow.

    It does so when it first saves or loads something, by importing TensorFlow if it is installed: seconds, and hundreds
    of MB, in every rank and Python worker that has another backend. What imports it afterwards gets it as ever.
    """
    if "tensorflow" in sys.modules:
        return
    sys.modules["tensorflow"] = None  # type: ignore[assignment] # which makes an import of it fail
    try:
        keras.saving.serialize_keras_object(keras.layers.Flatten())
    finally:
        del sys.modules["tensorflow"]


def library_of(value: Any) -> Library | None:
    """The library to which a model, an optimizer, a loss, a metric or a callback belongs; None if to neither.

    Raises:
        MissingDependencyError: it belongs to an older Keras than 3.
    """
    for base in type(value).__mro__:
        name = base.__module__.partition(".")[0]
        if name not in _NAMES:
            continue
        if name == "keras" and int((version := importlib.import_module(name).__version__).partition(".")[0]) < 3:
            raise MissingDependencyError(
                f"KerasEstimator needs Keras 3 or tf_keras, and Keras {version} is installed: pip install --upgrade "
                "'hvdgloo[keras]'"
            )
        return Library.here(name)
    return None


def library_of_model(model: Any) -> Library:
    """The library of a model.

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
