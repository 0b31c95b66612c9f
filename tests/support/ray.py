"""Ray for tests: clusters on this machine, and what is left of a job in them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from tests.support.launching import wait_for

STARTUP_S = 300.0
"""Seconds that a start may take on a busy machine with cold disks."""

GONE_S = 120.0
"""Within which everything that was ended is gone."""

PATIENCE_S = 240.0
"""For what a test awaits: below the time that it has."""

_ACTORS = ("WorkerActor", "AgentActor")
_MARK = "HVDGLOO_TEST_RAY"
_STORE = 100 * 1024 * 1024


@dataclass
class Running:
    """A cluster.

    Attributes:
        mark: in the environment of all of its processes.
        cluster: of ``ray.cluster_utils``, where it has several nodes.
    """

    mark: str
    cluster: Any = None

    def actor(self) -> int:
        """The process of one of the actors."""
        return next(pid for pid, line in self.processes() if line.startswith(tuple(f"ray::{name}" for name in _ACTORS)))

    def processes(self) -> list[tuple[int, str]]:
        """Agents, workers and their actors: process ids and command lines."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) != self.mark:
                    continue
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue  # it has ended, or is another user's
            if any(name in line for name in ("hvdgloo.runner", *_ACTORS)):
                found.append((process.pid, line))
        return found

    def await_gone(self, what: str = "") -> None:
        """Assert that no agent, worker or actor is left, once they have had a moment to end.

        Args:
            what: only those that have this in their command lines.
        """
        deadline = time.monotonic() + GONE_S
        while left := [process for process in self.processes() if what in process[1]]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def await_gone_workers(self) -> None:
        """The same for agents and workers; actors may stay until ``shutdown``."""
        self.await_gone("hvdgloo.runner")


def await_true(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    wait_for(condition, PATIENCE_S)


@contextmanager
def one_node(cpus: int, gpus: int) -> Iterator[Running]:
    """Start a cluster, and join it."""
    import ray

    with _marked() as mark:
        ray.init(
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=_STORE,
            log_to_driver=False,
            logging_level="ERROR",
        )
        try:
            yield Running(mark)
        finally:
            ray.shutdown()


@contextmanager
def two_nodes(cpus: int) -> Iterator[Running]:
    """Start a cluster of two nodes, and join it."""
    import ray
    from ray.cluster_utils import Cluster

    with _marked() as mark:
        arguments = {"num_cpus": cpus, "object_store_memory": _STORE, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=arguments)
        try:
            cluster.add_node(num_cpus=cpus, object_store_memory=_STORE)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            cluster.wait_for_nodes()
            yield Running(mark, cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def _marked() -> Iterator[str]:
    mark = secrets.token_hex(8)
    settings = {
        _MARK: mark,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield mark
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
