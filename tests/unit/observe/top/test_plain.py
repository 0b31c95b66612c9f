"""The screen of ``hvdgloo-run top`` without rich: the same content, within the terminal, and harmless there."""

from __future__ import annotations

import re

import pytest

from hvdgloo._observe.top.plain import lines
from tests.support.observed import SimulatedJob


def simulated(**options: object) -> SimulatedJob:
    job = SimulatedJob(**options)  # type: ignore[arg-type]
    job.advance(5)
    return job


@pytest.mark.parametrize("ranks", [1, 64, 1024])
def test_it_fits_the_terminal(ranks: int) -> None:
    snapshot = simulated(ranks=ranks, hosts=max(1, ranks // 8), slow=0).observatory.snapshot()
    for width, height in ((80, 24), (40, 10), (200, 60), (20, 3)):
        shown = lines(snapshot, width=width, height=height)
        assert len(shown) <= height
        assert max(map(len, shown)) <= width
        assert height < 24 or any(line.startswith("rank") for line in shown)


def test_the_table_scrolls_and_columns_stand_below_their_headings() -> None:
    snapshot = simulated(ranks=64, hosts=8, slow=None).observatory.snapshot()
    shown = lines(snapshot, width=120, height=40, first=10)
    heading = next(line for line in shown if line.startswith("rank  host  state"))
    table = [line for line in shown if re.match(r" *\d+  h\d", line)]
    assert table[0].split()[:2] == ["10", "h2"]
    end = heading.index("computing") + len("computing")
    assert all(line[:end].endswith(" %") for line in table)


def test_everything_is_shown_where_there_is_no_terminal() -> None:
    shown = lines(simulated(ranks=64, hosts=8).observatory.snapshot())
    assert sum(bool(re.match(r" *\d+  h\d", line)) for line in shown) == 64
    assert not any("more" in line for line in shown)


def test_names_cannot_move_the_cursor() -> None:
    job = simulated(ranks=8, hosts=8, evil=True)
    job.lose(1, "killed\x1b[2J\r\nby \x9b31m")
    job.advance()
    text = "".join(lines(job.observatory.snapshot()))
    assert text.isprintable()
    assert "killed\\x1b[2J" in text


def test_an_ascii_terminal_has_ascii_marks() -> None:
    shown = lines(simulated(ranks=4, cause="").observatory.snapshot(), encoding="ascii")
    assert any(re.match(r"h1 +##", line) for line in shown)
