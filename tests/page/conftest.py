"""Chromium for the tests of this folder; they are skipped where it is not installed.

``HVDGLOO_TEST_REQUIRE_CHROMIUM=1`` says that they must run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.page import support
from tests.support.observed import SimulatedJob

collect_ignore_glob: list[str] = []
if support.missing():
    if os.environ.get("HVDGLOO_TEST_REQUIRE_CHROMIUM") == "1":
        raise RuntimeError(f"HVDGLOO_TEST_REQUIRE_CHROMIUM=1, and {support.missing()}")
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == support.HERE:
            # The browser is started within the first test.
            item.add_marker(pytest.mark.timeout(2 * support.PATIENCE_S))


@pytest.fixture(scope="session")
def chromium() -> Iterator[support.Chromium]:
    """One browser for all tests."""
    with support.Chromium() as started:
        yield started


@pytest.fixture
def browser(chromium: support.Chromium) -> Iterator[support.Chromium]:
    """The browser as it was at first. The test fails if anything was refused or went wrong in a page."""
    chromium.reset()
    yield chromium
    assert chromium.complaints() == []


@pytest.fixture
def show(browser: support.Chromium) -> Iterator[Callable[..., support.Shown]]:
    """``show(job, **settings)`` serves a simulated job and opens its page, which is drawn when it returns."""
    with ExitStack() as closing:

        def show_one(job: SimulatedJob, **settings: object) -> support.Shown:
            return closing.enter_context(support.Shown(browser, job, **settings))

        yield show_one
        browser.leave()
