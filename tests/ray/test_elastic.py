"""Elastic jobs on a cluster of two nodes: workers that come, and one that is lost."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hvdgloo.errors import ConfigError
from hvdgloo.ray import ElasticRayExecutor, RayExecutor
from hvdgloo.ray.elastic import RayHostDiscovery
from tests.ray import functions
from tests.support.ray import PATIENCE_S, Running, await_true


class Some(RayHostDiscovery):
    """Lists one slot of the address until it is told to list two."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        (address,) = super().find_available_hosts_and_slots()
        return {address: 2 if (self._folder / "more").exists() else 1}


def test_horovods_old_names_of_settings_are_taken() -> None:
    with pytest.warns(DeprecationWarning, match=r"create_settings\(min_np=...\) is an old name"):
        settings = ElasticRayExecutor.create_settings(min_np=2, max_np=3)
    assert (settings.min_num_proc, settings.max_num_proc) == (2, 3)


def test_wrong_arguments_are_refused(nodes: Running) -> None:
    with pytest.raises(ConfigError, match="use ElasticRayExecutor"):
        RayExecutor(None, min_workers=1)
    with pytest.raises(ConfigError, match=r"max_num_proc=1\): it must be at least 2"):
        ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=1)
    with pytest.raises(ConfigError, match=r"result of ElasticRayExecutor\.create_settings"):
        ElasticRayExecutor(RayExecutor.create_settings())  # type: ignore[arg-type]


def test_nodes_are_listed_with_their_slots(nodes: Running) -> None:
    assert list(RayHostDiscovery().find_available_hosts_and_slots().values()) == [4]
    assert list(RayHostDiscovery(cpus_per_slot=2).find_available_hosts_and_slots().values()) == [2]
    assert RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots() == {}


def test_workers_come_while_others_train(nodes: Running, tmp_path: Path) -> None:
    settings: Any = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=2, elastic_timeout=120)
    settings.discovery = Some(tmp_path)
    executor = ElasticRayExecutor(settings, env_vars={"FOLDER": str(tmp_path)}, override_discovery=False)
    executor.start()
    assert executor.run(functions.grow) == [2, 2]
    nodes.await_gone()


def test_the_others_go_on_when_an_actor_is_killed(nodes: Running, tmp_path: Path) -> None:
    (tmp_path / "more").touch()

    def kill_when_two_train() -> None:
        await_true((tmp_path / "two").exists)
        os.kill(nodes.actor(), signal.SIGKILL)

    settings: Any = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=2, elastic_timeout=120)
    settings.discovery = Some(tmp_path)
    executor = ElasticRayExecutor(settings, env_vars={"FOLDER": str(tmp_path)}, override_discovery=False)
    with ThreadPoolExecutor(1) as beside:
        killing = beside.submit(kill_when_two_train)
        results = executor.run(functions.outlive)
        killing.result(PATIENCE_S)
    first = results[0][1]
    assert all(result[1] == first for result in results), "who comes later gets the state of the one that stayed"
    assert len({pid for pid, _ in results} & set(first)) == 1, "one of the first two has gone on"
    nodes.await_gone()


def test_the_others_go_on_when_a_node_is_lost(nodes: Running, tmp_path: Path) -> None:
    """The last test of this module: the cluster has one node less afterwards."""

    def remove_a_node_when_two_train() -> None:
        await_true((tmp_path / "two").exists)
        gone = nodes.cluster.worker_nodes.copy().pop()
        nodes.cluster.remove_node(gone, allow_graceful=False)

    settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=2, elastic_timeout=120)
    executor = ElasticRayExecutor(settings, cpus_per_slot=2, env_vars={"FOLDER": str(tmp_path)})
    with ThreadPoolExecutor(1) as beside:
        removing = beside.submit(remove_a_node_when_two_train)
        results: Any = executor.run(functions.outlive)
        removing.result(PATIENCE_S)
    ((survivor, first),) = results
    assert survivor in first
    assert len(first) == 2
    nodes.await_gone()
