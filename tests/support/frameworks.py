"""The frameworks that contracts of the front-end level run on: how to get numpy values into their tensors and back."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo.types import DType

NAMES = ("numpy", "torch", "tensorflow", "jax", "mxnet")
_OF_THEIR_OWN = ("tensorflow", "jax", "mxnet")
"""Whose tests have an environment of their own."""


def names() -> tuple[str, ...]:
    """The frameworks that this environment is for: those that HVDGLOO_TEST_FRONTENDS names, else what is installed."""
    wanted = [name for name in os.environ.get("HVDGLOO_TEST_FRONTENDS", "").split(",") if name]
    # What is nowhere to be found is skipped once and not in each test.
    return tuple(wanted) or tuple(n for n in NAMES if n not in _OF_THEIR_OWN or importlib.util.find_spec(n))


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        tensor: values of any numpy type, in an element type, as a tensor.
        array: a tensor's values; bfloat16 as float32.
        writable: makes of a tensor what can be reduced in place.
        writes: tensors can be written, so that there are collectives in place.
        has_views: a part of a tensor is the same memory.
        complex_of: a tensor's numbers as complex ones.
    """

    name: str
    adapter: Any
    tensor: Callable[[Any, DType], Any]
    array: Callable[[Any], np.ndarray]
    compression: Any
    frontend_class: type[Frontend[Any]] = Frontend
    writable: Callable[[Any], Any] = lambda tensor: tensor
    writes: bool = True
    has_views: bool = True
    complex_of: Callable[[Any], Any] = lambda tensor: tensor.astype(complex)

    def frontend(self, context: Context) -> Frontend[Any]:
        return self.frontend_class(self.adapter, lambda: context)

    def float64(self, values: Any) -> Any:
        return self.tensor(values, DType.FLOAT64)


def _numpy() -> Framework:
    from hvdgloo.numpy._adapter import NumpyAdapter
    from hvdgloo.numpy._compression import Compression

    def tensor(values: Any, dtype: DType) -> np.ndarray:
        if dtype is DType.BFLOAT16:
            return np.asarray(values).astype(pytest.importorskip("ml_dtypes").bfloat16)
        return np.asarray(values).astype(dtype.numpy_dtype)

    def array(tensor: np.ndarray) -> np.ndarray:
        return tensor.astype(np.float32) if tensor.dtype.name == "bfloat16" else tensor

    return Framework("numpy", NumpyAdapter(), tensor, array, Compression)


def _torch() -> Framework:
    import torch

    from hvdgloo.torch._adapter import TorchAdapter
    from hvdgloo.torch.compression import Compression

    def tensor(values: Any, dtype: DType) -> torch.Tensor:
        return torch.tensor(np.asarray(values)).to(getattr(torch, dtype.value))

    def array(tensor: torch.Tensor) -> np.ndarray:
        plain = tensor.detach()
        return np.asarray((plain.float() if plain.dtype is torch.bfloat16 else plain).numpy())

    return Framework("torch", TorchAdapter(), tensor, array, Compression, complex_of=lambda t: t.to(torch.complex64))


def _tensorflow() -> Framework:
    import tensorflow as tf

    from hvdgloo.tensorflow._adapter import TensorFlowAdapter
    from hvdgloo.tensorflow._frontend import TensorFlowFrontend
    from hvdgloo.tensorflow.compression import Compression

    def tensor(values: Any, dtype: DType) -> Any:
        return tf.cast(tf.constant(np.asarray(values)), dtype.value)

    def array(tensor: Any) -> np.ndarray:
        return np.asarray(tf.cast(tensor, tf.float32) if tensor.dtype.name == "bfloat16" else tensor)

    return Framework(
        "tensorflow",
        TensorFlowAdapter(),
        tensor,
        array,
        Compression,
        TensorFlowFrontend,
        tf.Variable,
        has_views=False,
        complex_of=lambda tensor: tf.cast(tensor, tf.complex64),
    )


def _jax() -> Framework:
    import jax
    import jax.numpy as jnp

    from hvdgloo.jax._adapter import JaxAdapter, dtype_of
    from hvdgloo.jax._compression import Compression
    from hvdgloo.jax._frontend import JaxFrontend

    jax.config.update("jax_enable_x64", True)  # or there are no types of 8 bytes

    def tensor(values: Any, dtype: DType) -> Any:
        return jnp.asarray(np.asarray(values)).astype(dtype_of(dtype))

    def array(tensor: Any) -> np.ndarray:
        return np.asarray(tensor.astype(np.float32) if tensor.dtype.name == "bfloat16" else tensor)

    return Framework("jax", JaxAdapter(), tensor, array, Compression, JaxFrontend, writes=False, has_views=False)


def need(name: str) -> Any:
    """A framework's module; skips where it is not installed. MXNet uses names that its numpy warns of."""
    with warnings.catch_warnings():
        if name == "mxnet":
            warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def need_installed(name: str) -> None:
    """Skip where a package is not installed, without importing it: only the test's workers use it."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def _mxnet() -> Framework:
    mx = need("mxnet")

    from hvdgloo.mxnet._adapter import MXNetAdapter
    from hvdgloo.mxnet._frontend import MXNetFrontend
    from hvdgloo.mxnet.compression import Compression

    adapter = MXNetAdapter()

    def tensor(values: Any, dtype: DType) -> Any:
        if dtype in (DType.UINT16, DType.INT16, DType.UINT32, DType.UINT64):
            pytest.skip(f"MXNet has no arrays of {dtype}")
        if dtype is DType.BFLOAT16:
            return adapter.cast(mx.nd.array(np.asarray(values, np.float32), dtype=np.float32), dtype)
        return mx.nd.array(np.asarray(values).astype(dtype.numpy_dtype), dtype=dtype.numpy_dtype)

    def array(tensor: Any) -> np.ndarray:
        is_bfloat16 = adapter.describe(tensor).dtype is DType.BFLOAT16
        return np.asarray((adapter.cast(tensor, DType.FLOAT32) if is_bfloat16 else tensor).asnumpy())

    return Framework("mxnet", adapter, tensor, array, Compression, MXNetFrontend, has_views=False)


def load(name: str) -> Framework:
    """A framework, or a skip that says why not; a failure if HVDGLOO_TEST_FRONTENDS names it."""
    if importlib.util.find_spec(name) is None:
        text = f"{name} is not installed"
        if name in os.environ.get("HVDGLOO_TEST_FRONTENDS", "").split(","):
            pytest.fail(text)
        pytest.skip(text)
    return {"numpy": _numpy, "torch": _torch, "tensorflow": _tensorflow, "jax": _jax, "mxnet": _mxnet}[name]()
