"""Executors on a cluster of several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdgloo.errors import ConfigError, JobFailedError
from hvdgloo.ray import RayExecutor
from tests.ray import functions
from tests.support.ray import PATIENCE_S, Running, await_true


def test_each_node_is_a_host_with_as_many_workers(nodes: Running) -> None:
    settings = RayExecutor.create_settings(grace_period=60.0)  # as the others end the calls, too, that one fails in
    with RayExecutor(settings, num_hosts=2, num_workers_per_host=2) as executor:
        executor.start()
        places = executor.run(functions.places)
        homes = []
        for rank in range(4):
            with pytest.raises(KeyError) as caught:
                executor.run(functions.fail, [rank])
            homes.append(caught.value.host)  # type: ignore[attr-defined]
    assert places == [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
    assert homes[0] == homes[1] != homes[2] == homes[3]
    nodes.await_gone()


def test_workers_are_packed_where_they_may_be_anywhere(nodes: Running) -> None:
    with RayExecutor(num_workers=2) as executor:
        executor.start()
        assert executor.run(functions.places) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
    nodes.await_gone()


def test_more_nodes_than_there_are(nodes: Running) -> None:
    executor = RayExecutor(num_hosts=3, cpus_per_worker=1)
    with pytest.raises(
        ConfigError, match=r"3 workers on 3 nodes with 1 CPU each: that is 1 CPU on each, which 2 of 2 nodes can give"
    ):
        executor.start()


def test_workers_that_fit_in_sum_but_not_on_the_nodes(nodes: Running) -> None:
    executor = RayExecutor(num_workers=1, cpus_per_worker=3)
    with pytest.raises(
        ConfigError, match=r"1 worker with 3 CPUs: there is room on the nodes for 0; .* 4 CPUs on 2 nodes \(2, 2\)"
    ):
        executor.start()


def test_a_node_that_goes(nodes: Running, tmp_path: Path) -> None:
    """The last test of this module: the cluster has one node less afterwards."""
    import ray

    executor = RayExecutor(RayExecutor.create_settings(grace_period=1.0), num_hosts=2)
    executor.start()
    begun = executor.run_remote(functions.hang, [str(tmp_path / "started")])
    await_true(lambda: len(list(tmp_path.glob("started.*"))) == 2)
    gone = nodes.cluster.worker_nodes.copy().pop()
    nodes.cluster.remove_node(gone, allow_graceful=False)
    for reference in begun:
        with pytest.raises((JobFailedError, ray.exceptions.RayActorError)):
            ray.get(reference, timeout=PATIENCE_S)
    with pytest.raises(JobFailedError, match=f"the workers have ended: .*Ray node {gone.node_id[:8]}"):
        executor.run(functions.places)
    executor.shutdown()
    nodes.await_gone()
