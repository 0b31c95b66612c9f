"""A small model with data and weights of its own, which ranks that are threads of one process train on parts of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdgloo._job.context import Context
from hvdgloo.torch._adapter import TorchAdapter
from hvdgloo.types import Buffer

BATCH = 12
_random = np.random.default_rng(7)
INPUTS = torch.from_numpy(_random.standard_normal((BATCH, 6)))
TARGETS = torch.from_numpy(_random.standard_normal((BATCH, 3)))
WEIGHTS = [torch.from_numpy(_random.standard_normal(shape) / 2) for shape in [(8, 6), (8,), (3, 8), (3,)]]


def make_model() -> nn.Sequential:
    # Not seeded: ranks are threads here, and would share torch's one generator.
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), WEIGHTS, strict=True):
            parameter.copy_(value)
    return model


def loss_of(model: nn.Module, part: slice = slice(None)) -> Tensor:
    return ((model(INPUTS[part]) - TARGETS[part]) ** 2).mean()


def part_of(context: Context) -> slice:
    """A rank's part of the batch."""
    share = BATCH // context.size
    return slice(context.rank * share, (context.rank + 1) * share)


def values(model: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def alike(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], rtol: float = 1e-6) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=1e-12)


class Noting(TorchAdapter):
    """Notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def export(self, tensor: Tensor, **how: Any) -> Buffer:
        self.sent.append(tensor)
        return super().export(tensor, **how)
