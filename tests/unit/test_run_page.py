"""``hvdgloo.run.run(page=...)``: where the page is, and how a notebook shows it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import hvdgloo.run as run_module
from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli import config_file
from hvdgloo.runner.cli.flags import build_parser

LINK = "http://127.0.0.1:4711/?token=a&b"


def notebook(monkeypatch: pytest.MonkeyPatch, shell: Any) -> list[str]:
    """An IPython whose shell is this one; returns what it displays, as HTML."""
    shown: list[str] = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(display, "HTML", str, raising=False)
    monkeypatch.setattr(display, "display", shown.append, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_notebook_shows_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = notebook(monkeypatch, SimpleNamespace(kernel=object()))
    show = run_module._notebook_link()
    assert show is not None
    show(LINK)
    (html,) = shown
    assert 'href="http://127.0.0.1:4711/?token=a&amp;b"' in html
    assert "noopener" in html


@pytest.mark.parametrize("shell", [None, SimpleNamespace()], ids=["a program", "IPython on a terminal"])
def test_elsewhere_its_address_is_printed(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook(monkeypatch, shell)
    assert run_module._notebook_link() is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert run_module._notebook_link() is None


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (None, None),
        (False, None),
        (True, ("127.0.0.1", 0)),
        ("0.0.0.0:8080", ("0.0.0.0", 8080)),
        ("[::1]:8080", ("::1", 8080)),
        ("::1", ("::1", 0)),
    ],
)
def test_where_it_is_served(given: Any, where: tuple[str, int] | None) -> None:
    assert run_module._page(given) == where


@pytest.mark.parametrize("given", ["h1:port", "127.0.0.1:99999", 8080, 1.5])
def test_what_is_no_address_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"run\(page=.*give True, or an address and a port"):
        run_module._page(given)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("true", ("127.0.0.1", 0)),
        ("false", None),
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:8080", ("0.0.0.0", 8080)),
        ("'[::1]:8080'", ("::1", 8080)),
    ],
)
def test_in_a_file(value: str, where: tuple[str, int] | None, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"view:\n  page: {value}\n  page_control: true\n  report: job.html\n")
    parser = build_parser()
    content = config_file.read(str(tmp_path / "job.yaml"), parser)
    arguments = parser.complete(parser.given([]), content.flags)
    assert (arguments.page, arguments.page_control, arguments.report) == (where, True, "job.html")
    assert parser.complete(parser.given(["--page=[::1]:1"]), content.flags).page == ("::1", 1), "a flag wins"


def test_the_flag_takes_no_word_that_follows() -> None:
    parser = build_parser()
    assert parser.given(["--page", "--verbose"]).page == ("127.0.0.1", 0)
    assert parser.given(["--page=:8080"]).page == ("127.0.0.1", 8080)
    with pytest.raises(ConfigError, match=r"--page: 'nonsense:port': expected ADDR, ADDR:PORT"):
        parser.given(["--page=nonsense:port"])
