"""Statements of the pages about JAX, tested. The tutorial is followed by test_programs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hvdgloo.jax as hvd
from tests.support import api_examples, warm
from tests.support.elastic_examples import follow_three_sizes
from tests.support.elastic_launch import Job
from tests.support.frameworks import need_installed
from tests.support.launching import Launcher
from tests.support.pages import ROOT, outdated, program, run_program

ENVIRON = {"JAX_PLATFORMS": "cpu"}


@pytest.fixture
def job(launcher: Launcher) -> Job:
    return Job(launcher)


def test_the_api_page_is_what_the_docstrings_say() -> None:
    assert outdated("api_jax") == [], "run: python docs/generate_api_jax.py"


def test_every_public_name_is_on_an_api_page() -> None:
    pages = "".join(
        (ROOT / f"docs/api-{page}.md").read_text(encoding="utf-8")
        for page in ("start", "collectives", "training", "observing", "jax")
    )
    assert set(hvd.__all__) <= set(re.findall(r"^### `(\w+)`", pages, re.MULTILINE))


@pytest.mark.timeout(130)  # mostly a tenth of it
def test_every_example_of_the_api_page_prints_what_it_says(tmp_path: Path) -> None:
    need_installed("optax")
    api_examples.run("jax", tmp_path, warm.python("hvdgloo.jax", **ENVIRON), ENVIRON)


def test_the_readmes_program_trains_alone(capsys: pytest.CaptureFixture[str]) -> None:
    need_installed("optax")
    run_program("README.md", "hvdgloo.jax")
    assert re.search(r"1 workers, loss 0\.0\d+", capsys.readouterr().out)


def test_the_elastic_program_trains_alone(capsys: pytest.CaptureFixture[str]) -> None:
    need_installed("optax")
    run_program("docs/elastic.md", "JaxState")
    assert re.search(r"trained by 1 workers, loss 0\.0\d+", capsys.readouterr().out)


@pytest.mark.timeout(240)  # seconds; mostly a tenth of it
def test_the_elastic_program_trains_at_the_rate_for_the_workers_that_are_there(job: Job) -> None:
    need_installed("optax")
    text = program("docs/elastic.md", "JaxState").replace("state.step < 60", 'not os.path.exists("over")')
    rate = "optax.tree_utils.tree_get(state.opt_state, 'learning_rate')"
    follow_three_sizes(job, text, rate, 0.05, warm.python("hvdgloo.jax", **ENVIRON), **ENVIRON)
