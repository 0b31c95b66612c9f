"""Compressors: which may compress a whole bucket, and what each front-end gets from one class."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives import compression
from hvdgloo._collectives.compression import NoneCompressor, is_elementwise, wire_of
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.numpy._compression import Compression
from hvdgloo.types import WireFormat


class Halves(compression.AdapterCompressor):
    """Sends half of each number."""

    elementwise = True

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, None]:
        return cls.adapter.cast(tensor * 0.5, cls.adapter.describe(tensor).dtype), None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor * 2


class Own(Compression, adapter=NumpyAdapter()):
    """The compressors of a front-end that has one more."""

    halves = Halves


class ByNorm(NoneCompressor):
    """Divides a tensor by its norm; of a bucket that is another one."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        norm = np.linalg.norm(tensor)
        return tensor / norm, norm


class Rescaled(Compression.fp16):
    """Undoes more than its base did."""

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return super().decompress(tensor / np.abs(tensor).max(), ctx)


class Renamed(Compression.fp16):
    """Compresses as its base does."""


class Signs(ByNorm):
    """Sends signs, and says that it treats elements one by one."""

    elementwise = True

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return np.sign(tensor), None


@pytest.mark.parametrize(
    "compressor", [NoneCompressor, Compression.fp16, Compression.int8, Renamed, Signs, Signs(), Own.halves]
)
def test_what_treats_elements_one_by_one_may_compress_a_bucket(compressor: object) -> None:
    assert is_elementwise(compressor)


@pytest.mark.parametrize(
    "compressor", [ByNorm, ByNorm(), Rescaled, None, object()], ids=["class", "object", "derived", "none", "other"]
)
def test_what_derives_from_it_and_compresses_otherwise_must_say_so_again(compressor: object) -> None:
    assert not is_elementwise(compressor)


@pytest.mark.parametrize(
    ("compressor", "form"),
    [
        (Compression.int8, WireFormat.INT8),
        (Compression.int4, WireFormat.INT4),
        *((each, None) for each in (NoneCompressor, Compression.fp16, Renamed)),
        *((each, WireFormat.FULL) for each in (ByNorm, Signs(), Own.halves, Rescaled, object())),
    ],
)
def test_what_a_program_s_own_compressor_yields_crosses_as_it_is(compressor: object, form: WireFormat | None) -> None:
    """It may contain indices, for example. With the library's compressors that leave the choice open, the job's
    setting counts."""
    assert wire_of(compressor) is form


@pytest.mark.parametrize("compressor", [Compression.int8, Compression.int4])
def test_what_is_encoded_on_the_wire_is_sent_itself(compressor: Any) -> None:
    tensor = np.float32([1.0, 2.0])
    sent, ctx = compressor.compress(tensor)
    assert sent is tensor
    assert compressor.decompress(tensor, ctx) is tensor


def test_a_front_end_s_compressors_have_its_adapter_and_can_be_pickled() -> None:
    sent, ctx = Own.halves.compress(np.float32([2.0, 4.0]))
    assert sent.tolist() == [1.0, 2.0]
    assert Own.halves.decompress(sent, ctx).tolist() == [2.0, 4.0]
    assert not hasattr(Halves, "adapter")  # another front-end's has another one
    assert Own.none is NoneCompressor
    for each in (Own.halves, Own.fp16, Compression.fp16):
        assert pickle.loads(pickle.dumps(each)) is each
