"""The report in Chromium, opened as a file: it draws the job, without a server and without a complaint."""

from __future__ import annotations

from pathlib import Path

from hvdgloo.rendezvous._page import report
from tests.page.support import Chromium, axe, until, words
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
