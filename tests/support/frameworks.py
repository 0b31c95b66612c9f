"""The frameworks that contracts of the front-end level run on: how to get numpy values into their tensors and back."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvdgloo.context import Context
from hvdgloo.frontend import Frontend
from hvdgloo.types import DType

NAMES = ("numpy", "torch")


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        tensor: values of any numpy type, in an element type, as a tensor.
        array: a tensor's values; bfloat16 as float32.
        module: the front-end's package.
    """

    name: str
    adapter: Any
    tensor: Callable[[Any, DType], Any]
    array: Callable[[Any], np.ndarray]
    compression: Any

    def frontend(self, context: Context) -> Frontend[Any]:
        return Frontend(self.adapter, lambda: context)

    def float64(self, values: Any) -> Any:
        return self.tensor(values, DType.FLOAT64)


def _numpy() -> Framework:
    from hvdgloo.numpy.adapter import NumpyAdapter
    from hvdgloo.numpy.compression import Compression

    def tensor(values: Any, dtype: DType) -> np.ndarray:
        if dtype is DType.BFLOAT16:
            return np.asarray(values).astype(pytest.importorskip("ml_dtypes").bfloat16)
        return np.asarray(values).astype(dtype.numpy_dtype)

    def array(tensor: np.ndarray) -> np.ndarray:
        return tensor.astype(np.float32) if tensor.dtype.name == "bfloat16" else tensor

    return Framework("numpy", NumpyAdapter(), tensor, array, Compression)


def _torch() -> Framework:
    import torch

    from hvdgloo.torch.adapter import TorchAdapter
    from hvdgloo.torch.compression import Compression

    def tensor(values: Any, dtype: DType) -> torch.Tensor:
        return torch.tensor(np.asarray(values)).to(getattr(torch, dtype.value))

    def array(tensor: torch.Tensor) -> np.ndarray:
        plain = tensor.detach()
        return np.asarray((plain.float() if plain.dtype is torch.bfloat16 else plain).numpy())

    return Framework("torch", TorchAdapter(), tensor, array, Compression)


def load(name: str) -> Framework:
    """A framework, or a skip that says why not; a failure if HVDGLOO_TEST_FRONTENDS names it."""
    if importlib.util.find_spec(name) is None:
        text = f"{name} is not installed"
        if name in os.environ.get("HVDGLOO_TEST_FRONTENDS", "").split(","):
            pytest.fail(text)
        pytest.skip(text)
    return {"numpy": _numpy, "torch": _torch}[name]()
