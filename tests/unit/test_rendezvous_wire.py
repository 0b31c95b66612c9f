"""Bodies with several keys and values: there and back, and nothing trusted on the way."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.rendezvous import _wire as wire

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(KEYS, max_size=20))
def test_keys(keys: list[str]) -> None:
    assert wire.unpack_keys(wire.pack_keys(keys)) == keys


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_values(values: list[bytes]) -> None:
    assert wire.unpack_values(wire.pack_values(values)) == values


@given(st.dictionaries(KEYS, st.binary(max_size=50), max_size=20))
def test_items(items: dict[str, bytes]) -> None:
    assert wire.unpack_items(wire.pack_items(items)) == items


@given(st.binary(max_size=200))
def test_anything_else_is_a_value_error(body: bytes) -> None:
    for unpack in (wire.unpack_keys, wire.unpack_values, wire.unpack_items):
        try:
            unpack(body)
        except ValueError:
            pass


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xff\xff\xff",
        struct.pack(">IQ", 1, 2**63) + b"x",
        struct.pack(">IQ", 1, 3) + b"xx",
        struct.pack(">IQ", 1, 1) + b"xx",
        struct.pack(">IQQ", 2, 2**64 - 1, 2) + b"x",
    ],
)
def test_lengths_that_lie(body: bytes) -> None:
    with pytest.raises(ValueError, match="body"):
        wire.unpack_values(body)


@pytest.mark.parametrize("body", [b"{}", b"[1]", b'"a"', b"[[]]", b"nonsense", b"[" * 100_000])
def test_keys_that_are_none(body: bytes) -> None:
    with pytest.raises(ValueError, match="JSON"):
        wire.unpack_keys(body)


def test_a_key_given_twice() -> None:
    keys, values = wire.pack_keys(["a", "a"]), wire.pack_values([b"1", b"2"])
    with pytest.raises(ValueError, match="2 keys, 1 of them different, for 2 values"):
        wire.unpack_items(struct.pack(">I", len(keys)) + keys + values)
