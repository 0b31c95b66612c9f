"""Formats in which torch's values are saved: tensors by ``torch.save``, code as pickles.

A module consists of code, so it can only be pickled. Its tensors are kept out of the pickle, so that ``load`` needs no
pickle if it is given a module, and ``torch.load(weights_only=True)`` can read the weights.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch

from hvdgloo.errors import ConfigError
from hvdgloo.spark.common.serialization import Codec, Files, Refused


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class _Pickler(cloudpickle.Pickler):
    """Pickler that leaves tensors out, and collects them."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names
        self.others: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if id(value) in self._names:
            place: str | int = self._names[id(value)]
        else:
            # The list keeps the tensor alive, so that no other one gets its id.
            place = self._places.setdefault(id(value), len(self.others))
            if place == len(self.others):
                self.others.append(value)
        return place, type(value) is torch.nn.Parameter, value.requires_grad


class _Unpickler(cloudpickle.pickle.Unpickler):
    def __init__(self, file: io.BytesIO, state: Mapping[str, torch.Tensor], others: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._state = state
        self._others = others
        self._made: dict[str | int, torch.Tensor] = {}

    def persistent_load(self, identity: Any) -> torch.Tensor:
        place, is_parameter, requires_grad = identity
        if place not in self._made:
            data = self._state[place] if isinstance(place, str) else self._others[place]
            self._made[place] = (
                torch.nn.Parameter(data, requires_grad) if is_parameter else data.requires_grad_(requires_grad)
            )
        return self._made[place]


class ModuleCodec(Codec):
    """Format of modules: ``structure.pkl`` without tensors, ``weights.pt`` with the state dict and other tensors."""

    def encode(self, value: Any, instance: Any) -> Files:
        state = value.state_dict(keep_vars=True)
        names = {id(each): name for name, each in reversed(list(state.items()))}
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, names)
        pickler.dump(value)
        others = [each.detach() for each in pickler.others]
        return {
            "structure.pkl": buffer.getvalue(),
            "weights.pt": _saved({"state": value.state_dict(), "others": others}),
        }

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        if not trusted:
            raise Refused
        weights = _read(files["weights.pt"])
        return _Unpickler(io.BytesIO(files["structure.pkl"]), weights["state"], weights["others"]).load()

    def complete(self, given: Any, files: Files) -> Any:
        try:
            given.load_state_dict(_read(files["weights.pt"])["state"])
        except RuntimeError as error:
            raise ConfigError(f"the saved weights do not fit the given model: {error}") from error
        return given


_OPTIMIZERS: Mapping[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
"""Classes that a file may name, so that its author cannot have anything else called."""


class OptimizerCodec(Codec):
    """Format of optimizers: name, parameters and state for torch's own classes; otherwise a pickle."""

    def encode(self, value: Any, instance: Any) -> Files:
        model = instance.getModel()
        names = {} if model is None else {id(each): name for name, each in model.named_parameters()}
        groups = [[names.get(id(each)) for each in group["params"]] for group in value.param_groups]
        kind = type(value)
        if not all(all(group) for group in groups) or _OPTIMIZERS.get(kind.__name__) is not kind:
            return {"structure.pkl": cloudpickle.dumps((model, value))}
        arguments = inspect.signature(kind).parameters
        defaults = {name: default for name, default in value.defaults.items() if name in arguments}
        return {
            "pt": _saved(
                {"class": kind.__name__, "groups": groups, "defaults": defaults, "state": value.state_dict()},
            )
        }

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        model = loaded.get("model")
        if "pt" not in files:
            if not trusted:
                raise Refused
            pickled_model, optimizer = cloudpickle.loads(files["structure.pkl"])
            return optimizer if model is None else _transplanted(optimizer, pickled_model, model)
        if model is None:
            raise Refused
        facts = _read(files["pt"])
        parameters = dict(model.named_parameters())
        groups = [{"params": [parameters[name] for name in group]} for group in facts["groups"]]
        kind = _OPTIMIZERS.get(facts["class"])
        if kind is None:
            raise ConfigError(
                f"the saved optimizer is {facts['class']!r}, which torch {torch.__version__} does not have; give "
                "another one: load(path, optimizer=...)"
            )
        optimizer = kind(groups, **facts["defaults"])
        optimizer.load_state_dict(facts["state"])
        return optimizer


def _transplanted(optimizer: Any, old: Any, new: Any) -> Any:
    """Move an optimizer from the parameters in its own pickle to the loaded model's, and return it."""
    if old is not None:
        own = dict(new.named_parameters())
        replacement = {id(each): own[name] for name, each in old.named_parameters() if name in own}
        state = {replacement.get(id(key), key): value for key, value in optimizer.state.items()}
        optimizer.state.clear()
        optimizer.state.update(state)
        for group in optimizer.param_groups:
            group["params"] = [replacement.get(id(each), each) for each in group["params"]]
    return optimizer
