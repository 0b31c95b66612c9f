"""Frames: the stream between launcher and agent, however it is cut and whatever surrounds it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdgloo.errors import LaunchError
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import (
    KINDS,
    MAX_FRAME,
    PREAMBLE,
    Beat,
    Decoder,
    Exited,
    Frame,
    Hello,
    Noise,
    Output,
    Spawn,
    Start,
    Stop,
    Survey,
    encode,
)


def framed(body: bytes | bytearray) -> bytes:
    return len(body).to_bytes(4, "big") + body


_TEXTS = st.text(st.characters() | st.integers(0xDC80, 0xDCFF).map(chr), max_size=20)  # what os.fsdecode makes, too
_TARGETS = st.tuples(st.integers(0, 9), _TEXTS, st.integers(0, 65535))
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**31), 2**31),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: _TEXTS,
    bytes: st.binary(max_size=200),
    Sequence[int]: st.lists(st.integers(0, 9)),
    Sequence[str]: st.lists(_TEXTS),
    Sequence[bytes]: st.lists(st.binary(max_size=200)),
    tuple[int, int] | None: st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    Sequence[tuple[int, str, int]]: st.lists(_TARGETS),
    Sequence[tuple[str, str, int, bool]]: st.lists(st.tuples(_TEXTS, _TEXTS, st.integers(0, 128), st.booleans())),
    Sequence[tuple[tuple[int, str, int], tuple[str, int, str, str]]]: st.lists(
        st.tuples(_TARGETS, st.tuples(_TEXTS, st.integers(-1, 9), _TEXTS, _TEXTS))
    ),
    Mapping[str, int]: st.dictionaries(_TEXTS, st.integers(0, 9)),
    Mapping[str, str]: st.dictionaries(_TEXTS, _TEXTS),
    Mapping[str, Any]: st.dictionaries(_TEXTS, st.none() | st.integers(0, 9) | st.lists(_TEXTS)),
}
_FRAMES = st.one_of(
    *(st.builds(kind, **{name: _VALUES[hint] for name, hint in get_type_hints(kind).items()}) for kind in KINDS)
)


def test_every_frame_class_can_travel() -> None:
    below = Frame.__subclasses__()
    assert {*below, *(deeper for kind in below for deeper in kind.__subclasses__())} == set(KINDS)


@given(st.lists(_FRAMES, max_size=6), st.integers(1, 64))
def test_frames_survive_however_the_bytes_are_cut(frames: list[Frame], step: int) -> None:
    data = b"".join(map(encode, frames))
    decoder = Decoder()
    found = [item for i in range(0, len(data), step) for item in decoder.feed(data[i : i + step])]
    assert found == frames
    assert not decoder.pending


@given(st.binary(max_size=100), st.integers(1, 40))
def test_what_a_login_shell_prints_before_the_preamble_is_noise(greeting: bytes, step: int) -> None:
    assume(PREAMBLE not in greeting)
    data = greeting + PREAMBLE + encode(Beat()) + encode(Exited(3, -9, "the kernel did it"))
    decoder = Decoder(PREAMBLE)
    items = [item for i in range(0, len(data), step) for item in decoder.feed(data[i : i + step])]
    noise = b"".join(item.data for item in items if isinstance(item, Noise))
    assert noise == greeting
    assert [item for item in items if not isinstance(item, Noise)] == [Beat(), Exited(3, -9, "the kernel did it")]
    assert decoder.opened


def test_the_beginning_of_a_preamble_may_be_noise_after_all() -> None:
    decoder = Decoder(PREAMBLE)
    first = decoder.feed(b"motd" + PREAMBLE[:5])
    assert first == [Noise(b"motd")]
    assert decoder.feed(b"no") == [Noise(PREAMBLE[:5] + b"no")]
    assert not decoder.opened


def test_environments_hold_any_bytes() -> None:
    odd = os.fsdecode(b"\xff\xfe\n\x00ok")
    (frame,) = Decoder().feed(encode(Spawn(0, ["a"], {odd: odd})))
    assert isinstance(frame, Spawn)
    assert os.fsencode(frame.env[odd]) == b"\xff\xfe\n\x00ok"


@pytest.mark.parametrize(
    "data",
    [
        b"Last login: Tue Nov 17",
        bytes([255]) * 20,
        (MAX_FRAME + 1).to_bytes(4, "big"),
        framed(b""),
        framed(b"oops"),
        framed(bytes([0xC1])),
        framed(msgspec.msgpack.encode(["Oops"])),
        framed(msgspec.msgpack.encode(["Exited", 1])),
        framed(msgspec.msgpack.encode(["Exited", 1, "2"])),
        framed(msgspec.msgpack.encode(["Exited", 1, 2, False, 3])),
        framed(msgspec.msgpack.encode({"Exited": [1, 2]})),
        framed(encode(Stop(15, 3.0))[4:-1]),
        framed(msgspec.msgpack.encode(["Lacking", msgspec.msgpack.Ext(2, b"x")])),
        framed(msgspec.msgpack.encode(["Probed", [[[0, "h1", 1], ["a", 0, "b"]]]])),
    ],
)
def test_what_is_no_frame_is_an_error_that_says_so(data: bytes) -> None:
    with pytest.raises(LaunchError, match="between launcher and agent"):
        Decoder().feed(data)


@given(_FRAMES, st.data())
def test_damaged_frames_are_frames_or_an_error_that_says_so(frame: Frame, data: st.DataObject) -> None:
    body = encode(frame)[4:]
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        (found,) = Decoder().feed(framed(body))
    except LaunchError as error:
        assert "a frame between launcher and agent cannot be read" in str(error)  # noqa: PT017 - or none at all
    else:
        assert isinstance(found, KINDS)


def test_nothing_secret_is_in_a_frame_s_text() -> None:
    """Pain 30: frames appear in tracebacks."""
    env = {"HVDGLOO_SECRET": "abcdef"}
    for frame in (
        Start("job", env, "/", 1.0, 1.0, 1.0),
        Spawn(0, ["x"], env),
        Output(0, 1, b"abcdef"),
        Survey(0, b"abcdef", (), True, None),
    ):
        assert "abcdef" not in repr(frame)
    assert repr(Spawn(0, ["x"], env, task=True)) == "Spawn(number=0, argv=['x'], stdin=False, task=True)"


class TestChannel:
    def test_what_the_other_side_does_not_take_is_kept(self) -> None:
        theirs, ours = os.pipe()
        closed, other = os.pipe()
        try:
            channel = FrameChannel(closed, ours)
            frames = [Output(0, 1, bytes([i]) * 50_000) for i in range(10)]
            for frame in frames:
                channel.send(frame)
            assert channel.pending > 300_000, "a pipe holds 64 KiB"
            decoder = Decoder()
            found: list[Any] = []
            while len(found) < len(frames):
                found += decoder.feed(os.read(theirs, 65536))
                channel.flush()
            assert found == frames
            assert channel.pending == 0
        finally:
            for fd in (theirs, ours, closed, other):
                os.close(fd)

    def test_ends_are_told_apart(self) -> None:
        """A peer that reads no more may still have sent its last words."""
        read_a, write_a = os.pipe()
        read_b, write_b = os.pipe()
        channel = FrameChannel(read_a, write_b)
        os.write(write_a, encode(Exited(0, 0)))
        os.close(read_b)
        os.close(write_a)
        channel.send(Beat())
        assert channel.broken
        assert not channel.ended
        assert channel.receive() == [Exited(0, 0)]
        assert channel.receive() == []
        assert channel.ended
        os.close(read_a)
        os.close(write_b)

    def test_a_beat_is_needless_while_other_bytes_wait(self) -> None:
        theirs, ours = os.pipe()
        channel = FrameChannel(theirs, ours)
        channel.send(Output(0, 1, b"x" * 200_000))
        waiting = channel.pending
        channel.beat()
        assert channel.pending == waiting
        os.close(theirs)
        os.close(ours)


def test_hello_tells_versions_first() -> None:
    assert Hello.__struct_fields__[:2] == ("protocol", "version")
