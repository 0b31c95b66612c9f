"""The site is whole and needs no network: links lead somewhere, nothing is loaded from elsewhere, the search finds.

It has an environment of its own (``make test-docs``), with Sphinx.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.launching import run_command
from tests.support.pages import ROOT

pytest.importorskip("sphinx", reason="the site has an environment of its own: make test-docs")

pytestmark = pytest.mark.timeout(400)
"""For whichever test comes first, and has the site built; mostly in a twentieth of this time."""

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site, as ``make docs`` does."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", str(docs), str(site)]
    return run_command(command, timeout=300)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@dataclass
class Page(HTMLParser):
    """The references of a page.

    Attributes:
        links: addresses that readers may go to.
        loaded: addresses of what browsers load with the page.
        anchors: where in the page a link may lead.
        text: all of it.
    """

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag in ("a", "form"):
            self.links += [values[name] for name in ("href", "action") if name in values]
        else:
            self.loaded += [values[name] for name in ("src", "href", "srcset", "poster", "data") if values.get(name)]

    def handle_data(self, data: str) -> None:
        self.text += data


@cache
def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def pages(site: Path) -> Iterator[Path]:
    return site.rglob("*.html")


def test_every_page_is_built_without_a_warning(site: Path) -> None:
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in site.glob("*.html")}


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copytree(ROOT / "docs/site", docs / "site")
    settings = (ROOT / "docs/conf.py").read_text(encoding="utf-8")
    (docs / "conf.py").write_text(f'{settings}\nnavigation = {{"Rest": ("other",)}}\n')
    (docs / "other.md").write_text("# Other\n\n[back](index.md#start)\n")
    (docs / "index.md").write_text("# Start\n\n[other](other.md)\n")
    done = build(docs, tmp_path / "good")
    assert (done.returncode, done.stderr) == (0, "")
    wrong = (
        "[a](nowhere.md)",
        "[a](#no-heading)",
        "[a](other.md#nor-here)",
        "[a](../nowhere.py)",
        "[a](../no-folder/)",
        "![a](nowhere.png)",
    )
    (docs / "index.md").write_text("# Start\n\n[other](other.md)\n" + "".join(f"\n{link}\n" for link in wrong))
    done = build(docs, tmp_path / "bad")
    assert done.returncode != 0
    named = ("nowhere.md", "no-heading", "nor-here", "nowhere.py", "no-folder", "nowhere.png")
    assert [name for name in named if name not in done.stderr] == []
    assert len(done.stderr.strip().splitlines()) == len(wrong), done.stderr


def test_links_lead_somewhere(site: Path) -> None:
    wrong = []
    for path in pages(site):
        for link in read(path).links:
            target = urlsplit(link)
            if target.scheme in ("http", "https", "mailto"):
                continue
            there = path if not target.path else (path.parent / unquote(target.path)).resolve()
            anchor = unquote(target.fragment)
            if not there.is_file() or (anchor and there.suffix == ".html" and anchor not in read(there).anchors):
                wrong.append((path.name, link))
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    wrong = []
    for path in pages(site):
        for address in read(path).loaded:
            target = urlsplit(address)
            if target.scheme == "data" or address.startswith("#"):
                continue
            if target.scheme or target.netloc or not (path.parent / unquote(target.path)).is_file():
                wrong.append((path.name, address))
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]*)", text)
        wrong += [(path.name, address) for address in found]
    assert wrong == []


def test_source_files_that_pages_link_to_are_there_to_be_read(site: Path) -> None:
    assert "(../runner/launch.py)" in (ROOT / "docs/life-of-a-host.md").read_text(encoding="utf-8")
    assert "source/runner/launch.py.html" in read(site / "life-of-a-host.html").links
    shown = read(site / "source/runner/launch.py.html").text
    assert (ROOT / "runner/launch.py").read_text(encoding="utf-8").strip() in shown


def test_folders_that_pages_link_to_are_lists_of_their_files(site: Path) -> None:
    assert "(../rendezvous/_page_server/)" in (ROOT / "docs/security.md").read_text(encoding="utf-8")
    assert "source/rendezvous/_page_server.html" in read(site / "security.html").links
    assert {"_page_server/access.py.html", "_page_server/server.py.html"} <= set(
        read(site / "source/rendezvous/_page_server.html").links
    )


def test_every_page_can_be_reached_from_the_side_bar(site: Path) -> None:
    listed = {urlsplit(link).path for link in read(site / "index.html").links}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} - {"index.html"} <= listed


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "docs").glob("api-*.md")))
def test_every_function_has_a_place_in_the_api(site: Path, name: str) -> None:
    headings = re.findall(r"^### (`\w+`.*)$", (ROOT / f"docs/{name}.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings
    places = {re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") for heading in headings}
    assert places <= read(site / f"{name}.html").anchors


def opened(address: str, profile: Path) -> str:
    """A page's HTML as a browser without a network has made it."""
    if CHROMIUM is None:
        if os.environ.get("HVDGLOO_TEST_REQUIRE_CHROMIUM") == "1":
            pytest.fail("there is no chromium")
        pytest.skip("it takes a browser: chromium")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom", address]
    done = run_command(command, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("broadcast_optimizer_state", "api-collectives.html"),
        ("doctor", "doctor.html"),
        ("rendezvous server cannot be reached", "troubleshooting.html"),
        ("DDP", "tutorial-torch-distributed.html"),
        ("torchrun", "slurm.html"),
    ],
)
def test_the_search_finds_without_a_server(site: Path, tmp_path: Path, words: str, page: str) -> None:
    shown = opened(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}", tmp_path)
    found = Page()
    found.feed(shown.partition('id="search-results"')[2])
    assert page in {urlsplit(link).path for link in found.links}, shown
    excerpts = re.findall(r'<p class="context">(.*?)</p>', shown, re.DOTALL)
    assert len(excerpts) > len(found.links) / 2
    assert any(words.lower() in re.sub(r"<[^>]*>", "", excerpt).lower() for excerpt in excerpts), excerpts
    assert any('class="highlighted"' in excerpt for excerpt in excerpts), excerpts


def test_what_the_theme_leaves_out_for_screen_readers_and_keyboards_is_there(site: Path, tmp_path: Path) -> None:
    shown = opened((site / "recipes.html").as_uri(), tmp_path)
    captions, blocks = re.findall(r'<p class="caption"[^>]*>', shown), re.findall(r"<pre[^>]*>", shown)
    assert len(captions) == 7
    assert all('aria-level="2"' in caption for caption in captions)
    assert len(blocks) > 10
    assert all('tabindex="0"' in block for block in blocks)
    assert shown.count('aria-label="Pages"') == shown.count('aria-label="On this page"') == 1
