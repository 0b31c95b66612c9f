"""Whole lines out of torn bytes, and what must precede them on a terminal. Pain 25."""

from __future__ import annotations

import os
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.runner.console.lines import MAX_LINE, Lines, Screen

A, B = (0, 1), (1, 1)


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff", b""]), max_size=30))
def test_pain_25_cutting_neither_loses_nor_changes_a_byte(pieces: list[bytes]) -> None:
    lines = Lines()
    found = [line for piece in pieces for line in lines.feed(piece)]
    rest = lines.rest
    # What disappears are empty states of a bar: a carriage return with nothing before it.
    shown = b"".join(found) + rest
    assert shown.replace(b"\r", b"") == b"".join(pieces).replace(b"\r", b"")
    for line in found:
        assert re.fullmatch(rb"[^\r\n]*\r?\n|[^\r\n]+\r", line)


@given(st.binary(max_size=60), st.integers(1, 10))
def test_it_does_not_matter_how_bytes_arrive(data: bytes, step: int) -> None:
    at_once, piecewise = Lines(), Lines()
    whole = at_once.feed(data)
    pieces = [line for i in range(0, len(data), step) for line in piecewise.feed(data[i : i + step])]
    assert (pieces, piecewise.rest) == (whole, at_once.rest)


def test_a_progress_bar_s_states_are_lines() -> None:
    lines = Lines()
    assert lines.feed(b"\r 0%") == []
    assert lines.redrawn
    assert lines.feed(b"\r50%") == [b" 0%\r"]
    assert lines.feed(b"\r100%\ndone") == [b"50%\r", b"100%\n"]
    assert not lines.redrawn
    assert lines.finish() == b"done\n"


def test_a_line_end_of_two_bytes_is_one_even_when_torn() -> None:
    lines = Lines()
    assert lines.feed(b"one\r") == []
    assert lines.feed(b"\ntwo\r") == [b"one\r\n"]
    assert lines.feed(b"three") == [b"two\r"]


def test_endless_lines_are_broken() -> None:
    lines = Lines()
    found = [line for _ in range(40) for line in lines.feed(b"x" * 65536)]
    assert found
    assert all(len(line) <= MAX_LINE + 65537 for line in found)


def test_lines_of_a_pipe_carry_nothing_but_their_prefix() -> None:
    screen = Screen(terminal=False)
    assert screen.line(A, b"[0]", b"50%\r") == b"[0]50%\r"
    assert screen.line(B, b"[1]", b"text\n") == b"[1]text\n"


def test_a_bar_is_erased_for_another_rank_s_line_only() -> None:
    screen = Screen(terminal=True)
    assert screen.line(A, b"[0]", b"50%\r") == b"[0]50%\r"
    assert screen.line(A, b"[0]", b"60%\r") == b"[0]60%\r"
    assert screen.line(B, b"[1]", b"text\n") == b"\x1b[K[1]text\n"
    assert screen.line(B, b"[1]", b"more\n") == b"[1]more\n"


def test_an_unfinished_bar_is_erased_and_its_line_shown_in_full_later() -> None:
    screen = Screen(terminal=True)
    assert screen.partial(A, b"[0]", b"100%", bar=True) == b"[0]100%"
    assert screen.line(B, b"[1]", b"text\n") == b"\r\x1b[K[1]text\n"
    assert screen.line(A, b"[0]", b"100%\n") == b"[0]100%\n"


def test_a_prompt_goes_on_where_it_stopped_and_is_never_torn() -> None:
    screen = Screen(terminal=False)
    assert screen.partial(A, b"[0]", b"(Pdb) ", bar=False) == b"[0](Pdb) "
    assert screen.line(A, b"[0]", b"(Pdb) 42\n") == b"42\n"
    assert screen.partial(A, b"[0]", b"(Pdb) ", bar=False) == b"[0](Pdb) "
    assert screen.line(B, b"[1]", b"text\n") == b"\n[1]text\n"
    assert screen.line(A, b"[0]", b"(Pdb) 43\n") == b"[0](Pdb) 43\n"


class TestWriter:
    def test_more_than_memory_waits_on_disk_and_comes_out_in_order(self) -> None:
        from hvdgloo.runner.console.writer import MEMORY, Writer
        from tests.support.launching import wait_for

        class Gate:
            def __init__(self) -> None:
                self.data = b""
                self.read, self.write_end = os.pipe()

            def write(self, data: bytes) -> None:
                if not self.data:
                    os.read(self.read, 1)  # blocked until the test opens the gate
                self.data += data

        gate = Gate()
        writer = Writer("test", [gate])
        pieces = [bytes([i % 256]) * 100_000 for i in range(3 * MEMORY // 100_000)]
        for piece in pieces:
            writer.put(0, piece)
        assert writer.backlog >= 3 * MEMORY - 100_000
        assert writer._in_memory <= MEMORY
        assert not writer.wait_until_written(0.05)
        os.write(gate.write_end, b"x")
        wait_for(lambda: writer.wait_until_written(0.1))
        # What arrives while the file is being emptied must not overtake it.
        writer.put(0, b"last")
        assert writer.wait_until_written(5)
        assert gate.data == b"".join(pieces) + b"last"
        assert writer._file is not None
        assert os.fstat(writer._file.fileno()).st_size == 0
        writer.close()
        os.close(gate.read)
        os.close(gate.write_end)

    def test_what_comes_last_waits_behind_what_is_on_disk_though_there_is_room_in_memory(self) -> None:
        from hvdgloo.runner.console.writer import MEMORY, Writer

        class Turnstile:
            def __init__(self) -> None:
                self.data = b""
                self.permits = threading.Semaphore(0)
                self.passed = threading.Semaphore(0)

            def write(self, data: bytes) -> None:
                assert self.permits.acquire(timeout=10)
                self.data += data
                self.passed.release()

        target = Turnstile()
        writer = Writer("test", [target])
        pieces = [bytes([i]) * 1_000_000 for i in range(2 * MEMORY // 1_000_000)]
        for piece in pieces:
            writer.put(0, piece)
        for _ in range(2):
            target.permits.release()
            assert target.passed.acquire(timeout=10)
        writer.put(0, b"last")
        target.permits.release(100)
        assert writer.wait_until_written(10)
        assert target.data == b"".join(pieces) + b"last"
        writer.close()

    @pytest.mark.parametrize("stream", ["a pipe that was closed", "of bytes", "without flush()"])
    def test_a_target_that_fails_is_given_up_and_reported_once(self, stream: str) -> None:
        import io
        from typing import Any

        from hvdgloo.runner.console.writer import TextTarget, Writer

        class Broken:
            def write(self, data: str) -> None:
                if stream == "a pipe that was closed":
                    raise BrokenPipeError(32, "Broken pipe")

        broken: Any = io.BytesIO() if stream == "of bytes" else Broken()
        failures: list[tuple[int, Exception]] = []
        writer = Writer("test", [TextTarget(broken)], lambda index, error: failures.append((index, error)))
        for _ in range(5):
            writer.put(0, b"x")
        assert writer.wait_until_written(5)
        writer.close()
        assert [index for index, _ in failures] == [0]

    @pytest.mark.parametrize("size", [1, 70_000, 5_000_000])
    def test_descriptors_that_do_not_block_are_waited_for(self, size: int) -> None:
        import threading

        from hvdgloo.runner.console.writer import DescriptorTarget

        read, write = os.pipe()
        os.set_blocking(write, False)
        data = os.urandom(size)
        thread = threading.Thread(target=DescriptorTarget(write).write, args=(data,))
        thread.start()
        found = b""
        while len(found) < size:
            found += os.read(read, 65536)
        thread.join(5)
        assert found == data
        os.close(read)
        os.close(write)
