"""Tests of this folder need a GPU. What they bring is written into one report; see ``report``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.report import Results, write

RESULTS = pytest.StashKey[Results]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = Results()


def _why_not() -> str:
    """Return the reason why there is nothing to test here; empty if there is none."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "needs a GPU that torch can use (torch.cuda.is_available())"


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    """Skip what needs a GPU, unless HVDGLOO_TEST_REQUIRE_GPU=1 says that it must run."""
    reason = _why_not()
    if reason and _is_required():
        pytest.exit(f"make test-gpu: {reason}; nothing was tested, and there is no report", returncode=1)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def gpus() -> int:
    """Return the number of GPUs."""
    import torch

    return torch.cuda.device_count()


@pytest.fixture
def several(gpus: int) -> int:
    """The number of ranks of a test that needs a GPU for each: two, three or four."""
    if gpus < 2:
        pytest.skip("needs two GPUs or more")
    return min(gpus, 4)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Puts a measurement into the report."""
    results = request.config.stash[RESULTS]

    def add(name: str, value: str) -> None:
        results.notes[name] = value

    return add


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report: pytest.TestReport = yield
    if report.when == "call" or report.outcome != "passed":
        reason = ""
        if report.failed:
            reason = report.longreprtext[-4000:]
        elif report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        item.config.stash[RESULTS].tests.append((item.name, report.outcome, report.duration, reason))
    if report.when == "teardown":
        _write(item.config)  # each time: a hang or a crash later must not take it along
    return report


def _write(config: pytest.Config) -> Path | None:
    if not _is_required() or _why_not():
        return None
    return write(config.stash[RESULTS], Path(os.environ.get("HVDGLOO_TEST_REPORT", ".")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = _write(config)
    if path is not None:
        terminalreporter.write_line(f"\nThe report is {path.resolve()}: please send it to hvdgloo's issues.")


def _is_required() -> bool:
    return os.environ.get("HVDGLOO_TEST_REQUIRE_GPU") == "1"
