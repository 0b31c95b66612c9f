"""The encodings of values between hosts: their errors, what they do with odd values, and the same bytes by both
libraries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdgloo._backends import codec
from hvdgloo._backends.codec import LEAST, Bytes, Codec, Values
from hvdgloo.types import WireFormat

FORMS = [WireFormat.BF16, WireFormat.INT8, WireFormat.INT4]
QUANTISED = [WireFormat.INT8, WireFormat.INT4]
LIBRARIES: list[Callable[[WireFormat], Codec]] = [codec.codec_of]
try:
    from hvdgloo._backends import codec_torch
except ImportError:
    pass
else:
    LIBRARIES.append(codec_torch.codec_of)

both = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__module__.rpartition(".")[2])
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@st.composite
def vectors(draw: st.DrawFn, *, odd: bool = False) -> Values:
    """Values of 0 to 3 blocks, at magnitudes that differ from one block of 64 to the next."""
    count = draw(st.integers(0, 3 * 256))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    powers = draw(st.lists(st.floats(-40, 37), min_size=12, max_size=12))
    values = generator.standard_normal(count) * np.repeat(np.power(10.0, powers), 64)[:count]
    values = values.clip(-3e38, 3e38).astype(np.float32)
    if odd and count:
        for _ in range(draw(st.integers(0, 3))):
            value = draw(st.sampled_from([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-42, -1e-31, 3e38]))
            values[draw(st.integers(0, count - 1))] = value
    return values


def encoded(codec: Codec, values: Values) -> Bytes:
    data = np.full(codec.nbytes(values.size), 0xA5, np.uint8)  # whatever is not written differs between two arrays
    codec.encode(values, data)
    return data


def decoded(codec: Codec, values: Values) -> Values:
    result = np.full(values.size, 7.0, np.float32)
    codec.decode(encoded(codec, values), result)
    return result


def block_scales(codec: codec.Blocks, values: Values) -> Values:
    """Each value's block's greatest magnitude, divided by the greatest code."""
    padded = np.zeros(-(-values.size // codec.block) * codec.block, np.float32)
    padded[: values.size] = np.abs(values)
    greatest = padded.reshape(-1, codec.block).max(1, initial=0.0) / codec.top
    return np.repeat(greatest, codec.block)[: values.size]


@both
@pytest.mark.parametrize("form", QUANTISED, ids=str)
@settings(deadline=None, max_examples=40)
@given(values=vectors())
def test_an_error_is_at_most_half_a_scale(
    library: Callable[[WireFormat], Codec], form: WireFormat, values: Values
) -> None:
    used = library(form)
    assert isinstance(used, codec.Blocks)
    scales = block_scales(used, values)
    error = np.abs(decoded(used, values).astype(np.float64) - values)
    tiny = scales * used.top < LEAST
    assert (error[~tiny] <= scales[~tiny].astype(np.float64) * (0.5 + 1e-4)).all()
    assert (error[tiny] <= LEAST).all()


@both
@settings(deadline=None, max_examples=40)
@given(values=vectors())
def test_bfloat16_rounds_to_eight_bits(library: Callable[[WireFormat], Codec], values: Values) -> None:
    values = values.clip(-1e38, 1e38)
    error = np.abs(decoded(library(WireFormat.BF16), values).astype(np.float64) - values)
    assert (error <= np.abs(values) * 2.0**-8 + 1e-40).all()


@pytest.mark.skipif(len(LIBRARIES) == 1, reason="torch is not installed")
@pytest.mark.parametrize("form", QUANTISED, ids=str)
@settings(deadline=None, max_examples=40)
@given(values=vectors(odd=True), onto=vectors())
def test_numpy_and_torch_yield_the_same_bytes_and_values(form: WireFormat, values: Values, onto: Values) -> None:
    codecs = [library(form) for library in LIBRARIES]
    data = [encoded(each, values) for each in codecs]
    assert np.array_equal(*data)
    sums = [np.resize(onto, values.size).astype(np.float32) if onto.size else np.zeros_like(values) for _ in codecs]
    for each, total in zip(codecs, sums, strict=True):
        each.decode(data[0], total, add=True)
    assert np.array_equal(*sums, equal_nan=True)


@pytest.mark.skipif(len(LIBRARIES) == 1, reason="torch is not installed")
@settings(deadline=None, max_examples=40)
@given(values=vectors(odd=True))
def test_numpy_and_torch_yield_the_same_bfloat16(values: Values) -> None:
    one, other = [decoded(library(WireFormat.BF16), values) for library in LIBRARIES]
    assert np.array_equal(one, other, equal_nan=True)  # the payload of a NaN may differ


@both
@every_form
@settings(deadline=None, max_examples=40)
@given(values=vectors())
def test_what_was_decoded_is_encoded_as_the_same_values(
    library: Callable[[WireFormat], Codec], form: WireFormat, values: Values
) -> None:
    used = library(form)
    once = decoded(used, values)
    again = decoded(used, once)
    # A scale is rounded, and so may differ in its last bit: no value moves by a thousandth of a scale.
    slack = block_scales(used, values) * used.top * 2.0**-15 if isinstance(used, codec.Blocks) else 0.0
    assert (np.abs(again.astype(np.float64) - once) <= slack).all()


@both
@every_form
@settings(deadline=None, max_examples=40)
@given(values=vectors(odd=True), onto=st.floats(-2, 2, width=32))
def test_adding_is_decoding_and_then_adding(
    library: Callable[[WireFormat], Codec], form: WireFormat, values: Values, onto: float
) -> None:
    used, total = library(form), np.full(values.size, onto, np.float32)
    used.decode(encoded(used, values), total, add=True)
    with np.errstate(invalid="ignore", over="ignore"):
        assert np.array_equal(total, np.float32(onto) + decoded(used, values), equal_nan=True)


@both
@every_form
def test_values_that_are_converted_in_several_pieces_are_those_of_each_piece(
    library: Callable[[WireFormat], Codec], form: WireFormat
) -> None:
    used, generator = library(form), np.random.default_rng(3)
    count = 2 * codec.PIECE + used.block + 1
    edges = list(range(0, count, codec.PIECE))
    values = (
        generator.standard_normal(count).astype(np.float32) * np.repeat(np.float32([1, 1e3, 1e-3]), codec.PIECE)[:count]
    )
    each = np.concatenate([decoded(library(form), values[begin : begin + codec.PIECE]) for begin in edges])
    assert np.array_equal(decoded(used, values), each)
    total = np.ones(count, np.float32)
    used.decode(encoded(used, values), total, add=True)
    assert np.array_equal(total, 1 + each)


@both
@pytest.mark.parametrize("form", QUANTISED, ids=str)
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_a_block_with_an_infinity_or_a_nan_is_nan_and_no_other_block(
    library: Callable[[WireFormat], Codec], form: WireFormat, odd: float
) -> None:
    used = library(form)
    values = np.linspace(-1, 1, 3 * used.block + 5, dtype=np.float32)
    values[used.block + 3] = odd
    block = slice(used.block, 2 * used.block)
    result = decoded(used, values)
    assert np.isnan(result[block]).all()
    assert np.isfinite(np.delete(result, np.r_[block])).all()
    assert np.isnan(used_last := decoded(used, np.array([odd, 1.0], np.float32))).all(), used_last


@both
@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_blocks_of_tiny_values_are_zeros(library: Callable[[WireFormat], Codec], form: WireFormat) -> None:
    used = library(form)
    values = np.zeros(4 * used.block, np.float32)
    values[used.block] = 0.9e-30
    values[2 * used.block] = -1e-44
    values[3 * used.block] = 2e-30
    result = decoded(used, values)
    assert not result[: 3 * used.block].any()
    assert result[3 * used.block] == pytest.approx(2e-30, rel=1e-4)


@both
@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_a_block_that_is_not_full_does_not_see_an_earlier_one(
    library: Callable[[WireFormat], Codec], form: WireFormat
) -> None:
    used = library(form)
    decoded(used, np.full(3, 1e6, np.float32))
    assert np.allclose(decoded(used, np.full(2, 1e-3, np.float32)), 1e-3)


@every_form
def test_the_size_of_what_is_encoded(form: WireFormat) -> None:
    used = codec.codec_of(form)
    bits = {WireFormat.BF16: 16.0, WireFormat.INT8: 8.125, WireFormat.INT4: 4.5}[form]
    assert used.nbytes(1 << 20) == bits / 8 * (1 << 20)
    assert used.nbytes(0) == 0
    assert all(used.nbytes(count) % 4 == 0 for count in range(600))
    assert used.nbytes(2 * used.block + 1) == 2 * used.nbytes(used.block) + used.nbytes(1)
