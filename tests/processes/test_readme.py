"""The programs of the pages, run as the pages say. No reader shall be the first to try them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.launching import run_command
from tests.support.pages import program

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the programs need torch")


def _run(folder: Path, *arguments: str, python: str = sys.executable) -> str:
    command = [python, *arguments]
    done = run_command(command, cwd=folder, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_program_trains_on_several_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program("README.md", "named_parameters"))
    assert _run(tmp_path, "-m", "hvdgloo.runner", "-np", "2", "train.py") == "[0]<stdout>:2 workers, loss 0.000000\n"


def test_the_first_program_trains_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program("README.md", "named_parameters"))
    assert re.fullmatch(r"1 workers, loss 0\.0\d+\n", _run(tmp_path, "train.py", python=warm.python()))


def test_run_returns_what_the_readme_says(tmp_path: Path) -> None:
    # The test above starts interpreters as the page's reader does.
    text = program("README.md", "hvdgloo.run.run(").replace("np=4)", f"np=4, executable={warm.python()!r})")
    assert "executable" in text
    (tmp_path / "main.py").write_text(text)
    assert _run(tmp_path, "main.py") == f"{[[12.0] * 3] * 4}\n"


ELASTIC = [("TorchState(model", r"loss 0\.0\d+"), ("run_fn", r"weights \[0\.99 0\.99 0\.99 0\.99\]")]


@pytest.mark.parametrize(("containing", "ends"), ELASTIC)
def test_an_elastic_program_trains_alone_and_on_several_workers(tmp_path: Path, containing: str, ends: str) -> None:
    (tmp_path / "train.py").write_text(program("docs/elastic.md", containing))
    assert re.fullmatch(rf"trained by 1 workers, {ends}\n", _run(tmp_path, "train.py", python=warm.python()))
    said = _run(tmp_path, "-m", "hvdgloo.runner", "-np", "2", "--min-np", "1", warm.python(), "train.py")
    assert re.fullmatch(rf"\[0\]<stdout>:trained by 2 workers, {ends}\n", said)
