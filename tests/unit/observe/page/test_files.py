"""The files of a job's page: what is vendored is what its authors published, and no text is ever read as HTML."""

from __future__ import annotations

import hashlib
import inspect
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hvdgloo._observe import view
from tests.architecture.source import ROOT

STATIC = ROOT / "hvdgloo/_observe/page/static"
OURS = sorted(STATIC.glob("*.js"))
UPLOT = "hvdgloo/_observe/page/static/vendor/uplot"
VENDORED = {
    # npm's uplot 1.6.32: dist/uPlot.iife.min.js, dist/uPlot.min.css, LICENSE.
    f"{UPLOT}.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    f"{UPLOT}.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    f"{UPLOT}-license.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    # npm's axe-core 4.14.1: axe.min.js, which has its license in it.
    "tests/page/vendor/axe.min.js": "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
}
MAKES_HTML = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|createContextualFragment|DOMParser|srcdoc"
    r"|\beval\(|new Function"
)


class Tags(HTMLParser):
    """All elements of a page, as (tag, attributes), and the text that is in scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._within = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.fixture(scope="module")
def page() -> Tags:
    return Tags((STATIC / "index.html").read_text())


@pytest.mark.parametrize("path", VENDORED)
def test_vendored_files_are_those_that_were_published(path: str) -> None:
    assert hashlib.sha256((ROOT / path).read_bytes()).hexdigest() == VENDORED[path]


def test_every_vendored_file_has_a_checksum() -> None:
    found = {
        str(path.relative_to(ROOT)) for folder in ("hvdgloo", "tests") for path in (ROOT / folder).rglob("vendor/*")
    }
    assert found == set(VENDORED)


def test_the_page_loads_every_script_and_style_and_nothing_from_elsewhere(page: Tags) -> None:
    loaded = {
        value
        for tag, attributes in page.elements
        for name, value in attributes.items()
        if tag in ("script", "link", "img") and name in ("src", "href") and value
    }
    there = {
        f"static/{path.relative_to(STATIC)}" for path in STATIC.rglob("*.*") if path.suffix in (".js", ".css", ".svg")
    }
    assert loaded == there


def test_the_page_has_no_inline_script_or_style(page: Tags) -> None:
    assert page.inline == []
    assert [a for _, attributes in page.elements for a in attributes if a == "style" or a.startswith("on")] == []


@pytest.mark.parametrize("path", [*OURS, STATIC / "vendor/uplot.js"], ids=lambda path: path.name)
def test_scripts_make_no_html_of_text(path: Path) -> None:
    text = path.read_text()
    assert MAKES_HTML.findall(text) == []


@pytest.mark.parametrize("path", [*OURS, STATIC / "page.css"], ids=lambda path: path.name)
def test_scripts_and_styles_name_no_other_host(path: Path) -> None:
    assert re.findall(r"https?://|//[a-z0-9-]+\.[a-z]", path.read_text()) == []


def test_the_page_knows_every_state_in_the_order_of_its_number() -> None:
    (listed,) = re.findall(r"const STATES = \[(.*?)\];", (STATIC / "store.js").read_text())
    assert tuple(re.findall(r'"([a-z]+)"', listed)) == view.STATES


def test_the_page_offers_every_kind_of_event() -> None:
    (listed,) = re.findall(r"const EVENT_KINDS = \[(.*?)\];", (STATIC / "events.js").read_text())
    said = re.search(r"kind: (.*?)\n    rank:", inspect.cleandoc(view.Event.__doc__ or ""), re.DOTALL)
    assert said
    assert set(re.findall(r'"([a-z ]+)"', listed)) == set(re.findall(r'"([a-z ]+)"', said.group(1)))


def test_the_page_keeps_all_that_a_snapshot_has() -> None:
    (replaced,) = re.findall(r"const REPLACED = \[(.*?)\];", (STATIC / "store.js").read_text())
    (more,) = re.findall(r"const PARTS_OF_STORE = \[\.\.\.REPLACED, (.*?)\];", (STATIC / "store.js").read_text())
    kept = set(re.findall(r'"([a-z_]+)"', replaced + more))
    assert kept == set(view.Snapshot.__struct_fields__) - {"schema"}
    assert kept <= set(view.Update.__struct_fields__)
