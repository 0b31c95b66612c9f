"""The screen of ``hvdgloo-run top``: everything that matters fits the terminal, and nothing of it can do harm there."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from hvdgloo._observe.top.content import order, tail
from hvdgloo._observe.top.screen import ENDLESS, Screen
from hvdgloo._observe.view import Snapshot
from hvdgloo._observe.words import duration, measured, number, share, size
from tests.support.observed import SimulatedJob


def shown(
    snapshot: Snapshot,
    *,
    width: int = 120,
    height: int = 40,
    whole: bool = False,
    first: int = 0,
    encoding: str = "utf-8",
) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=file, width=width, height=height, color_system=None)
    console.print(Screen(snapshot, whole=whole, first=first), end="")
    file.seek(0)
    return file.read().splitlines()


def simulated(**options: object) -> SimulatedJob:
    job = SimulatedJob(**options)  # type: ignore[arg-type]
    job.advance(20 if job.size < 100 else 5)
    return job


def test_a_plane_shows_that_tensors_crossed_in_fewer_bytes() -> None:
    snapshot = simulated(ranks=4).observatory.snapshot()
    snapshot.planes[0].crossed = "between hosts: 26 MB a step instead of 102 MB (int8), error 0.91 %"
    assert any("/s, between hosts: 26 MB a step instead of" in line for line in shown(snapshot))


def test_outer_steps_have_a_line() -> None:
    snapshot = simulated(ranks=4).observatory.snapshot()
    lines = len(shown(snapshot))
    snapshot.job.outer = "an outer step every 8 steps, 102 MB each, the last 2.1 s ago, 3 % of the time"
    assert snapshot.job.outer in shown(snapshot)
    assert len(shown(snapshot)) == lines + 1


def test_the_job_in_one_look() -> None:
    lines = shown(simulated(ranks=4, slow=3).observatory.snapshot())
    text = "\n".join(lines)
    assert lines[0] == "running 20 s  hvdgloo-run -np 4 python train.py"
    assert re.match(r"4 ranks on 2 hosts  step \d+  [\d.]+ steps/s  \d+ MB/s", lines[1])
    assert re.search(r"\d+ % computing  \d+ % waiting  \d+ % communicating", lines[2])
    assert "gloo (cpu): hosts h1 and h2" in text
    assert re.search(r"^h2 +■■  stolen 12 %", text, re.MULTILINE)
    assert re.search(r"Rank 3 \(h2\) was last in \d+ % of the last", text)


def test_progress_and_numbers_that_the_program_logs_have_lines_of_their_own() -> None:
    lines = shown(simulated(ranks=4, slow=None, logs=True).observatory.snapshot())
    assert re.fullmatch(r"\d+ %  epoch \d of 10  step \d+ of 100  about .* left", lines[3])
    assert re.fullmatch(r"loss [\d.]+  val_accuracy 0\.\d{1,4}", lines[4])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.98765, "0.9877"), (12345.678, "12,345.7"), (123456, "123,456"), (1.2346e-5, "0.00001235"),
        (1.2346e-9, "1.235e-9"), (-2.5, "-2.5"), (1e20, "1.000e+20"), (None, "not finite"),
    ],
)  # fmt: skip
def test_numbers_of_any_scale_are_written_for_people(value: float | None, text: str) -> None:
    assert measured(value) == text


def test_a_straggler_is_named_once() -> None:
    job = SimulatedJob(ranks=4, slow=3)
    job.advance(60)
    job.observatory.event("warning", "it is hot")
    job.advance(1)
    snapshot = job.observatory.snapshot()
    assert [event.kind for event in snapshot.events] == ["straggler", "warning"]
    text = "\n".join(shown(snapshot))
    assert text.count("Rank 3 (h2) was last in") == 1
    assert "it is hot" in text


def test_ranks_that_need_attention_come_first() -> None:
    job = simulated(ranks=8, slow=3)
    job.lose(5)
    job.advance(2)
    snapshot = job.observatory.snapshot()
    places = order(snapshot.ranks, [straggler.rank for straggler in snapshot.stragglers])
    assert [snapshot.ranks.rank[n] for n in places] == [5, 3, 0, 1, 2, 4, 6, 7]
    table = [line for line in shown(snapshot) if re.match(r" *\d+  h\d", line)]
    assert re.match(r" *5  h2 +failed .* was killed by SIG", table[0])


@pytest.mark.parametrize("ranks", [1, 64, 1024])
def test_it_fits_the_terminal(ranks: int) -> None:
    snapshot = simulated(ranks=ranks, hosts=max(1, ranks // 8), slow=0).observatory.snapshot()
    for width, height in ((80, 24), (40, 10), (200, 60), (20, 3)):
        lines = shown(snapshot, width=width, height=height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert height < 24 or any(line.startswith("rank") for line in lines)


def test_a_terminal_of_80_columns_has_room_for_what_matters() -> None:
    job = SimulatedJob(ranks=1024, hosts=128, slow=3)
    job.advance(3)
    job.lose(1)
    job.advance(2)
    text = "\n".join(shown(job.observatory.snapshot(), width=80, height=30))
    assert re.search(r"^h1 +[■□]✗[■□]{6}  ", text, re.MULTILINE)
    assert re.search(r"^and 1\d\d hosts more$", text, re.MULTILINE)
    assert re.search(r"^ *1  h1 +failed .* was killed", text, re.MULTILINE)


def test_the_table_scrolls() -> None:
    snapshot = simulated(ranks=64, hosts=8, slow=None).observatory.snapshot()

    def ranks(first: int) -> list[int]:
        return [int(line.split()[0]) for line in shown(snapshot, first=first) if re.match(r" *\d+  h\d", line)]

    assert ranks(0)[0] == 0
    assert ranks(10)[0] == 10
    assert ranks(63) == [63]


def test_all_of_it_where_there_is_no_screen() -> None:
    lines = shown(simulated(ranks=64, hosts=8).observatory.snapshot(), whole=True)
    assert sum(bool(re.match(r" *\d+  h\d", line)) for line in lines) == 64


def test_failures_that_followed_from_another_rank_s_are_not_red() -> None:
    job = simulated(ranks=4, slow=None)
    job.lose(2, "exited with status 1")
    job.lose(0, "exited with status 1")
    job.observatory.ended(1, "rank 2 exited with status 1", causes=[2])
    job.advance()
    red = [line.text[10:] for line in tail(job.observatory.snapshot()) if line.parts[0].style == "red"]
    assert red == ["rank 2 (h2) exited with status 1"]


def test_names_cannot_move_the_cursor() -> None:
    job = simulated(ranks=8, hosts=8, evil=True)
    job.lose(1, "killed\x1b[2J\r\nby \x9b31m [bold]me[/bold]")
    job.advance()
    text = "\n".join(shown(job.observatory.snapshot(), whole=True))
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "killed\\x1b[2J" in text
    assert "[bold]me[/bold]" in text


def test_an_ascii_terminal_has_ascii_marks() -> None:
    lines = shown(simulated(ranks=4, cause="").observatory.snapshot(), encoding="ascii")
    assert any(re.match(r"h1 +##", line) for line in lines)


def test_a_job_that_has_just_begun() -> None:
    assert shown(Snapshot())[0].startswith("starting")


def test_a_job_that_counts_no_steps() -> None:
    snapshot = simulated(ranks=2, slow=None).observatory.snapshot()
    snapshot.ranks.steps[:] = [0, 0]
    text = "\n".join(shown(snapshot))
    assert re.search(r"2 ranks on 2 hosts  \d+ operations  ", text)
    assert re.search(r"^rank  host  state +operations  bytes/s", text, re.MULTILINE)


@pytest.mark.parametrize(("most", "text"), [(None, "elastic: 2 or more; epoch 3"), (8, "elastic: 2 to 8; epoch 3")])
def test_an_elastic_job(most: int | None, text: str) -> None:
    snapshot = simulated(ranks=4).observatory.snapshot()
    snapshot.job.least, snapshot.job.most, snapshot.job.epoch = 2, most, 3
    assert f"4 ranks on 2 hosts ({text})" in shown(snapshot)[1]


def test_a_host_that_is_lost_says_so() -> None:
    job = simulated(ranks=4)
    job.observatory.host("h2", "lost")
    job.observatory.tick()
    assert any(re.fullmatch(r"h2 +✗✗ +lost *", line) for line in shown(job.observatory.snapshot()))


def test_a_job_that_has_failed() -> None:
    job = simulated(ranks=2, slow=None)
    job.observatory.ended(137, "rank 1 was killed\nby SIGKILL")
    lines = shown(job.observatory.snapshot())
    assert lines[0].startswith("failed")
    assert "rank 1 was killed\\nby SIGKILL" in lines


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (100.4, "100"),
        (1234.5, "1,234"),
        (20, "20"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1e6, "1 MB"), (3.4567e9, "3.46 GB"), (1e18, "1,000 PB")],
)
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.2e-4, "120 µs"),
        (0.014, "14 ms"),
        (0.9996, "1 s"),
        (3.21, "3.21 s"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (3659.9, "1 h 1 min"),
        (12000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
        (86_400 + 30, "1 d"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text


def test_shares() -> None:
    assert [share(part) for part in (0, 0.1249, 1)] == ["0 %", "12 %", "100 %"]


def test_nothing_is_shortened_where_there_is_no_terminal() -> None:
    job = simulated(ranks=4, slow=3)
    job.lose(1)
    job.advance(2)
    snapshot = job.observatory.snapshot()
    snapshot.hosts[0].name = "a-node-" + "1" * 60
    snapshot.job.command = "train.py " + "--flag " * 100
    file = io.StringIO()
    Console(file=file, width=ENDLESS, color_system=None).print(Screen(snapshot, whole=True, endless=True), end="")
    text = file.getvalue()
    assert "\u2026" not in text
    assert snapshot.job.command.strip() in text
    assert snapshot.ranks.detail[1] in text
    assert text.count(snapshot.hosts[0].name) >= 3
    assert max(map(len, text.splitlines())) < 1000  # and nothing is padded to the console's width
