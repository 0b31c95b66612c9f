"""Ray clusters on this machine; the tests are skipped where there is no Ray.

``HVDGLOO_TEST_REQUIRE_RAY=1`` says that they must run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ray as support

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("ray") is None:
    if os.environ.get("HVDGLOO_TEST_REQUIRE_RAY") == "1":
        raise RuntimeError("HVDGLOO_TEST_REQUIRE_RAY=1, and Ray is not installed")
    collect_ignore_glob = ["test_*.py"]

_HERE = Path(__file__).parent
_NOT_OURS = (
    # Ray leaves sockets and files to the collector, and warns of its own future.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A cluster is started within the time of the first test that wants it, which is therefore long."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(support.STARTUP_S))
            for each in _NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(each))


@pytest.fixture(scope="module")
def cluster() -> Iterator[support.Running]:
    """A cluster of one node, with 4 CPUs and 4 GPUs in name, that this process has joined."""
    with support.one_node(cpus=4, gpus=4) as running:
        yield running


@pytest.fixture(scope="module")
def nodes() -> Iterator[support.Running]:
    """A cluster of two nodes with 2 CPUs each, in name, that this process has joined."""
    with support.two_nodes(cpus=2) as running:
        yield running
