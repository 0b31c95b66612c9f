"""Some hundreds of malformed inputs for everything that reads; ``benchmarks/fuzz.py`` tries more of them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from random import Random

import pytest

from hvdgloo._net.framing import FrameDecoder
from tests.support import fuzzing
from tests.support.launching import run_command
from tests.support.pages import ROOT

SEED = 1


@pytest.mark.extended
@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_no_input_does_harm(name: str) -> None:
    some = fuzzing.TARGETS[name].some
    assert fuzzing.fuzz(name, SEED, range(some)) == some


def test_an_input_that_does_harm_is_shown_and_can_be_had_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(given: int) -> None:
        if given % 7 == 3:
            raise ZeroDivisionError("it was divided")

    target = fuzzing.Target(lambda random: random.randrange(1000), lambda: nullcontext(read), 0)
    monkeypatch.setitem(fuzzing.TARGETS, "numbers", target)
    with pytest.raises(fuzzing.Harmful) as caught:
        fuzzing.fuzz("numbers", 5, range(1000))
    told = str(caught.value)
    number = int(told.rpartition(" ")[2])
    given = Random(f"numbers 5 {number}").randrange(1000)
    assert given % 7 == 3
    assert told == (
        f"numbers: ZeroDivisionError: it was divided\ninput: {given}\n"
        f"again: python benchmarks/fuzz.py --target numbers --seed 5 --only {number}"
    )
    with pytest.raises(fuzzing.Harmful):
        fuzzing.fuzz("numbers", 5, [number])


def test_a_reader_that_believes_a_length_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is planted: the limit of a message is not looked at, and some index beyond it."""

    def trusting(self: FrameDecoder, data: bytes) -> list[memoryview]:
        return [memoryview(data)[4 : 4 + data[3]]] if data[4] is not None else []

    monkeypatch.setattr(FrameDecoder, "feed", trusting)
    with pytest.raises(fuzzing.Harmful, match="IndexError"):
        fuzzing.fuzz("frames", SEED, range(200))


def test_the_command_tries_as_many_as_there_is_time_for() -> None:
    command = [sys.executable, "benchmarks/fuzz.py", "--target", "probes", "--target", "control", "--seconds", "0.4"]
    done = run_command(command, cwd=ROOT, timeout=50)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["seed", "probes", "control"]
    assert all(int(line.split()[1].replace(",", "")) > 10 for line in lines[1:])
