"""Arrays that the engine shares, stages, or refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdgloo.errors import InvalidArgumentError
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.types import DType, TensorSpec

adapter = NumpyAdapter()


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_contiguous_arrays_are_shared(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)
    buffer = adapter.export(array, writable=True)
    assert buffer.owner is array
    assert buffer.spec == TensorSpec(DType.FLOAT32, shape)
    buffer.array()[:] = 5
    assert (array == 5).all()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6.0)[::-1],
        np.arange(3, dtype=">i4"),
        np.broadcast_to(np.ones(1), (4,)),
        np.float64(3.5),
    ],
    ids=["transposed", "reversed", "big endian", "broadcast", "scalar"],
)
def test_others_are_staged(array: Any) -> None:
    buffer = adapter.export(array)
    assert buffer.owner is not array
    np.testing.assert_array_equal(buffer.array().reshape(buffer.shape), array)
    result = adapter.allocate(buffer.spec, array)
    assert result.dtype.isnative
    assert adapter.export(result, writable=True).owner is result


def test_results_reach_arrays_in_foreign_byte_order() -> None:
    array = np.arange(3, dtype=">i4")
    assert adapter.deliver(np.array([7, 8, 9], np.int32), array, in_place=True) is array
    assert array.tolist() == [7, 8, 9]
    assert array.dtype == ">i4"


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(2, complex), "complex128"),
        (np.array(["a"]), "str"),
        (np.array([None]), "object"),
        ([1.0], "list"),
        (3.0, "float"),
    ],
    ids=["complex", "text", "objects", "list", "float"],
)
def test_what_cannot_be_sent_is_refused_by_name(array: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        adapter.export(array)


def test_read_only_arrays_can_be_sent_but_not_written() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    assert adapter.export(array).owner is array
    with pytest.raises(InvalidArgumentError, match="read-only"):
        adapter.export(array, writable=True)
