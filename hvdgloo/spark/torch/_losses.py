"""Combination of the losses and metrics of several labels, for ``TorchEstimator``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from hvdgloo.errors import ConfigError

Tensor = torch.Tensor
Loss: TypeAlias = Callable[..., Tensor]
Metric: TypeAlias = Callable[[Tensor, Tensor], Any]


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def for_each_label(name: str, given: Any, labels: Sequence[str]) -> list[Any]:
    """Return a list with one function for each label, from a single one or such a list.

    Raises:
        ConfigError: the list has another length, or contains something that is not callable or is a class of losses.
    """
    values = as_list(given)
    if len(values) == 1:
        values = values * len(labels)
    if len(values) != len(labels):
        raise ConfigError(f"{name} has {len(values)} functions for {len(labels)} label_cols: give one, or one for each")
    for value in values:
        if not callable(value):
            raise ConfigError(f"{name}={given!r}: {value!r} is not a function")
        if name != "loss_constructors" and isinstance(value, type) and issubclass(value, torch.nn.Module):
            raise ConfigError(f"{name}: {value.__name__} is a class: give an instance of it, {value.__name__}()")
    return values


def constructed(constructors: Sequence[Callable[..., Loss]], offered: dict[str, Any]) -> list[Loss]:
    """Call constructors of losses, each with the offered values that its parameters name, and return the losses."""
    losses = []
    for constructor in constructors:
        losses.append(constructor(**{name: offered[name] for name in _taken(constructor) if name in offered}))
    return losses


def check_constructor(constructor: Callable[..., Loss], offered: Sequence[str]) -> None:
    """Check that a constructor of losses requires only offered values.

    Raises:
        ConfigError: it requires something else.
    """
    for name, parameter in _parameters(constructor).items():
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variadic and name not in offered:
            raise ConfigError(
                f"loss_constructors: {constructor!r} requires {name!r}, but can take only {', '.join(offered)}"
            )


def _taken(function: Callable[..., Any]) -> list[str]:
    return [name for name, parameter in _parameters(function).items() if parameter.kind is not parameter.VAR_KEYWORD]


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins may have none
        return {}


def unreduced(loss: Loss) -> Loss:
    """Return the same loss with a value for each row, so that rows can be weighted.

    Raises:
        ConfigError: it is neither a module with ``reduction`` nor a function that takes it.
    """
    if isinstance(getattr(loss, "reduction", None), str):
        copied = copy.copy(loss)
        copied.reduction = "none"  # type: ignore[attr-defined]
        return copied
    parameters = _parameters(loss)
    if "reduction" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return lambda output, label: loss(output, label, reduction="none")
    raise ConfigError(
        f"sample_weight_col needs a loss for each row, but the loss {loss!r} does not take reduction='none': use one "
        "of torch.nn's, or let the function take `reduction` and pass it on"
    )


class TotalLoss:
    """The weighted sum of all labels' losses, which is differentiated.

    With weights for rows, it is the mean of the rows' losses multiplied by their weights.
    """

    def __init__(self, losses: Sequence[Loss], weights: Sequence[float] | None, *, weighted_rows: bool) -> None:
        self._losses = [unreduced(loss) for loss in losses] if weighted_rows else list(losses)
        self._weights = list(weights) if weights is not None else [1 / len(losses)] * len(losses)

    def __call__(
        self, outputs: Sequence[Tensor], labels: Sequence[Tensor], sample_weights: Tensor | None = None
    ) -> Tensor:
        """Compute the loss.

        Args:
            outputs, labels: one tensor for each label.
            sample_weights: weights of shape (rows,).

        Returns:
            a scalar.
        """
        total: Tensor | None = None
        for loss, weight, output, label in zip(self._losses, self._weights, outputs, labels, strict=True):
            value = loss(output, label)
            if sample_weights is not None:
                rows = sample_weights.reshape(-1, *[1] * (value.dim() - 1))
                value = (value * rows).mean()
            # A multiplication by 1 and an addition of 0 would be computed and differentiated nevertheless.
            value = value if weight == 1 else weight * value
            total = value if total is None else total + value
        assert isinstance(total, Tensor)
        return total


class Metrics:
    """Groups of metrics: each group has one function for all labels, or one for each.

    A value's name is ``group_<i>_<label>``.
    """

    def __init__(self, groups: Sequence[Any], labels: Sequence[str]) -> None:
        self._groups = [for_each_label("metrics", group, labels) for group in groups]
        self._labels = list(labels)

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._groups) * len(self._labels)

    def values(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """Return a scalar for each group and label, group by group."""
        found = []
        for group in self._groups:
            for metric, output, label in zip(group, outputs, labels, strict=True):
                value = metric(output, label)
                device = value.device if isinstance(value, Tensor) else "cpu"
                found.append(torch.as_tensor(value, dtype=torch.float64, device=device).detach().mean())
        return found

    def named(self, values: Sequence[float]) -> list[dict[str, float]]:
        """Return a dictionary for each group, from the results of ``values``."""
        names = iter(values)
        return [
            {f"group_{number}_{label}": next(names) for label in self._labels} for number in range(len(self._groups))
        ]
