"""Conversion of models and their compilation to bytes and values that can be sent to other processes.

A model is sent and stored as a ``.keras`` archive, which both libraries read back completely. Its optimizer, losses and
metrics are sent as classes and configurations, since a loss may be a function, which an archive can only name.
"""

from __future__ import annotations

import io
import json
import logging
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdgloo._platform.spelling import followed_by
from hvdgloo.errors import ConfigError
from hvdgloo.spark.keras._library import Library, library_of, library_of_model

Array = NDArray[Any]

logger = logging.getLogger(__name__)

_HDF5 = b"\x89HDF"
_NUMBERED = re.compile(r"_\d+(?=/|$)")
_KEPT = ("jit_compile", "run_eagerly", "steps_per_execution", "weighted_metrics")
"""Arguments of compile() that a model keeps when it is given another optimizer, loss or metrics."""

_OF_COMPILE = ("accuracy", "acc", "crossentropy", "ce")
"""Names of metrics that only compile() knows, since their meaning depends on the model's output and loss."""


# Models.


def archive_of(model: Any) -> bytes:
    """Convert a model, with its optimizer's state if it is compiled, to the bytes of a ``.keras`` file.

    Raises:
        ConfigError: (a ValueError) the library cannot save it.
    """
    ensure_savable(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        try:
            with _silent_about_lambdas():
                # Not model.save(path), which hvd.callbacks.LogCallback takes for a checkpoint of its own.
                library_of_model(model).module.models.save_model(model, path)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"{model.name} cannot be saved, as it must be to be sent to the ranks: {error}"
            ) from error
        return path.read_bytes()


def ensure_savable(model: Any) -> bool:
    """Make sure that a model can be saved even if it is compiled with a lambda whose source is not on this machine.

    Keras quotes a lambda's source in a warning, and fails if there is none, since the lambda comes from a notebook on
    another host or from a saved estimator. The model is then saved as if it were compiled with its optimizer only.

    Returns:
        True if it will be saved with its whole compilation.
    """
    compile_config = type(model).get_compile_config
    saving = library_of_model(model).module.saving

    def with_its_optimizer() -> Any:
        try:
            return compile_config(model)
        except OSError:  # inspect did not find the source
            return {"optimizer": saving.serialize_keras_object(model.optimizer)}

    with _silent_about_lambdas():
        try:
            compile_config(model)
        except OSError:
            model.get_compile_config = with_its_optimizer
            return False
        except Exception:  # noqa: BLE001 - saving the model will raise it again
            return True
    return True


@contextmanager
def _silent_about_lambdas() -> Iterator[None]:
    # The warning is irrelevant: a loss may be a lambda, which is not sent in the archive.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
        yield


def model_of(library: Library, data: bytes, custom_objects: Mapping[str, Any]) -> Any:
    """Load a model from a ``.keras`` or ``.h5`` file's bytes, without compiling it, from a trusted source.

    Raises:
        ConfigError: (a ValueError) the library cannot read it.
    """
    return _loaded(library, data, custom_objects, compile=False, trusted=True)


def loaded_model(library: Library, data: bytes, custom_objects: Mapping[str, Any], *, trusted: bool) -> Any:
    """Load a model like ``model_of``, but compiled as it was saved, if that is possible.

    Args:
        trusted: allow unmarshalling functions, which a ``Lambda`` needs.

    Raises:
        ConfigError: (a ValueError) the library cannot read it, or it is not trusted and has such functions or is not a
            ``.keras`` archive.
    """
    if not trusted and (data.startswith(_HDF5) or not zipfile.is_zipfile(io.BytesIO(data))):
        # In its older formats tf_keras unmarshals functions regardless of safe_mode.
        raise ConfigError("this is not a .keras archive; model files of other formats are read only with trusted=True")
    try:
        return _loaded(library, data, custom_objects, compile=True, trusted=trusted)
    except ConfigError:
        model = _loaded(library, data, custom_objects, compile=False, trusted=trusted)
    logger.warning(
        "%s is not compiled, since classes or functions that it was compiled with are not known here; name them in "
        "custom_objects=",
        model.name,
    )
    return model


def _loaded(library: Library, data: bytes, custom_objects: Mapping[str, Any], *, compile: bool, trusted: bool) -> Any:
    ending = ".h5" if data.startswith(_HDF5) else ".keras"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"model{ending}")
        path.write_bytes(data)
        try:
            return library.module.models.load_model(
                path, custom_objects=dict(custom_objects), compile=compile, safe_mode=not trusted
            )
        except (TypeError, ValueError, OSError) as error:
            advice = "if it has custom classes or functions, name them in custom_objects="
            if "objects could not be loaded" in str(error):  # all classes are known, but weights are missing
                advice = "a model of your own class must be called on some rows before it is saved"
            raise ConfigError(
                f"this is not a model that {library.title} can load: {followed_by(_reason(error), advice)}"
            ) from error


def _reason(error: BaseException) -> str:
    """Return the library's original error, without the model's whole configuration, which it adds at every level."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error).partition(" Full object config:")[0]


def build(model: Any, names: Sequence[str], floatx: str, rows: Callable[[], Sequence[Array]]) -> None:
    """Build a model that does not know its inputs' shapes yet, by calling it on the data's first rows.

    ``model.build`` is not enough: after it, Keras saves a model of a custom class without its layers' weights.

    Args:
        names: names of the feature columns.
        floatx: the library's default floating-point type.
        rows: returns some rows, an array for each of the columns.

    Raises:
        ConfigError: (a ValueError) the model cannot be called on them.
    """
    if is_built(model):
        return
    # Single numbers are passed as rows of one number, as Keras always did for models that it builds.
    columns = [column.reshape(len(column), -1) if column.ndim == 1 else column for column in rows()]
    columns = [column.astype(floatx) for column in columns]
    first: Exception | None = None
    for given in (columns[0] if len(columns) == 1 else tuple(columns), dict(zip(names, columns, strict=True))):
        try:
            model(given)
        except Exception as error:  # noqa: BLE001 - the model's code is the user's
            first = first or error
            model.built = False  # a call that fails halfway leaves it True
        else:
            return
    assert first is not None
    shapes = ", ".join(f"{name!r} of shape {column.shape}" for name, column in zip(names, columns, strict=True))
    advice = "begin it with keras.Input, or call it on some rows in the form that it accepts"
    raise ConfigError(
        f"{model.name} is not built and cannot be called on the data's first rows, {shapes}: "
        f"{followed_by(_in_short(first), advice)}"
    ) from first


def is_built(model: Any) -> bool:
    """Return whether all of a model's weights exist."""
    if not model.built:
        return False
    return getattr(model, "inputs", None) is not None or all(layer.built for layer in model.layers)


def _in_short(error: Exception) -> str:
    """Return the reason why a call of a model failed, without colours and without Keras's list of arguments."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", _reason(error)).partition("\n\nArguments received")[0]
    return " ".join(text.split())


def load_weights(model: Any, data: bytes) -> None:
    """Load a model's weights from the bytes of an HDF5 file of the same model's weights."""
    with tempfile.TemporaryDirectory() as folder:
        # The libraries distinguish their current and older formats by the file extension.
        path = Path(folder, "model.h5" if "layer_names" in _attributes_of(data) else "model.weights.h5")
        path.write_bytes(data)
        model.load_weights(path)


def whole_model(data: bytes, model: Any, custom_objects: Mapping[str, Any]) -> bytes:
    """Return a whole model's file: ``data`` itself, or the archive of ``model`` with the weights from ``data``.

    Args:
        data: content of a ``.keras`` or HDF5 file.
        model: the model for a file of weights only; it is not changed.

    Raises:
        ConfigError: (a ValueError) the weights are another model's.
    """
    if not data.startswith(_HDF5) or "model_config" in _attributes_of(data):
        return data
    library = library_of_model(model)
    filled = model_of(library, archive_of(model), custom_objects)
    try:
        load_weights(filled, data)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"the file contains weights of another model than {model.name}: {error}") from error
    return archive_of(filled)


def _attributes_of(data: bytes) -> set[str]:
    """Return the names of an HDF5 file's attributes, including ``model_config`` if it contains a whole model."""
    import h5py

    with h5py.File(io.BytesIO(data), "r") as file:
        return set(file.attrs)


def load_state(model: Any, data: bytes) -> None:
    """Load a compiled model's weights and optimizer state from an archive of the same model.

    Accumulated gradients are dropped if the two accumulate over different numbers of steps.
    """
    own = model.optimizer
    passes = getattr(own, "gradient_accumulation_steps", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(data)
        config = _optimizer_config(path)
        saved = config.get("gradient_accumulation_steps")
        if saved == passes:
            model.load_weights(path)
            set_rate(own, config.get("learning_rate"))
            return
        # Keras would drop the whole state, because the numbers of variables differ.
        plain: Any = next(base for base in type(own).__mro__ if "_hvd_options" not in vars(base))
        other = plain.from_config({**own.get_config(), "gradient_accumulation_steps": saved})
        other.build(model.trainable_variables)
        model.optimizer = other
        try:
            model.load_weights(path)
        finally:
            model.optimizer = own
    for variable, source in zip(variables_of(own), variables_of(other), strict=True):
        variable.assign(array_of(source))


def signature_of(model: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a model's weights, without its own name and its layers' numbers.

    Keras numbers the layers of each kind in a process, so the same code run again in a notebook gets other numbers.
    """
    names = [getattr(weight, "path", weight.name).partition(":")[0] for weight in model.weights]
    own = f"{model.name}/"
    return [
        (_NUMBERED.sub("", name.removeprefix(own)), tuple(weight.shape))
        for name, weight in zip(names, model.weights, strict=True)
    ]


def registered_objects(library: Library) -> dict[str, Any]:
    """Return the objects that the program registered with the library, by their names in archives."""
    known = library.module.saving.get_custom_objects()
    return {
        name: value
        for name, value in known.items()
        if getattr(value, "__module__", "").partition(".")[0] not in ("keras", "tf_keras", "hvdgloo")
    }


def register(library: Library, names: Mapping[str, Any]) -> None:
    """Register objects that ``registered_objects`` found in the program, in this process, too.

    A class from the program's main module or a notebook arrives by pickle, without being registered by an import, and
    a model with it would be saved under a name that the program does not know.
    """
    known = library.module.saving.get_custom_objects()
    for name, value in names.items():
        package, separator, short = name.partition(">")
        if separator and known.get(name) is not value:
            library.module.saving.register_keras_serializable(package, short)(value)


# Compilation.


@dataclass(frozen=True)
class Part:
    """An optimizer, a loss or a metric as its class and configuration, from which another one can be made."""

    kind: type
    config: Mapping[str, Any]

    def make(self) -> Any:
        """Make a new object."""
        kind: Any = self.kind
        return kind.from_config(dict(self.config))


def is_part(value: Any) -> bool:
    """Return whether ``value`` is an object that its class can make again from its configuration."""
    return not isinstance(value, type) and hasattr(value, "get_config") and hasattr(value, "from_config")


def parts_of(value: Any) -> Any:
    """Replace the library's objects by ``Part`` in a structure of losses or metrics; names and functions stay.

    Raises:
        ConfigError: (a ValueError) a class, given instead of an object, requires arguments.
    """
    if isinstance(value, Mapping):
        return {name: parts_of(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [parts_of(each) for each in value]
    if isinstance(value, type):
        try:
            value = value()
        except TypeError as error:
            raise ConfigError(f"{value.__name__} is a class: give an instance of it. {error}") from error
    if is_part(value):
        return Part(type(value), value.get_config())
    return value


def made_of(value: Any) -> Any:
    """Replace each ``Part`` by a new object; the inverse of ``parts_of``."""
    if isinstance(value, Part):
        return value.make()
    if isinstance(value, dict):
        return {name: made_of(each) for name, each in value.items()}
    if isinstance(value, list):
        return [made_of(each) for each in value]
    return value


@dataclass(frozen=True)
class Compilation:
    """The arguments of ``compile``, and the optimizer's state.

    Args:
        optimizer: class and configuration of the optimizer.
        state: values of its variables; empty if it has none yet.
        loss, loss_weights, metrics: as ``compile`` takes them, with ``Part`` for the library's objects.
        options: other arguments of ``compile``.
    """

    optimizer: Part
    state: tuple[np.ndarray[Any, Any], ...]
    loss: Any
    loss_weights: Any
    metrics: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def compile(self, library: Library, model: Any, custom_objects: Mapping[str, Any], wrap: Any = None) -> None:
        """Compile a built model, and restore the optimizer's state.

        Args:
            wrap: converts the optimizer to the one to use.
        """
        with library.module.saving.custom_object_scope(dict(custom_objects)):
            optimizer = self.optimizer.make()
            model.compile(
                optimizer=optimizer if wrap is None else wrap(optimizer),
                loss=made_of(self.loss),
                loss_weights=self.loss_weights,
                metrics=made_of(self.metrics),
                **{name: made_of(value) for name, value in self.options.items()},
            )
        build_optimizer(model)
        ensure_savable(model)  # since the user's callbacks may save it
        if self.state:
            for variable, value in zip(variables_of(model.optimizer), self.state, strict=True):
                variable.assign(value)


def compilation_of(
    library: Library,
    model: Any,
    optimizer: Any = None,
    loss: Any = None,
    loss_weights: Sequence[float] | None = None,
    metrics: Any = None,
) -> Compilation:
    """Return the compilation for a model: the given arguments, and otherwise the model's own.

    Args:
        optimizer: an object, a name or a configuration, as ``compile`` takes it.
        loss, metrics: as ``compile`` takes them; None or empty for the model's own.

    Raises:
        ConfigError: (a ValueError) there is no optimizer or no loss, or the optimizer belongs to another library, is
            already distributed, or is unknown.
    """
    own: dict[str, Any] = dict(model.get_compile_config() or {}) if _is_compiled(model) else {}
    chosen = optimizer if optimizer is not None else getattr(model, "optimizer", None) if own else None
    if chosen is None:
        raise ConfigError("no optimizer: give optimizer=, or a model that has been compiled with one")
    if isinstance(chosen, (str, dict)):
        try:
            chosen = library.module.optimizers.get(chosen)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer={optimizer!r}: {library.title} does not know it: {error}") from error
    _check_optimizer(library, chosen)
    has_loss = loss is not None and not (isinstance(loss, (list, dict)) and not loss)
    chosen_loss = loss if has_loss else getattr(model, "loss", None) if own else None
    if chosen_loss is None:
        raise ConfigError("no loss: give loss=, or a model that has been compiled with one")
    if not has_loss and loss_weights is None:
        loss_weights = own.get("loss_weights")
    options = {name: _plain(library, own[name]) for name in _KEPT if own.get(name) is not None}
    return Compilation(
        optimizer=Part(type(chosen), chosen.get_config()),
        state=tuple(np.asarray(array_of(variable)) for variable in variables_of(chosen)) if _has_state(chosen) else (),
        loss=parts_of(chosen_loss),
        loss_weights=loss_weights,
        metrics=parts_of(metrics) if metrics else _plain(library, own.get("metrics")),
        options=options,
    )


def check_names(library: Library, what: str, given: Any, custom_objects: Mapping[str, Any]) -> None:
    """Refuse names that the library does not know, in a structure of losses or metrics.

    Args:
        what: ``loss`` or ``metrics``.

    Raises:
        ConfigError: (a ValueError) there is such a name; it is in the text.
    """
    if isinstance(given, (list, tuple, dict)):
        if "class_name" not in given:  # otherwise it is a configuration
            for each in given.values() if isinstance(given, dict) else given:
                check_names(library, what, each, custom_objects)
    elif isinstance(given, str) and not (what == "metrics" and given.lower() in _OF_COMPILE):
        known = library.module.metrics if what == "metrics" else library.module.losses
        with library.module.saving.custom_object_scope(dict(custom_objects)):
            try:
                known.get(given)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{what}={given!r}: {library.title} does not know it: {error}") from error


def variables_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's variables, including its learning rate, but without accumulated gradients."""
    variables = getattr(optimizer, "variables", ())
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    sums = {id(variable) for variable in getattr(inner, "_accumulated_gradients", ())}
    # In tf_keras they are a callable list.
    return [each for each in (variables() if callable(variables) else variables) if id(each) not in sums]


def array_of(variable: Any) -> np.ndarray[Any, Any]:
    """Return the value of a variable of either library."""
    from hvdgloo.keras._functions import array_of as value

    return value(variable)


def rate_of(optimizer: Any) -> float | None:
    """Return an optimizer's learning rate; None if it is a schedule."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return None if _has_schedule(inner) else float(array_of(inner.learning_rate))


def set_rate(optimizer: Any, rate: Any) -> None:
    """Set the learning rate, unless either is a schedule: it is not part of the state that tf_keras stores."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(rate, (int, float)) and not _has_schedule(inner):
        inner.learning_rate = rate


def _has_schedule(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "_learning_rate", None)) or callable(optimizer.learning_rate)


def build_optimizer(model: Any) -> None:
    """Create the variables of a compiled model's optimizer, which otherwise happens at its first step."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    else:  # tf_keras.optimizers.legacy
        inner._create_all_weights(model.trainable_variables)


def _optimizer_config(path: Path) -> Any:
    with zipfile.ZipFile(path) as file:
        config = json.loads(file.read("config.json"))
    return (((config.get("compile_config") or {}).get("optimizer") or {}).get("config")) or {}


def _is_compiled(model: Any) -> bool:
    return bool(getattr(model, "compiled", False) or getattr(model, "_is_compiled", False))


def _has_state(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(getattr(inner, "built", getattr(inner, "_built", False)))


def _check_optimizer(library: Library, optimizer: Any) -> None:
    owner = library_of(optimizer)
    if owner is None or owner.name != library.name or not hasattr(optimizer, "apply_gradients"):
        what = type(optimizer).__name__ if owner is None else f"{type(optimizer).__name__} of {owner.title}"
        raise ConfigError(
            f"the model belongs to {library.title}, but optimizer= is {what}; use one of the same library"
        )
    if hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_hvd"):
        raise ConfigError("optimizer= is already distributed; give the plain one, which every rank distributes")


def _plain(library: Library, config: Any) -> Any:
    """Convert a part of a compile configuration, with ``Part`` for objects."""
    return parts_of(library.module.saving.deserialize_keras_object(config, safe_mode=False))
