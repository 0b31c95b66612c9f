"""Statements of the pages about MXNet, tested."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from tests.support import api_examples
from tests.support.pages import ROOT, outdated, run_program
from tests.support.tutorials import follow


def test_the_api_page_is_what_the_docstrings_say() -> None:
    assert outdated("api_mxnet") == [], "run: python docs/generate_api_mxnet.py"


def test_the_readmes_program_trains(capsys: pytest.CaptureFixture[str]) -> None:
    run_program("README.md", "DistributedTrainer")
    assert re.search(r"1 workers, loss 0\.0\d+", capsys.readouterr().out)


@pytest.mark.timeout(300)  # two jobs, one after the other; mostly a tenth of it
def test_the_tutorial_of_mxnet(tmp_path: Path) -> None:
    follow("docs/tutorial-mxnet.md", tmp_path)


@pytest.mark.timeout(120)  # mostly a tenth of it
def test_every_example_of_mxnet_prints_what_the_page_says(tmp_path: Path) -> None:
    api_examples.run("mxnet", tmp_path, sys.executable)


@pytest.mark.parametrize("page", ["hvdgloo/mxnet/__init__.py", "docs/compatibility.md", "README.md", "Makefile"])
def test_the_versions_that_are_named_are_those_that_are_tested(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"\b(mxnet|numpy)==([\d.]*\d)", text)
    assert named
    for name, version in named:
        assert version == importlib.metadata.version(name)
