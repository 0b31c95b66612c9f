"""Tracebacks of many ranks: in one piece each, and the same one once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hvdgloo._job.excepthook import HINT
from hvdgloo.runner.console.last_lines import HEAD
from hvdgloo.runner.console.tracebacks import GATHER, LONGEST, MEMORY, QUIET, Tracebacks
from hvdgloo.runner.protocol.frames import STDERR

SIMPLE = f"""{HEAD}
  File "train.py", line 3, in <module>
    main()
ValueError: no data
"""
CHAINED = f"""{SIMPLE}
During handling of the above exception, another exception occurred:

{HEAD}
  File "train.py", line 5, in <module>
    main()
RuntimeError: that is worse
"""
SYNTAX = """  File "train.py", line 1
    x = = 1
        ^
SyntaxError: invalid syntax
"""
GROUP = f"""  + Exception Group {HEAD}
  |   File "train.py", line 1, in <module>
  | ExceptionGroup: some (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: no data
    +------------------------------------
"""
ECHO = "hvdgloo.errors.PeerLostError: rank 0 (host h1) was lost\n"


def lines(text: str) -> list[bytes]:
    return text.encode().splitlines(keepends=True)


class Shown:
    """The visible output of several ranks: rank and text of each piece, and the ranks that raised the same error."""

    def __init__(self) -> None:
        self.tracebacks = Tracebacks()
        self.pieces: list[tuple[int, str]] = []
        self.same: list[tuple[Sequence[int], str]] = []

    def feed(self, rank: int, text: str, now: float) -> None:
        for piece in self.tracebacks.feed((rank, STDERR), lines(text), now):
            self.pieces.append((piece.source[0], b"".join(piece.lines).decode()))

    def tick(self, now: float, *, over: bool = False) -> None:
        for piece in self.tracebacks.take(now, over=over):
            self.pieces.append((piece.source[0], b"".join(piece.lines).decode()))
        self.same += self.tracebacks.same(now, over=over)


@pytest.mark.parametrize("text", [SIMPLE, CHAINED, SYNTAX, GROUP], ids=["simple", "chained", "syntax", "group"])
def test_tracebacks_that_come_line_by_line_are_shown_in_one_piece_and_once(text: str) -> None:
    shown = Shown()
    for number, line in enumerate(text.splitlines(keepends=True)):
        for rank in range(8):
            shown.feed(rank, line, 0.001 * number)
    shown.tick(0.05)
    assert shown.pieces == []
    shown.tick(0.05 + QUIET)
    assert shown.pieces == [(0, text)]
    assert [shown.tracebacks.shown_with(rank) for rank in range(8)] == [0] * 8
    assert shown.same == []
    assert shown.tracebacks.next == 0.05 + QUIET + GATHER
    shown.tick(shown.tracebacks.next)
    error = {
        SIMPLE: "ValueError: no data",
        CHAINED: "RuntimeError: that is worse",
        SYNTAX: "SyntaxError: invalid syntax",
    }
    assert shown.same == [([1, 2, 3, 4, 5, 6, 7], error.get(text, "ExceptionGroup: some (1 sub-exception)"))]
    assert shown.tracebacks.next is None


def test_errors_without_a_traceback_are_shown_once_too() -> None:
    shown = Shown()
    for rank in range(1, 4):
        shown.feed(rank, ECHO, 0.0)
    shown.tick(20.0, over=True)
    assert shown.pieces == [(1, ECHO)]
    assert shown.same == [([2, 3], ECHO.strip())]


@pytest.mark.parametrize("before", ["Stopped because rank 3 ended, at train.py:7\n", HINT])
def test_what_hvdgloo_says_before_an_error_belongs_to_it(before: str) -> None:
    shown = Shown()
    text = before + (SIMPLE if before == HINT else ECHO)
    for rank in range(3):
        shown.feed(rank, text, 0.0)
    shown.tick(20.0, over=True)
    assert shown.pieces == [(0, text)]
    assert shown.same == [([1, 2], text.splitlines()[-1])]


def test_what_is_no_traceback_is_shown_at_once_and_in_its_order() -> None:
    shown = Shown()
    shown.feed(0, "one\ntwo\n", 0.0)
    shown.feed(0, f"three\n{SIMPLE}", 0.0)
    assert shown.pieces == [(0, "one\ntwo\n"), (0, "three\n")]
    shown.feed(1, "other\n", 0.0)
    shown.feed(0, "what follows it\n", 0.01)
    shown.tick(1.0)
    assert shown.pieces[2:] == [(1, "other\n"), (0, f"{SIMPLE}what follows it\n")]


def test_what_differs_is_never_left_out() -> None:
    shown = Shown()
    shown.feed(0, f"{SIMPLE}rank 0 says goodbye\n", 0.0)
    shown.feed(1, f"{SIMPLE}rank 1 says goodbye\n", 0.0)
    shown.feed(2, SIMPLE.replace("data", "more data"), 0.0)
    shown.tick(1.0)
    assert shown.pieces == [
        (0, f"{SIMPLE}rank 0 says goodbye\n"),
        (1, "rank 1 says goodbye\n"),
        (2, SIMPLE.replace("data", "more data")),
    ]
    shown.tick(20.0, over=True)
    assert shown.same == [([1], "ValueError: no data")]


def test_a_rank_that_raises_the_same_again_is_shown_again() -> None:
    shown = Shown()
    for now in (0.0, 1.0, 2.0):
        shown.feed(0, SIMPLE, now)
        shown.tick(now + QUIET)
    assert shown.pieces == [(0, SIMPLE)] * 3
    shown.feed(1, SIMPLE, 3.0 + MEMORY)
    shown.tick(20.0, over=True)
    assert shown.tracebacks.shown_with(1) == 1
    assert shown.pieces[3:] == [(1, SIMPLE)], "by now, the first one is out of sight"
    assert shown.same == []


def test_two_tracebacks_of_one_rank_are_two() -> None:
    shown = Shown()
    shown.feed(0, SIMPLE + SIMPLE, 0.0)
    assert shown.pieces == [(0, SIMPLE)]
    shown.tick(QUIET)
    assert shown.pieces == [(0, SIMPLE)] * 2


def test_one_that_does_not_end_is_shown_after_a_moment_all_the_same() -> None:
    shown = Shown()
    begin = "".join(SIMPLE.splitlines(keepends=True)[:2])
    for rank in range(2):
        shown.feed(rank, begin, 0.0)
    assert shown.tracebacks.next == LONGEST
    shown.tick(LONGEST)
    assert shown.pieces == [(0, begin), (1, begin)], "it is not known yet whether they are the same"


def test_output_without_an_end_is_not_held_back() -> None:
    shown = Shown()
    shown.feed(0, SIMPLE, 0.0)
    for number in range(100):
        shown.feed(0, f"step {number}\n", 0.05 * number)
        shown.tick(0.05 * number)
        held = 1 + number - sum(text.count("step") for _, text in shown.pieces)
        assert held <= LONGEST / 0.05 + 1
    shown.feed(0, SIMPLE + "x\n" * 100_000, 10.0)
    assert sum(text.count("x\n") for _, text in shown.pieces) > 90_000


def test_what_torch_distributed_writes_before_each_line_makes_no_difference() -> None:
    """Its excepthook does so once a process group has been made, and leaves empty lines as they are."""
    shown = Shown()
    for rank in range(3):
        text = "".join(f"[rank{rank}]: {line}" if line.strip() else line for line in CHAINED.splitlines(keepends=True))
        shown.feed(rank, text, 0.0)
    shown.tick(QUIET)
    shown.tick(QUIET + GATHER)
    assert shown.pieces == [(0, CHAINED)]
    assert shown.same == [([1, 2], "RuntimeError: that is worse")]


def test_such_a_prefix_elsewhere_is_left_alone() -> None:
    shown = Shown()
    shown.feed(0, "[rank0]: hello\n", 0.0)
    assert shown.pieces == [(0, "[rank0]: hello\n")]
