"""The codec: values survive the wire, whatever texts they hold; any bytes are such a value, or a ValueError."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo._net.codec import Codec, Count, Message, from_json, to_json
from hvdgloo._net.framing import FrameDecoder


class Letter(Message, frozen=True, tag=0):
    text: str
    share: float = 1.0
    enclosed: bytes = b""
    environment: Mapping[str, str] = {}
    parts: tuple[Count, ...] = ()


class Call(Message, frozen=True, tag=1):
    number: int


class Anything(Message, frozen=True):
    values: dict[str, Any]
    text: str = ""


CODEC: Codec[Letter | Call] = Codec(Letter | Call, "post")

any_texts = st.text(st.characters() | st.integers(0xD800, 0xDFFF).map(chr), max_size=20)  # lone surrogates, too
letters = st.builds(
    Letter,
    any_texts,
    st.floats(allow_nan=False),
    st.binary(max_size=20),
    st.dictionaries(any_texts, any_texts, max_size=3),
    st.lists(st.integers(0, 1 << 63), max_size=4).map(tuple),
)
calls = st.builds(Call, st.integers(-(1 << 63), (1 << 64) - 1))


def decoded(data: bytes) -> Letter | Call | None:
    """None for what is refused as it should be."""
    try:
        return CODEC.decode(data)
    except ValueError:
        return None


@given(letters | calls)
def test_values_survive(message: Letter | Call) -> None:
    arrived = CODEC.decode(CODEC.encode(message))
    assert type(arrived) is type(message)
    assert arrived == message


@given(letters)
def test_a_frame_is_one_message(message: Letter) -> None:
    (body,) = FrameDecoder(1 << 20).feed(CODEC.frame(message))
    assert CODEC.decode(body) == message


@given(st.binary(max_size=100))
def test_any_bytes_are_a_value_or_a_value_error(data: bytes) -> None:
    assert isinstance(decoded(data), Letter | Call | None)


@given(letters | calls, st.data())
def test_damaged_bytes_are_a_value_or_a_value_error(message: Letter | Call, data: st.DataObject) -> None:
    damaged = bytearray(CODEC.encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert isinstance(decoded(bytes(damaged)), Letter | Call | None)


@given(letters)
def test_what_is_only_shown_can_be_encoded_by_every_process(message: Letter) -> None:
    shown: Codec[Letter | Call] = Codec(Letter | Call, "post", shown=True)
    arrived = shown.decode(CODEC.encode(message))
    msgspec.json.encode(arrived)
    texts = [message.text, *message.environment]
    if not any(re.search("[\ud800-\udfff]", text) for text in [*texts, *message.environment.values()]):
        assert arrived == message


def test_bytes_in_a_text_that_is_only_shown_are_spelled_out_whatever_the_field_s_type() -> None:
    kept: Codec[Anything] = Codec(Anything, "post", shown=True)
    assert kept.decode(kept.encode(Anything({"a": "\udcff\ud812"}))) == Anything({"a": "\\xff\\ud812"})
    assert kept.decode(kept.encode(Anything({}, "\udcff"))) == Anything({}, "\\xff")


@given(st.binary())
def test_json_holds_the_bytes_of_any_path(path: bytes) -> None:
    text = path.decode("utf-8", "surrogateescape")
    data = to_json({"x": text})
    assert data.isascii()
    assert b"\n" not in data
    assert from_json(data, dict[str, str]) == {"x": text}


@pytest.mark.parametrize("data", [b"", b"\xff", b"{", b'{"x": 1}', b"[" * 100_000, b"null"])
def test_what_is_no_such_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(data, dict[str, str])


def test_environments_hold_any_bytes() -> None:
    odd = os.fsdecode(b"\xff\xfe\n\x00ok")
    arrived = CODEC.decode(CODEC.encode(Letter("x", environment={odd: odd})))
    assert isinstance(arrived, Letter)
    assert os.fsencode(arrived.environment[odd]) == b"\xff\xfe\n\x00ok"


def test_what_is_missing_at_the_end_has_its_default() -> None:
    assert CODEC.decode(msgspec.msgpack.encode([0, "x"])) == Letter("x")


@pytest.mark.parametrize(
    "value",
    [[0], [0, 1], [0, "x", "1"], [0, "x", 1.0, "x"], [0, "x", 1.0, b"", []], [0, "x", 1.0, b"", {}, [-1]], [1, 1.5]],
    ids=["too short", "text", "float", "bytes", "mapping", "negative", "integer"],
)
def test_wrong_types_are_value_errors(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^not a post: "):
        CODEC.decode(msgspec.msgpack.encode(value))


def test_values_of_subclasses_travel_as_what_they_are() -> None:
    message = Letter(np.str_("text"), np.float64(0.5))
    assert CODEC.decode(CODEC.encode(message)) == Letter("text", 0.5)


def test_what_cannot_travel_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a value of object cannot be sent"):
        CODEC.encode(Letter("x", 1.0, b"", {"x": object()}))  # type: ignore[dict-item]
