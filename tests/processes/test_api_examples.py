"""The examples of the API page print what it says; other frameworks' examples are tried in their environments."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.api_examples import run

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="they are of torch"),
    pytest.mark.timeout(100),  # mostly a tenth of it
]


def test_every_example_of_torch_prints_what_the_page_says(tmp_path: Path) -> None:
    run("torch", tmp_path, warm.python())


def test_the_example_that_starts_workers_itself_prints_what_the_page_says(tmp_path: Path) -> None:
    run("run", tmp_path, warm.python())
