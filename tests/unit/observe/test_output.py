"""Conversion of the ranks' output to lines, of which the last ones are kept."""

from __future__ import annotations

import pytest

from hvdgloo._observe import output
from hvdgloo._observe.output import Output


def texts(of: Output, **wanted: object) -> list[str]:
    return [line.text for line in of.lines(**wanted)]  # type: ignore[arg-type]


def test_pieces_become_lines_numbered_over_all_ranks() -> None:
    written = Output()
    written.write(0, 1, b"epo", 1.0)
    written.write(1, 2, b"warning\n", 2.0)
    written.write(0, 1, b"ch 1\nepoch 2\nep", 3.0)

    assert [(line.number, line.at, line.rank, line.stream, line.text) for line in written.lines()] == [
        (1, 2.0, 1, 2, "warning"),
        (2, 3.0, 0, 1, "epoch 1"),
        (3, 3.0, 0, 1, "epoch 2"),
    ]
    assert written.number == 3


def test_the_last_words_of_a_process_are_a_line_even_without_an_end() -> None:
    written = Output()
    written.write(0, 1, b"Segmentation fau", 1.0)
    written.write(1, 2, b"Killed", 1.0)
    assert texts(written) == []

    written.finish(0, 2.0)
    assert texts(written) == ["Segmentation fau"]
    written.finish_all(3.0)
    assert texts(written) == ["Segmentation fau", "Killed"]
    written.finish_all(4.0)
    assert written.number == 2


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" 10%\r 50%\r100%\r\n", "100%"),
        (b"one\r\n", "one"),
        (b"\x1b[1;31mred\x1b[0m and \x1b]0;title\x07plain\n", "red and plain"),
        (b"\xff\xfebytes\n", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}bytes"),
        (b"<script>alert(1)</script>\n", "<script>alert(1)</script>"),
        (b"x" * 5000 + b"\n", "x" * 4096),
        (b"\n", ""),
    ],
    ids=["progress bar", "CR LF", "colours", "no UTF-8", "markup stays text", "long", "empty"],
)
def test_a_line_is_what_a_terminal_shows_of_it(data: bytes, shown: str) -> None:
    written = Output()
    written.write(0, 1, data, 1.0)

    assert texts(written) == [shown]


def test_a_character_whose_bytes_come_in_two_pieces_is_one() -> None:
    written = Output()
    written.write(0, 1, "Grüße\n".encode()[:3], 1.0)
    written.write(0, 1, "Grüße\n".encode()[3:], 1.0)

    assert texts(written) == ["Grüße"]


def test_a_progress_bar_that_never_ends_its_line_takes_no_memory() -> None:
    written = Output()
    for percent in range(20_000):
        written.write(0, 1, f"\r{percent:6d} of 20000 |####      |".encode(), 1.0)
    assert len(written._streams[0, 1]._part) <= output._LONGEST_PART

    written.write(0, 1, b"\n", 2.0)
    assert texts(written) == [" 19999 of 20000 |####      |"]


def test_a_line_that_never_ends_takes_no_memory() -> None:
    written = Output()
    for _ in range(1000):
        written.write(0, 1, b"x" * 1000, 1.0)
    assert len(written._streams[0, 1]._part) <= output._LONGEST_PART

    written.finish(0, 1.0)
    assert texts(written) == ["x" * 4096]


def lined(ranks: int, lines: int) -> Output:
    written = Output()
    for number in range(lines):
        written.write(number % ranks, 1, f"Step {number}\n".encode(), float(number))
    return written


def test_the_newest_lines_come_first_to_mind_and_others_when_asked_for() -> None:
    written = lined(ranks=3, lines=30)

    assert [line.number for line in written.lines(limit=4)] == [27, 28, 29, 30]
    assert [line.number for line in written.lines(before=27, limit=3)] == [24, 25, 26]
    assert [line.number for line in written.lines(after=5, limit=3)] == [6, 7, 8]
    assert [line.number for line in written.lines(after=5, before=8)] == [6, 7]
    assert [line.number for line in written.lines(rank=1, limit=2)] == [26, 29]
    assert written.lines(rank=77) == []
    assert written.lines(after=30) == []


def test_search_ignores_case_and_takes_characters_as_they_are() -> None:
    written = lined(ranks=3, lines=30)
    written.write(0, 1, b"a.b [c] STRASSE\n", 1.0)

    assert texts(written, search="step 7") == ["Step 7"]
    assert texts(written, search="[C]") == ["a.b [c] STRASSE"]
    assert texts(written, search="stra\N{LATIN SMALL LETTER SHARP S}e") == ["a.b [c] STRASSE"]
    assert texts(written, search="a.*c") == []
    assert texts(written, search="step 1", rank=1) == ["Step 1", "Step 10", "Step 13", "Step 16", "Step 19"]


def test_one_rank_that_writes_much_does_not_push_out_what_others_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LINES", 1000)
    written = Output()
    written.write(1, 1, b"the only line of rank 1\n", 0.0)
    for number in range(5000):
        written.write(0, 1, f"{number}\n".encode(), 1.0)

    assert texts(written, rank=1) == ["the only line of rank 1"]
    assert len(written.lines(rank=0, limit=10_000)) == 500


def test_a_thousand_ranks_with_long_lines_stay_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LEAST_LINES", 5)
    monkeypatch.setattr(output, "_LINES", 5120)
    monkeypatch.setattr(output, "_CHARACTERS", 2**20)
    monkeypatch.setattr(output, "_LEAST_CHARACTERS", 1024)
    written = Output()
    for _ in range(20):
        for rank in range(1024):
            written.write(rank, 1, b"y" * 300 + b"\n", 1.0)

    kept = written.lines(limit=10**9)
    assert {line.rank for line in kept} == set(range(1024))
    assert sum(len(line.text) for line in kept) <= 2**20
