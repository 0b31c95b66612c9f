"""Framing: the same messages wherever the stream is cut, and no memory for one that is too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo._net.frame_mac import FrameMac
from hvdgloo._net.framing import HEAD, TAG, FrameDecoder, head

LIMIT = 1000


def framed(messages: list[bytes]) -> bytes:
    return b"".join(head(len(message)) + message for message in messages)


@given(st.lists(st.binary(max_size=60), max_size=8), st.data())
def test_any_cut_gives_the_same_messages(messages: list[bytes], data: st.DataObject) -> None:
    stream = framed(messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder(LIMIT)
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [bytes(message) for message in decoder.feed(memoryview(stream)[begin:end])]
    assert found == messages
    assert not decoder.pending


@given(st.binary(max_size=20), st.integers(1, HEAD + 19))
def test_a_message_that_is_not_whole_is_pending(message: bytes, missing: int) -> None:
    stream = framed([message])
    cut = max(1, len(stream) - missing)
    decoder = FrameDecoder(LIMIT)
    assert decoder.feed(stream[:cut]) == []
    assert decoder.pending
    assert decoder.feed(stream[cut:]) == [message]
    assert not decoder.pending


def test_what_has_begun_outlives_the_buffer_that_it_came_in() -> None:
    buffer = bytearray(framed([b"one", b"two"]) + head(5) + b"th")
    decoder = FrameDecoder(LIMIT)
    assert decoder.feed(memoryview(buffer)) == [b"one", b"two"]
    buffer[:] = bytes(len(buffer))
    assert decoder.feed(b"ree") == [b"three"]


@pytest.mark.parametrize("before", [b"", framed([b"x"]), framed([b"x", b"y"])], ids=["first", "second", "third"])
def test_too_long_a_message_is_refused_at_its_beginning(before: bytes) -> None:
    assert FrameDecoder(LIMIT).feed(framed([bytes(LIMIT)])) == [bytes(LIMIT)]
    with pytest.raises(ValueError, match=f"^a letter of {LIMIT + 1} bytes, where at most {LIMIT} are allowed$"):
        FrameDecoder(LIMIT, "a letter").feed(before + head(LIMIT + 1))


def test_too_long_a_message_that_is_whole_is_refused_too() -> None:
    with pytest.raises(ValueError, match="a message of 1001 bytes"):
        FrameDecoder(LIMIT).feed(framed([bytes(LIMIT + 1)]))


@given(st.lists(st.binary(max_size=60), max_size=8), st.data())
def test_signed_messages_are_the_same_however_they_are_cut(messages: list[bytes], data: st.DataObject) -> None:
    mac = FrameMac(b"k" * 32)
    stream = b"".join(framed([message]) + mac.tag(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder(LIMIT, mac=FrameMac(b"k" * 32))
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [bytes(message) for message in decoder.feed(memoryview(stream)[begin:end])]
    assert found == messages
    assert not decoder.pending


def test_tags_differ_by_message_place_and_key() -> None:
    mac = FrameMac(b"k" * 32)
    tags = [mac.tag(b"a"), mac.tag(b"a"), FrameMac(b"k" * 32).tag(b"b"), FrameMac(b"l" * 32).tag(b"a")]
    assert len(set(tags)) == 4
    assert {len(tag) for tag in tags} == {TAG}


def test_a_changed_byte_is_noticed_before_anything_is_handed_out() -> None:
    message = b"attack at dawn"
    stream = bytearray(framed([message]) + FrameMac(b"k" * 32).tag(message))
    for place in range(HEAD, len(stream)):
        stream[place] ^= 0x40
        with pytest.raises(ValueError, match=r"^a letter has a wrong signature"):
            FrameDecoder(LIMIT, "a letter", FrameMac(b"k" * 32)).feed(stream)
        stream[place] ^= 0x40
