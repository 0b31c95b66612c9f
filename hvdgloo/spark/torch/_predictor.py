"""A torch model in the form that Spark's Python workers run. This module needs torch, but not Spark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdgloo.errors import ConfigError
from hvdgloo.spark.common._training import Array
from hvdgloo.spark.torch._remote import outputs_of, tensors


@dataclasses.dataclass(frozen=True)
class TorchPredictor:
    model: torch.nn.Module
    input_shapes: Sequence[Sequence[int]] | None
    labels: Sequence[str]

    def load(self) -> Callable[[list[Array]], list[Array]]:
        # A task has one core; with a thread for each of the machine's cores, tasks would slow each other down.
        torch.set_num_threads(1)
        return self.apply()

    def apply(self) -> Callable[[list[Array]], list[Array]]:
        """Return the same function as ``load``, without changing the process's number of threads."""
        model = self.model.eval()
        cpu, labels = torch.device("cpu"), self.labels

        def predict(columns: list[Array]) -> list[Array]:
            with torch.inference_mode():
                outputs: Any = model(*tensors(columns, self.input_shapes, cpu))
            return [output.detach().to(torch.float64).numpy() for output in outputs_of(outputs, labels)]

        return predict


def shapes_of_outputs(
    model: torch.nn.Module,
    columns: Sequence[tuple[str, Array]],
    input_shapes: Sequence[Sequence[int]] | None,
    labels: Sequence[str],
) -> list[tuple[int, ...]]:
    """Run a model on some rows, and return the shape of each output without the batch dimension.

    Args:
        model: the model, which is switched to evaluation mode: pass a copy.
        columns: its features, each with its name. A column may be there several times.
        labels: names of its labels.

    Raises:
        ConfigError: the model does not accept columns of these shapes, or does not return outputs.
    """
    try:
        outputs = TorchPredictor(model, input_shapes, labels).apply()([values for _, values in columns])
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        given = ", ".join(f"{name!r} of {_size(values)}" for name, values in columns)
        shaped = "" if input_shapes is None else f", in input_shapes={[list(shape) for shape in input_shapes]}"
        raise ConfigError(f"the model does not accept features of these shapes: {given}{shaped}: {error}") from error
    return [output.shape[1:] for output in outputs]


def _size(values: Array) -> str:
    return f"{values.size // len(values)} {'number' if values.size == len(values) else 'numbers'} per row"
