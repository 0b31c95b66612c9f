"""Arithmetic on flat memory: bfloat16 against torch's, integers against C's rules, reductions against numpy."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends import kernels
from hvdgloo.types import Buffer, DType, ReduceOp

HALVES = [DType.FLOAT16, DType.BFLOAT16]
INTEGERS = [dtype for dtype in DType if dtype.numpy_dtype.kind in "iu"]


def float32(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


SPECIAL = float32(
    0x00000000,  # zero and minus zero
    0x80000000,
    0x7F800000,  # infinities
    0xFF800000,
    0x7F7FFFFF,  # the largest finite float32 rounds to infinity
    0xFF7FFFFF,
    0x7F7F7FFF,  # the largest that does not
    0x00000001,  # subnormal
    0x00008000,  # half of the smallest bfloat16: a tie, to even, which is zero
    0x00018000,  # a tie, to even, which is up
    0x3F808000,  # a tie, down to 1.0
    0x3F818000,  # a tie, up
    0x3F808001,  # just above a tie
    0x3F807FFF,  # just below
)
NANS = float32(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF)


class TestBfloat16:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("values", [SPECIAL, np.random.default_rng(1).normal(size=5000).astype(np.float32)])
    def test_narrowing_rounds_as_torch_does(self, torch: Any, values: np.ndarray) -> None:
        expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(kernels.narrow_bfloat16(values).view(np.uint16), expected)

    def test_narrowing_random_bits(self, torch: Any) -> None:
        values = np.random.default_rng(2).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
        expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        number = ~np.isnan(values)
        narrowed = kernels.narrow_bfloat16(values)
        np.testing.assert_array_equal(narrowed.view(np.uint16)[number], expected[number])
        assert np.isnan(kernels.widen_bfloat16(narrowed[~number])).all()

    def test_nan_stays_nan_whatever_its_payload(self) -> None:
        # Rounding a NaN like a number would carry it into infinity, or into minus zero.
        assert np.isnan(kernels.widen_bfloat16(kernels.narrow_bfloat16(NANS))).all()

    def test_widening_is_exact_and_narrowing_its_inverse(self, torch: Any) -> None:
        every = np.arange(1 << 16, dtype=np.uint16)
        wide = kernels.widen_bfloat16(every)
        expected = torch.from_numpy(every.view(np.int16).copy()).view(torch.bfloat16).to(torch.float32).numpy()
        np.testing.assert_array_equal(wide, expected)
        number = ~np.isnan(wide)
        np.testing.assert_array_equal(kernels.narrow_bfloat16(wide).view(np.uint16)[number], every[number])


class TestScale:
    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_integers_are_truncated_toward_zero(self, dtype: DType) -> None:
        low = 0 if dtype.numpy_dtype.kind == "u" else -7
        array = np.arange(low, 8).astype(dtype.numpy_dtype)
        expected = [math.trunc(int(value) * (1 / 3)) for value in array]
        kernels.scale(Buffer.of_array(array, dtype), 1 / 3)
        assert array.tolist() == expected

    @pytest.mark.parametrize("dtype", HALVES)
    def test_half_types_are_computed_in_float32(self, dtype: DType) -> None:
        # 1/3 as a half differs in its fourth digit; as a float32 the product rounds to the nearest half.
        values = np.array([3.0, 300.0, -7.0, 1e-3], np.float32)
        array = kernels.narrow(values, dtype)
        expected = kernels.narrow(kernels.widen(array, dtype) * np.float32(1 / 3), dtype)
        kernels.scale(Buffer.of_array(array, dtype), 1 / 3)
        np.testing.assert_array_equal(array, expected)
        assert kernels.widen(array, dtype)[0] == 1.0

    @pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
    def test_floats_keep_their_type(self, dtype: DType) -> None:
        array = np.array([1.5, -2.0, np.inf], dtype.numpy_dtype)
        kernels.scale(Buffer.of_array(array), 0.3)
        np.testing.assert_array_equal(array, np.array([1.5, -2.0, np.inf], dtype.numpy_dtype) * array.dtype.type(0.3))

    def test_more_elements_than_one_chunk(self) -> None:
        array = np.arange(2 * kernels._CHUNK + 3, dtype=np.int32)
        kernels.scale(Buffer.of_array(array), 0.5)
        np.testing.assert_array_equal(array, np.arange(array.size) // 2)

    def test_overflow_is_infinity_without_a_warning(self) -> None:
        array = np.array([60000.0], np.float16)
        kernels.scale(Buffer.of_array(array), 2.0)
        assert np.isinf(array[0])

    @pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64], ids=str)
    def test_averages_are_quotients_to_the_last_bit(self, dtype: DType) -> None:
        for size in (2, 3, 5, 6, 7, 49, 1000):
            total = np.random.default_rng(size).standard_normal(300).astype(dtype.numpy_dtype)
            expected = total / dtype.numpy_dtype.type(size)
            kernels.scale(Buffer.of_array(total), 1.0 / size)
            assert total.tobytes() == expected.tobytes(), size

    @pytest.mark.parametrize("dtype", [DType.UINT8, DType.INT8, DType.INT64], ids=str)
    def test_integers_are_divided_exactly(self, dtype: DType) -> None:
        """49 times the double nearest to 1/49 is less than 1."""
        for size in (2, 3, 7, 49, 98, 103, 300, 1023):
            total = np.array([size, 2 * size - 1, -size, 1 - size, 0]).astype(dtype.numpy_dtype)
            expected = [int(value / size) for value in total.tolist()]
            kernels.scale(Buffer.of_array(total, dtype), 1.0 / size)
            assert total.tolist() == expected, size

    def test_large_integers_keep_their_digits(self) -> None:
        array = np.array([2 * (2**60 + 1), -(2**61 + 2)])
        kernels.scale(Buffer.of_array(array), 0.5)
        assert array.tolist() == [2**60 + 1, -(2**60 + 1)]

    def test_nothing_to_scale(self) -> None:
        kernels.scale(Buffer.of_array(np.empty(0, np.int32)), 0.5)
        kernels.scale(Buffer.of_array(np.empty(0, np.float32)), 0.5)

    def test_only_the_buffers_memory_is_written(self) -> None:
        array = np.full(8, 10, np.int16)
        kernels.scale(Buffer.of_array(array[2:6]), 0.5)
        assert array.tolist() == [10, 10, 5, 5, 5, 5, 10, 10]


FOLDS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


class TestReduce:
    @pytest.mark.parametrize("op", FOLDS)
    @pytest.mark.parametrize("dtype", [*INTEGERS, DType.FLOAT32, DType.FLOAT64])
    def test_elements_in_the_order_given(self, dtype: DType, op: ReduceOp) -> None:
        rng = np.random.default_rng(int(op))
        arrays = [(rng.normal(size=50) * 50).astype(np.int8).astype(dtype.numpy_dtype) for _ in range(4)]
        before = [array.copy() for array in arrays]
        expected = functools.reduce(FOLDS[op], arrays)
        np.testing.assert_array_equal(kernels.reduce(arrays, dtype, op), expected)
        for array, kept in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, kept)

    @pytest.mark.parametrize("dtype", HALVES)
    def test_half_types_are_rounded_once(self, dtype: DType) -> None:
        # 256 + 1 + 1 in bfloat16, and 2048 + 1 + 1 in float16, lose both ones if every sum is rounded.
        large = 256.0 if dtype is DType.BFLOAT16 else 2048.0
        arrays = [kernels.narrow(np.array([value], np.float32), dtype) for value in (large, 1.0, 1.0)]
        assert kernels.widen(kernels.reduce(arrays, dtype, ReduceOp.SUM), dtype)[0] == large + 2

    @pytest.mark.parametrize(
        ("op", "expected"),
        [
            (ReduceOp.SUM, [False, True, True]),
            (ReduceOp.MAX, [False, True, True]),
            (ReduceOp.MIN, [False, False, True]),
            (ReduceOp.PRODUCT, [False, False, True]),
        ],
    )
    def test_bool_knows_or_and_and(self, op: ReduceOp, expected: list[bool]) -> None:
        arrays = [np.array([False, False, True]), np.array([False, True, True])]
        result = kernels.reduce(arrays, DType.BOOL, op)
        assert result.dtype == np.bool_
        assert result.tolist() == expected

    @pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM])
    def test_nan_is_not_lost(self, op: ReduceOp) -> None:
        arrays = [np.array([np.nan, 1.0]), np.array([1.0, np.nan])]
        assert np.isnan(kernels.reduce(arrays, DType.FLOAT64, op)).all()

    def test_the_result_is_apart_from_a_single_input(self) -> None:
        array = np.array([1, 2], np.int32)
        result = kernels.reduce([array], DType.INT32, ReduceOp.SUM)
        result[0] = 9
        assert array.tolist() == [1, 2]


def test_a_buffers_array_is_its_memory() -> None:
    memory = (ctypes.c_int32 * 3)(1, 2, 3)
    array = np.frombuffer(memory, np.int32)
    Buffer.of_array(array).array()[1] = 7
    assert list(memory) == [1, 7, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name.lower())
def test_integers_are_in_the_order_of_the_floats_that_they_stand_for(op: ReduceOp, dtype: Any) -> None:
    special = SPECIAL.astype(dtype)
    assert kernels.from_ordered(kernels.to_ordered(special, op), DType(dtype.__name__)).tobytes() == special.tobytes()
    ordered = kernels.to_ordered(np.unique(special), op)
    assert (np.diff(ordered.astype(object)) > 0).all()
    nans = kernels.to_ordered(np.array([np.nan, -np.nan], dtype), op)
    assert (nans < ordered.min() if op is ReduceOp.MIN else nans > ordered.max()).all()
    assert np.isnan(kernels.from_ordered(nans, DType(dtype.__name__))).all()


def test_integers_are_in_the_order_of_the_unsigned_ones_that_they_stand_for() -> None:
    values = np.array([0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1], np.uint64)
    ordered = kernels.to_ordered(values, ReduceOp.MAX)
    assert (np.diff(ordered.astype(object)) > 0).all()
    assert kernels.from_ordered(ordered, DType.UINT64).tolist() == values.tolist()


def test_a_large_unsigned_number_is_divided_exactly() -> None:
    array = np.array([(1 << 64) - 1, 1 << 63], np.uint64)
    kernels.scale(Buffer.of_array(array), 1 / 49)
    assert array.tolist() == [((1 << 64) - 1) // 49, (1 << 63) // 49]
