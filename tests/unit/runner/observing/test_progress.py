"""The line that says how far a job is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hvdgloo._observe.view import Job, Progress, Snapshot, Straggler, Update
from hvdgloo.runner.console.console import Window
from hvdgloo.runner.console.progress import Backoff
from hvdgloo.runner.console.startup_view import SHOW_AFTER, LiveDisplay
from hvdgloo.runner.observing.progress import RunProgress

SLOW = Straggler(3, "h2", 0.92, 1000, "steps", 0.0142, [], "rank 3 (h2) was last")


class News:
    """One reader's news."""

    def __init__(self, *news: Snapshot | Update, waits: dict[int, str] | None = None) -> None:
        self.coming = list(news)
        self.waits = waits or {}

    def next(self, timeout: float = 0.0) -> Snapshot | Update | None:
        return self.coming.pop(0) if self.coming else None

    def waiting(self, least: float) -> dict[int, str]:
        return self.waits


def shown(news: News | None, elapsed: float = 125.0, width: int = 120) -> list[str]:
    progress = RunProgress(lambda: news, now=0.0)
    assert not progress.over(elapsed)
    return progress.screen(elapsed, width, 5, colour=True)


def test_it_says_how_many_ranks_how_fast_who_is_slowest_and_for_how_long() -> None:
    job = Job(size=4, steps=1204, steps_per_second=37.24)
    line = "4 ranks, 1,204 steps, 37.2 steps/s, slowest: rank 3 (h2), 14.2 ms in each step, 2 min 5 s"
    assert shown(News(Snapshot(job=job, stragglers=[SLOW]))) == [line]


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job(size=1, steps=1), "1 rank, 1 step, 9.0 s"),
        (Job(size=2, steps=5, steps_per_second=123.4), "2 ranks, 5 steps, 123 steps/s, 9.0 s"),
        (Job(size=2, bytes_per_second=2_500_000.0), "2 ranks, 2.5 MB/s, 9.0 s"),
        (Job(size=2, bytes_per_second=999.0), "2 ranks, 999 B/s, 9.0 s"),
        (
            Job(size=2, steps=77, steps_per_second=5.0, progress=Progress(17, 50, 2, 10, 0.236, 305.2)),
            "2 ranks, 23 %, epoch 3 of 10, step 18 of 50, about 5 min 5 s left, 5 steps/s, 9.0 s",
        ),
        (Job(size=2, bytes_per_second=999.0, progress=Progress(epoch=0)), "2 ranks, epoch 1, 999 B/s, 9.0 s"),
        (Job(size=2, steps=7, progress=Progress(steps=500, share=0.0)), "2 ranks, 7 steps, 9.0 s"),
        (Job(size=2, progress=Progress(epochs=10)), ""),
    ],
)
def test_it_has_what_is_known(job: Job, text: str) -> None:
    assert shown(News(Snapshot(job=job)), elapsed=9.0) == ([text] if text else [])


@pytest.mark.parametrize("news", [None, News(), News(Snapshot(job=Job(size=4)))], ids=["no news", "nothing", "idle"])
def test_a_program_that_does_not_use_hvdgloo_has_no_line(news: News | None) -> None:
    assert shown(news) == []


@pytest.mark.parametrize(
    ("waits", "text"),
    [
        ({0: "val_loss", 1: "next"}, "rank 0 waits for val_loss, rank 1 for next"),
        ({0: "loss", 1: "", 2: "loss"}, "ranks 0 and 2 wait for loss, rank 1 for nothing"),
        (dict.fromkeys(range(5), "a") | {5: ""}, "5 ranks wait for a, rank 5 for nothing"),
        ({rank: f"op{rank}" for rank in range(6)},
         "rank 0 waits for op0, rank 1 for op1, rank 2 for op2, and others for 3 more"),
        ({0: "x" * 300, 1: "y"}, f"rank 0 waits for {'x' * 40}, rank 1 for y"),
    ],
)  # fmt: skip
def test_a_job_that_hangs_says_which_rank_waits_for_which_operation(waits: dict[int, str], text: str) -> None:
    news = News(Snapshot(job=Job(size=len(waits), steps=120, steps_per_second=0.1), stragglers=[SLOW]), waits=waits)
    assert shown(news, elapsed=9.0, width=300) == [f"{len(waits)} ranks, 120 steps: {text}, 9.0 s"]


def test_a_job_that_hangs_says_how_far_the_program_was() -> None:
    job = Job(size=2, steps=120, progress=Progress(19, 100, 1, 3, 0.4, 60.0))
    line = "2 ranks, 40 %, epoch 2 of 3, step 20 of 100: rank 0 waits for a, rank 1 for b, 9.0 s"
    assert shown(News(Snapshot(job=job), waits={0: "a", 1: "b"}), elapsed=9.0) == [line]


def test_a_job_that_hangs_before_its_first_step_has_a_line() -> None:
    waits = {0: "val_loss", 1: "next"}
    assert shown(News(Snapshot(job=Job(size=2)), waits=waits), elapsed=9.0) == [
        "2 ranks: rank 0 waits for val_loss, rank 1 for next, 9.0 s"
    ]


def test_it_follows_what_changes() -> None:
    news = News(Snapshot(job=Job(size=4, steps=10), stragglers=[SLOW]))
    progress = RunProgress(lambda: news, now=0.0)
    progress.screen(3.0, 120, 5, colour=False)
    news.coming += [Update(job=Job(size=4, steps=20)), Update(job=Job(size=3, steps=30))]
    assert "slowest: rank 3" in progress.screen(4.0, 120, 5, colour=False)[0], "an update without is no change"
    news.coming.append(Update(job=Job(size=3, steps=40), stragglers=[]))
    assert progress.screen(5.0, 120, 5, colour=False) == ["3 ranks, 40 steps, 5.0 s"]


def test_it_fits_into_the_window_whatever_a_host_is_called() -> None:
    evil = Straggler(3, "h2\x1b[2J\n界", 0.9, 10, "operations", 1.0, [], "")
    (line,) = shown(News(Snapshot(job=Job(size=4, steps=1), stragglers=[evil])), width=60)
    assert len(line) < 60
    assert line.isprintable()
    assert line.startswith("4 ranks, 1 step, slowest: rank 3 (h2?[2J??), 1 s")


class Surface:
    """A console with a terminal, or without."""

    def __init__(self, window: Window | None) -> None:
        self._window = window
        self.drawn: list[Any] = []
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def window(self) -> Window | None:
        return self._window

    def below(self, lines: Any) -> None:
        self.drawn.append(list(lines))

    def wait_until_written(self, timeout: float) -> None: ...


@pytest.mark.parametrize("terminal", [True, False])
def test_it_is_for_terminals_only_and_goes_away(terminal: bool) -> None:
    now = 0.0
    surface = Surface(Window(100, 30) if terminal else None)
    news = News(Snapshot(job=Job(size=2, steps=7)))
    display = LiveDisplay(
        RunProgress(lambda: news, now=0.0),
        surface,
        Backoff(0.0, math.inf),
        environ={"TERM": "xterm"},
        clock=lambda: now,
    )
    for now in (0.1, SHOW_AFTER, 1e6):  # noqa: B007 - the display's clock
        display.tick()
    display.close()
    assert surface.notices == []
    if terminal:
        assert surface.drawn[0] == ["2 ranks, 7 steps, 2.0 s"]
        assert surface.drawn[-1] == []
    else:
        assert surface.drawn == []
