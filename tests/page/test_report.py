"""The report in Chromium, opened as a file: it draws the job, without a server and without a complaint."""

from __future__ import annotations

from pathlib import Path

from hvdgloo._observe.page import report
from tests.page.support import Chromium, axe, stays, until, words
from tests.support.observed import SimulatedJob


def opened(browser: Chromium, folder: Path, job: SimulatedJob) -> None:
    """Writes the report and opens it; it is drawn when this returns."""
    page, _ = report.write(job.observatory, str(folder / "report.html"))
    browser.driver.get(Path(page).as_uri())
    until(lambda: browser.run("return performance.getEntriesByName('drawn').length > 0"), "the report is drawn")


def failed(**settings: object) -> SimulatedJob:
    job = SimulatedJob(**settings)  # type: ignore[arg-type]
    job.advance(60)
    job.lose(2)
    job.advance(2)
    job.observatory.ended(137, "rank 2 (h2) was killed by SIGKILL")
    return job


def test_it_shows_the_job_with_its_charts_without_a_server(browser: Chromium, tmp_path: Path) -> None:
    opened(browser, tmp_path, failed())

    assert browser.text("#command") == "hvdgloo-run -np 4 python train.py"
    assert browser.text("#connection") == "report"
    assert "rank 2 (h2) was killed by SIGKILL" in browser.text("#events")
    assert "Rank 3 on h2" in words(browser.texts("#straggler-list .who"))
    assert browser.shown("#plots canvas") > 0
    assert browser.shown("#trace") == 0
    assert "step 1" in words(browser.texts("#lines"))
    assert "2.13.0" in browser.text("#versions")
    assert axe(browser) == []


def test_hostile_names_run_nothing(browser: Chromium, tmp_path: Path) -> None:
    opened(browser, tmp_path, failed(ranks=6, hosts=3, evil=True))

    assert "<script>alert(1)</script>" in browser.text("#ranks")
    assert browser.run("return document.querySelectorAll('img, svg[onload]').length") == 0


def test_a_job_of_a_second_says_so_instead_of_showing_empty_charts(browser: Chromium, tmp_path: Path) -> None:
    job = SimulatedJob()
    job.advance(1, tick=False)
    job.finish()
    opened(browser, tmp_path, job)
    assert words([browser.text("#too-short")]) == "Too short for charts: 9 steps in 1.03 s."
    assert browser.shown("#too-short") == 1
    assert browser.shown("#plots") == browser.shown("#spans") == 0
    assert axe(browser) == []


def test_steps_of_a_second_after_a_long_start_are_told_where_their_charts_would_be(
    browser: Chromium, tmp_path: Path
) -> None:
    job = SimulatedJob()
    train, job._train = job._train, lambda: None  # type: ignore[method-assign]
    job.advance(8)
    job._train = train  # type: ignore[method-assign]
    job.advance(1)
    job.finish()
    opened(browser, tmp_path, job)
    assert browser.shown("#plots") == 1
    assert browser.shown("#too-short") == 0
    shown = browser.run("return [...document.querySelectorAll('#plots .nothing')].map((e) => e.checkVisibility())")
    assert shown == [True, True, False, False, False]
    assert words(browser.texts("#plots .nothing")[:1]) == "Too short for charts: 9 steps in 1.03 s."


def test_what_failed_stands_first(browser: Chromium, tmp_path: Path) -> None:
    job = SimulatedJob()
    job.advance(10)
    what = "the job failed: rank 2 on host h2 exited with status 1: ValueError: no <b>more</b> data"
    job.lose(2, "exited with status 1")
    job.observatory.ended(1, what)
    opened(browser, tmp_path, job)
    assert browser.text("#verdict") == what.replace("the", "The", 1)
    assert browser.text("#state") == "Failed, exit code 1"
    data = (tmp_path / "report.json").read_text()
    assert data.index(what) < 300, "in its first lines"


IN_SIGHT = """
    const list = document.querySelector("#lines").getBoundingClientRect();
    const row = [...document.querySelectorAll(".line")].find((row) => row.textContent.includes(arguments[0]));
    if (!row) return false;
    const { top, bottom } = row.getBoundingClientRect();
    return top >= list.top && bottom <= list.bottom;
"""
LONG = "a line that is as long as what programs print, and longer than a window is wide " * 6


def test_it_opens_the_output_where_the_job_failed(browser: Chromium, tmp_path: Path) -> None:
    """Whatever other ranks have printed since, and however many rows a line takes."""
    job = SimulatedJob()
    job.advance(10)
    for n in range(200):
        job.observatory.output(n % 4, 1, f"step {n}: {LONG}\n".encode())
    job.observatory.output(2, 2, b"Traceback (most recent call last):\nValueError: no more data\n")
    for n in range(600):
        job.observatory.output((0, 1, 3)[n % 3], 2, f"echo {n}: {LONG}\n".encode())
    job.observatory.ended(1, "the job failed: rank 2 on host h2 exited with status 1: ValueError: no more data")
    opened(browser, tmp_path, job)
    browser.run("document.querySelector('#output').scrollIntoView({block: 'center'})")

    until(lambda: stays(browser, IN_SIGHT, "ValueError: no more data"), "the error is in sight")
    browser.run("document.querySelector('#lines').dispatchEvent(new WheelEvent('wheel'))")
    browser.run("document.querySelector('#lines').scrollTop = 0")
    assert stays(browser, "return document.querySelector('#lines').scrollTop === 0"), "who reads elsewhere stays there"


def test_it_opens_the_output_of_another_job_at_its_end(browser: Chromium, tmp_path: Path) -> None:
    job = SimulatedJob()
    job.advance(10)
    for n in range(300):
        job.observatory.output(n % 4, 1, f"step {n}: {LONG}\n".encode())
    job.finish()
    opened(browser, tmp_path, job)
    browser.run("document.querySelector('#output').scrollIntoView({block: 'center'})")
    until(lambda: stays(browser, IN_SIGHT, "step 299"), "the last line is in sight")
