"""Spark's sessions for the tests of this folder; they are skipped where there is no Spark.

``HVDGLOO_TEST_REQUIRE_SPARK=1`` says that they must run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import spark as support

collect_ignore_glob: list[str] = []
if support.missing():
    if os.environ.get("HVDGLOO_TEST_REQUIRE_SPARK") == "1":
        raise RuntimeError(f"HVDGLOO_TEST_REQUIRE_SPARK=1, and {support.missing()}")
    collect_ignore_glob = ["test_*.py"]

_HERE = Path(__file__).parent
_PATIENCE_S = 4 * support.STARTUP_S
_NOT_OURS = (
    # pyspark leaves sockets to its JVM, and pipes to its workers, to the collector.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    # pandas about pyspark.
    "ignore::FutureWarning:pyspark",
    "ignore::DeprecationWarning:pyspark",
)


_KINDS = ("spark", "cluster", "standalone")
"""Fixtures of sessions, in the order in which they are wanted."""

_DIVIDING = ("outcome", "several")
"""Fixtures of a module whose every parameter is a job of its own, which takes long."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share something come together, and modules that want the same session follow each other, so that it
    is started once. Several processes of pytest share the work in such groups (``--dist loadgroup``).

    The session is set up within a test's time, which is therefore long.
    """
    ours = [item for item in items if _HERE in item.path.parents]
    groups = {item: _group(item) for item in ours}
    wanted = dict.fromkeys(groups.values(), 0)
    for item in ours:
        item.add_marker(pytest.mark.timeout(_PATIENCE_S))
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(groups[item]))
        for each in _NOT_OURS:
            item.add_marker(pytest.mark.filterwarnings(each))
        names = getattr(item, "fixturenames", ())
        kind = max((_KINDS.index(name) + 1 for name in _KINDS if name in names), default=0)
        wanted[groups[item]] = max(wanted[groups[item]], kind)
    places = [index for index, item in enumerate(items) if item in groups]
    ours.sort(key=lambda item: wanted[groups[item]])  # stable: the order within a module stays
    for index, item in zip(places, ours, strict=True):
        items[index] = item


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes of pytest that did not see the groups would each start the sessions and jobs of many modules."""
    if session.config.getoption("loadgroup", False):  # of a process that xdist started
        alone = [item.nodeid for item in session.items if _HERE in item.path.parents and "@" not in item.nodeid]
        assert not alone, f"xdist has not seen the groups of {len(alone)} tests, the first of which is {alone[0]}"


def _group(item: pytest.Item) -> str:
    """The name of those tests that are to be in one process: a module's, unless a part of it needs nothing of the
    rest."""
    if mark := item.get_closest_marker("xdist_group"):
        return str(mark.args[0])
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return "-".join([item.path.stem, *(str(parameters[name]) for name in _DIVIDING if name in parameters)])


@pytest.fixture(scope="session")
def sessions() -> Iterator[support.Sessions]:
    """The sessions of this process. ``get(master, settings)`` for one of a test's own."""
    made = support.Sessions()
    yield made
    made.close()


@pytest.fixture(scope="module")
def spark(sessions: support.Sessions) -> Any:
    """A SparkSession whose tasks run in this process's JVM, two at a time."""
    return sessions.get(support.LOCAL)


@pytest.fixture(scope="module")
def cluster(sessions: support.Sessions) -> Any:
    """A SparkSession with two executors that are processes of their own, with one core each."""
    return sessions.get(support.CLUSTER)


@pytest.fixture(scope="module")
def standalone(sessions: support.Sessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A SparkSession on a master and two workers that run as they do on a cluster, with a GPU each."""
    with support.Standalone(2, tmp_path_factory.mktemp("standalone")) as running:
        yield sessions.get(running.master, running.settings)
        sessions.stop()
