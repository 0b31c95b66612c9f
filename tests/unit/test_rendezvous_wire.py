"""Bodies with several keys and values: there and back, and nothing trusted on the way."""

from __future__ import annotations

import msgspec
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
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x00\x0f\xff\xff",
        b"\x91\xc6\xff\xff\xff\xffx",
        b"\x91\xc4\x03xx",
        b"\x91\xc4\x01xx",
        b"\x92\xc4\x01x",
    ],
)
def test_lengths_that_lie(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^not a body with values: "):
        wire.unpack_values(body)


@pytest.mark.parametrize("body", [b"{}", b"\x80", b"\x91\x01", b"\xa1a", b"\x91\x90", b"nonsense", b"\x91" * 100_000])
def test_keys_that_are_none(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^not a body with keys: "):
        wire.unpack_keys(body)


def test_more_than_fit_into_one_request() -> None:
    assert len(wire.unpack_keys(wire.pack_keys([""] * wire.MAX_COUNT))) == wire.MAX_COUNT
    with pytest.raises(ValueError, match=f"<= {wire.MAX_COUNT}"):
        wire.unpack_keys(wire.pack_keys([""] * (wire.MAX_COUNT + 1)))


def test_a_key_given_twice() -> None:
    with pytest.raises(ValueError, match="2 keys, but only 1 different"):
        wire.unpack_items(msgspec.msgpack.encode([("a", b"1"), ("a", b"2")]))
