"""Formats in which Keras objects are saved with estimators and models: Keras's own, and cloudpickle for functions."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from hvdgloo.errors import ConfigError
from hvdgloo.spark.common.serialization import Codec, Files, Refused
from hvdgloo.spark.keras._library import Library, library_of, library_of_model
from hvdgloo.spark.keras._models import archive_of, ensure_savable, is_part, loaded_model

__all__ = ["OF_ESTIMATORS", "OF_MODELS"]

logger = logging.getLogger(__name__)


class _CustomObjects(Codec):
    """Format of a possibly empty dictionary of classes and functions."""

    def encode(self, value: Any, instance: Any) -> Files:
        return super().encode(value, instance) if value else {"json": b"{}"}

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        return {} if "json" in files else super().decode(files, loaded, trusted=trusted)


class _Model(Codec):
    """Format of models: a ``.keras`` archive, with the optimizer's state if the model is compiled."""

    def encode(self, value: Any, instance: Any) -> Files:
        library = library_of_model(value)
        if not ensure_savable(value):
            logger.warning(
                "%s is saved without its loss and metrics, since they include a lambda whose source is not on this "
                "machine; use a named function, or compile the model again after loading it",
                value.name,
            )
        return {"keras": archive_of(value), "json": json.dumps({"library": library.name}).encode()}

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        library = Library.here(json.loads(files["json"])["library"])
        try:
            return loaded_model(library, files["keras"], loaded.get("custom_objects") or {}, trusted=trusted)
        except ConfigError:
            if trusted:
                raise
            raise Refused from None  # a Lambda, or classes from custom_objects, which are refused as well


class _Objects(Codec):
    """Format of an optimizer, losses or metrics: JSON for names and Keras objects, cloudpickle if there are others."""

    def encode(self, value: Any, instance: Any) -> Files:
        owners = {owner.name for leaf in _leaves(value) if (owner := library_of(leaf)) is not None}
        if len(owners) > 1 or not all(isinstance(leaf, str) or is_part(leaf) for leaf in _leaves(value)):
            return super().encode(value, instance)
        library = Library.here(owners.pop() if owners else "keras")
        config = library.module.saving.serialize_keras_object(value)
        return {"json": json.dumps({"library": library.name, "config": config}).encode()}

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        if "json" not in files:
            return super().decode(files, loaded, trusted=trusted)
        content = json.loads(files["json"])
        saving = Library.here(content["library"]).module.saving
        with saving.custom_object_scope(dict(loaded.get("custom_objects") or {})):
            return saving.deserialize_keras_object(content["config"], safe_mode=not trusted)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    return [] if value is None else [value]


OF_MODELS: Mapping[str, Codec] = {"custom_objects": _CustomObjects(), "model": _Model()}
OF_ESTIMATORS: Mapping[str, Codec] = {
    **OF_MODELS,
    "optimizer": _Objects(),
    "loss": _Objects(),
    "metrics": _Objects(),
}
