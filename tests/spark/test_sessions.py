"""The sessions that the other tests run on are what they are said to be."""

from __future__ import annotations

import os
from typing import Any

from tests.support.pages import ROOT


def _parents(_: Any) -> Any:
    import hvdgloo

    yield os.getpid(), os.getppid(), os.path.dirname(os.path.dirname(os.path.realpath(hvdgloo.__file__)))


def test_executors_of_the_cluster_are_processes_of_their_own_and_have_this_checkout(cluster: Any) -> None:
    found = cluster.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(_parents).collect()
    assert len({parent for _, parent, _ in found}) == 2
    assert {folder for *_, folder in found} == {os.path.realpath(ROOT)}


def test_workers_of_a_standalone_master_run_tasks(standalone: Any) -> None:
    found = standalone.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(_parents).collect()
    assert len({parent for _, parent, _ in found}) == 2
    assert standalone.sparkContext.master.startswith("spark://")
