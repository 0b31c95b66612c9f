"""Copies of a tensor on its way to the engine: not at all on the CPU, and once from anywhere else."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdgloo.tensorflow import _adapter
from hvdgloo.tensorflow._adapter import TensorFlowAdapter

COUNT = 1 << 20


def address(array: Any) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as another device's; numpy's view of one is then what TensorFlow has copied to the host."""
    monkeypatch.setattr(_adapter, "is_on_cpu", lambda _: False)


def exported(tensor: Any, **options: bool) -> tuple[Any, int]:
    """Return a tensor's buffer, and the bytes that numpy has allocated for it at once."""
    tracemalloc.start()
    try:
        buffer = TensorFlowAdapter().export(tensor, **options)
        return buffer, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_tensor_on_the_cpu_is_shared() -> None:
    tensor = tf.range(COUNT)
    buffer, nbytes = exported(tensor)
    assert buffer.address == address(np.asarray(tensor))
    assert nbytes < buffer.nbytes / 2


@pytest.mark.usefixtures("elsewhere")
def test_a_tensor_of_another_device_is_copied_to_the_host_and_not_on_it() -> None:
    tensor = tf.range(COUNT)
    buffer, nbytes = exported(tensor)
    assert buffer.address == address(np.asarray(tensor))
    assert nbytes < buffer.nbytes / 2
    del tensor
    assert buffer.array().tolist()[-3:] == [COUNT - 3, COUNT - 2, COUNT - 1]


@pytest.mark.usefixtures("elsewhere")
def test_what_the_engine_writes_is_memory_of_its_own() -> None:
    """TensorFlow may keep what it has copied to the host, and use it again."""
    tensor = tf.range(COUNT)
    buffer, _ = exported(tensor, writable=True)
    buffer.array()[:] = 0
    assert int(tensor[-1]) == COUNT - 1


def test_a_variable_is_copied_once_and_may_be_assigned_meanwhile() -> None:
    variable = tf.Variable(tf.range(COUNT))
    buffer, nbytes = exported(variable)
    assert nbytes < 1.5 * buffer.nbytes
    variable.assign(tf.zeros_like(variable))
    assert buffer.array().tolist()[-1] == COUNT - 1


@pytest.mark.usefixtures("elsewhere")
def test_a_variable_of_another_device_is_copied_to_the_host_and_not_on_it() -> None:
    variable = tf.Variable(tf.range(COUNT))
    buffer, nbytes = exported(variable)
    assert nbytes < buffer.nbytes / 2
    assert buffer.array().tolist()[-1] == COUNT - 1
