"""A job as a file: one page that needs nothing else, and the same as JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hvdgloo._observe import view
from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.page import report
from hvdgloo._observe.page.files import files
from tests.support.observed import EVIL, SimulatedJob


class Elements(HTMLParser):
    """All elements as a browser would see them: (tag, attributes), and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", {}))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style", "title"):
            self.texts.append((*self.found[-1], data))


def written(folder: Path, job: SimulatedJob | Observatory) -> tuple[str, Any]:
    observatory = job if isinstance(job, Observatory) else job.observatory
    page, data = report.write(observatory, str(folder / "report.html"))
    return Path(page).read_text(encoding="utf-8"), json.loads(Path(data).read_text(encoding="utf-8"))


def recording(page: str) -> Any:
    """Return the data that the page's scripts find in it."""
    ((_, _, text),) = [each for each in Elements(page).texts if each[1].get("id") == "recording"]
    return json.loads(text)


def finished(**settings: Any) -> SimulatedJob:
    job = SimulatedJob(**settings)
    job.advance(60)
    return job


def test_it_has_all_that_was_seen(tmp_path: Path) -> None:
    job = finished()
    job.observatory.ended(0)
    page, data = written(tmp_path, job)

    assert recording(page) == data
    assert data["snapshot"] == json.loads(view.encode(job.observatory.snapshot()))
    assert data["snapshot"]["job"]["state"] == "ended"
    assert data["snapshot"]["stragglers"][0]["rank"] == 3
    assert data["snapshot"]["settings"]["params.fusion_threshold_mb"] == 32
    assert data["snapshot"]["job"]["versions"]["torch"] == "2.13.0"
    assert set(data["series"]) == {"0", "1", "2", "3"}
    assert data["series"]["3"] == json.loads(view.encode(job.observatory.series(3)))
    assert [line["number"] for line in data["lines"]] == list(range(1, 241))


def test_after_a_failure_it_says_what_failed(tmp_path: Path) -> None:
    job = finished()
    job.lose(2)
    job.advance(2)
    job.observatory.ended(137, "rank 2 (h2) was killed by SIGKILL")
    _, data = written(tmp_path, job)
    snapshot = data["snapshot"]

    assert (snapshot["job"]["state"], snapshot["job"]["exit_code"]) == ("failed", 137)
    assert snapshot["job"]["message"] == "rank 2 (h2) was killed by SIGKILL"
    assert view.STATES[snapshot["ranks"]["state"][2]] == "failed"
    assert [event["rank"] for event in snapshot["events"] if event["kind"] == "failure"] == [2]
    assert snapshot["stragglers"][0]["rank"] == 3


def test_a_job_that_never_began_has_one_too(tmp_path: Path) -> None:
    observatory = Observatory(job="j", command="hvdgloo-run", started=1.0, versions={})
    observatory.ended(1, "host h2 cannot be reached")
    page, data = written(tmp_path, observatory)

    assert data["snapshot"]["job"]["message"] == "host h2 cannot be reached"
    assert (data["lines"], data["series"]) == ([], {})
    assert recording(page) == data


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    page, _ = written(tmp_path, finished())
    elements = Elements(page).found

    links = [value for _, attributes in elements for name, value in attributes.items() if name in ("src", "href")]
    assert [link for link in links if link is None or not link.startswith(("data:", "#"))] == []
    assert "static/" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "@import" not in page
    assert "url(" not in "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL)).replace("url(data:", "")


def test_every_script_and_style_of_the_page_is_in_it_in_order_and_may_run(tmp_path: Path) -> None:
    page, _ = written(tmp_path, finished())
    index = files()["index.html"].data.decode()
    elements = Elements(page)
    (policy,) = [attributes["content"] or "" for tag, attributes in elements.found if "http-equiv" in attributes]

    scripts = [text for tag, attributes, text in elements.texts if tag == "script" and not attributes]
    names = re.findall(r'<script src="static/([^"]+)"', index)
    assert len(names) > 5
    assert scripts == [files()[name].data.decode() for name in names]
    styles = [text for tag, _, text in elements.texts if tag == "style"]
    assert styles == [files()[name].data.decode() for name in re.findall(r'"stylesheet" href="static/([^"]+)"', index)]
    for text in scripts + styles:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    # What they look for in the document stands before them, and the policy before all of it.
    assert page.index('id="recording"') < page.index("<script>")
    assert page.index("</main>") < page.index("<script>")
    assert page.index("Content-Security-Policy") < page.index("<style>")


@pytest.mark.parametrize("name", sorted(name for name in files() if name.endswith((".js", ".css"))))
def test_no_script_or_style_would_end_its_element(name: str) -> None:
    text = files()[name].data.decode().lower()

    assert "</script" not in text
    assert "</style" not in text
    assert "<!--" not in text


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    job = finished(ranks=6, hosts=3, evil=True)
    job.stall(1, stack="</script><script>alert(1)</script><!--")
    job.advance(15)
    job.observatory.ended(1, "</script><img src=x onerror=alert(1)>")
    page, data = written(tmp_path, job)
    tags = [tag for tag, _ in Elements(page).found]
    harmless = Elements(written(tmp_path, finished())[0]).found

    assert tags == [tag for tag, _ in harmless]
    assert recording(page) == data
    assert data["snapshot"]["hosts"][0]["name"] == f"{EVIL[0]}0"
    assert data["snapshot"]["job"]["message"] == "</script><img src=x onerror=alert(1)>"
    ((_, _, title),) = [each for each in Elements(page).texts if each[0] == "title"]
    assert EVIL[0] in title


def test_of_a_large_job_it_keeps_the_curves_of_those_that_matter(tmp_path: Path) -> None:
    job = SimulatedJob(200, 25, slow=150)
    job.advance(20)
    job.lose(199)
    job.advance(2)
    _, data = written(tmp_path, job)

    assert len(data["series"]) == 64
    assert {"0", "150", "199"} <= set(data["series"])
    assert len(data["snapshot"]["ranks"]["rank"]) == 200


def test_every_rank_s_last_lines_are_in_it(tmp_path: Path) -> None:
    job = finished()
    for number in range(3000):
        job.observatory.output(0, 1, f"{number}\n".encode())
    _, data = written(tmp_path, job)
    of_ranks = [line["rank"] for line in data["lines"]]

    assert {rank: of_ranks.count(rank) for rank in range(4)} == {0: 1250, 1: 60, 2: 60, 3: 60}
    numbers = [line["number"] for line in data["lines"]]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("report.html", ("report.html", "report.json")),
        ("report.json", ("report.html", "report.json")),
        ("report", ("report.html", "report.json")),
        ("run.2024", ("run.2024.html", "run.2024.json")),
        ("a.htm", ("a.htm", "a.json")),
    ],
)
def test_both_files_lie_side_by_side(tmp_path: Path, path: str, names: tuple[str, str]) -> None:
    found = report.write(finished().observatory, str(tmp_path / path))

    assert found == [str(tmp_path / name) for name in names]
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        report.write(finished().observatory, str(tmp_path / "none" / "report.html"))


def test_a_report_that_cannot_be_written_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("the old one")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        report.write(finished().observatory, str(tmp_path / "report.html"))

    assert os.listdir(tmp_path) == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "the old one"


def test_the_json_is_what_its_type_says(tmp_path: Path) -> None:
    report.write(finished().observatory, str(tmp_path / "report"))
    read = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=report.Recording)

    assert read.snapshot.schema == view.SCHEMA
    assert read.snapshot.stragglers[0].rank == 3
    assert len(read.series[3].at) == 61


def test_a_report_is_for_this_user_alone_even_in_the_place_of_one_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("another")
    written(tmp_path, finished())
    modes = {entry.name: entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()}
    assert modes == {"report.html": 0o600, "report.json": 0o600}
