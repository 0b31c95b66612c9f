"""Frames: the stream between launcher and agent, however it is cut and whatever surrounds it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdgloo.errors import LaunchError
from hvdgloo.runner.protocol.channel import Channel
from hvdgloo.runner.protocol.frames import (
    KINDS,
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
    encode,
)

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(2**31), 2**31),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "str": st.text(),
    "bytes": st.binary(max_size=200),
    "Sequence[int]": st.lists(st.integers(0, 9)),
    "Sequence[str]": st.lists(st.text()),
    "Sequence[int] | None": st.none() | st.lists(st.integers(0, 9)),
    "Sequence[Sequence[Any]]": st.lists(st.lists(st.integers(0, 9) | st.text())),
    "Sequence[Sequence[Sequence[Any]]]": st.lists(st.lists(st.lists(st.integers(0, 9) | st.text()))),
    "Mapping[str, int]": st.dictionaries(st.text(), st.integers(0, 9)),
    "Mapping[str, str]": st.dictionaries(st.text(), st.text()),
    "Mapping[str, Any]": st.dictionaries(st.text(), st.none() | st.integers(0, 9) | st.lists(st.text())),
}
_FRAMES = st.one_of(
    *(
        st.builds(kind, **{f.name: _VALUES[str(f.type)] for f in dataclasses.fields(kind)})  # type: ignore[arg-type]
        for kind in KINDS
    )
)


def test_every_frame_class_has_a_number() -> None:
    below = Frame.__subclasses__()
    assert {*below, *(deeper for kind in below for deeper in kind.__subclasses__())} == set(KINDS)


@given(st.lists(_FRAMES, max_size=6), st.integers(1, 64))
def test_frames_survive_however_the_bytes_are_cut(frames: list[Frame], step: int) -> None:
    data = b"".join(map(encode, frames))
    decoder = Decoder()
    found = [item for i in range(0, len(data), step) for item in decoder.feed(data[i : i + step])]
    assert found == frames
    assert decoder.rest() == b""


@given(st.binary(max_size=100), st.integers(1, 40))
def test_what_a_login_shell_prints_before_the_preamble_is_noise(greeting: bytes, step: int) -> None:
    assume(PREAMBLE not in greeting)
    data = greeting + PREAMBLE + encode(Beat()) + encode(Exited(3, -9, True))
    decoder = Decoder(PREAMBLE)
    items = [item for i in range(0, len(data), step) for item in decoder.feed(data[i : i + step])]
    noise = b"".join(item.data for item in items if isinstance(item, Noise))
    assert noise == greeting
    assert [item for item in items if not isinstance(item, Noise)] == [Beat(), Exited(3, -9, True)]
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
        encode(Stop(15, 3.0))[:1] + b"\xff\xff\xff\xff\xff\xff\xff\xff",
        encode(Beat())[:1] + encode(Exited(1, 2))[1:],
        bytes([KINDS.index(Exited)]) + (4).to_bytes(4, "big") + (0).to_bytes(4, "big") + b"oops",
    ],
)
def test_what_is_no_frame_is_an_error_that_says_so(data: bytes) -> None:
    with pytest.raises(LaunchError):
        Decoder().feed(data)


def test_nothing_secret_is_in_a_frame_s_text() -> None:
    """Pain 30: frames appear in tracebacks."""
    env = {"HVDGLOO_SECRET": "abcdef"}
    for frame in (Start("job", env, "/", 1.0, 1.0), Spawn(0, ["x"], env), Output(0, 1, b"abcdef")):
        assert "abcdef" not in repr(frame)


class TestChannel:
    def test_what_the_other_side_does_not_take_is_kept(self) -> None:
        theirs, ours = os.pipe()
        closed, other = os.pipe()
        try:
            channel = Channel(closed, ours)
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
        channel = Channel(read_a, write_b)
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
        channel = Channel(theirs, ours)
        channel.send(Output(0, 1, b"x" * 200_000))
        waiting = channel.pending
        channel.beat()
        assert channel.pending == waiting
        os.close(theirs)
        os.close(ours)


def test_hello_tells_versions_first() -> None:
    names = [f.name for f in dataclasses.fields(Hello)]
    assert names[:2] == ["protocol", "version"]
