"""The end of executors when something is lost; nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hvdgloo.errors import ConfigError, JobFailedError, LaunchError, PeerLostError
from hvdgloo.ray import RayExecutor, _placement, _workers
from hvdgloo.ray._actor import WorkerActor
from hvdgloo.ray._settings import demand
from tests.ray import functions
from tests.support.launching import hold_interpreter
from tests.support.pages import ROOT
from tests.support.ray import PATIENCE_S, Running, await_true


@pytest.fixture
def executor(cluster: Running) -> Iterator[RayExecutor]:
    """Two workers; whatever a test does with them, nothing is left."""
    made = RayExecutor(RayExecutor.create_settings(grace_period=1.0), num_workers=2)
    made.start()
    yield made
    made.shutdown()
    cluster.await_gone()


def _hanging(executor: RayExecutor, folder: Path) -> list[Any]:
    """References to calls that never return, and that all ranks are in."""
    begun = executor.run_remote(functions.hang, [str(folder / "started")])
    await_true(lambda: len(list(folder.glob("started.*"))) == 2)
    return begun


def test_a_driver_whose_interpreter_is_held_goes_on(executor: RayExecutor, cluster: Running, tmp_path: Path) -> None:
    """As by ``sorted`` of a long list in another thread. A host may be silent for 5 seconds."""
    import ray

    begun = executor.run_remote(functions.wait_for_file, [str(tmp_path / "started"), str(tmp_path / "enough")])
    await_true(lambda: len(list(tmp_path.glob("started.*"))) == 2)
    hold_interpreter(6.5)
    (tmp_path / "enough").touch()
    assert ray.get(begun) == [0, 1]


def test_a_worker_that_is_killed(executor: RayExecutor, cluster: Running) -> None:
    with pytest.raises(JobFailedError, match=r"rank 1 on host .*Ray node .* was killed by signal 9") as caught:
        executor.run(functions.kill, [1])
    assert caught.value.signal == signal.SIGKILL
    assert caught.value.last_lines == ("about to end",)
    cluster.await_gone_workers()
    with pytest.raises(JobFailedError, match=r"the workers have ended: .*killed by signal 9[\s\S]*start\(\) starts"):
        executor.run(functions.places)
    executor.start()
    assert [rank for rank, *_ in executor.run(functions.places)] == [0, 1]


def test_an_exception_on_one_rank_while_the_other_waits_for_it(executor: RayExecutor, cluster: Running) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        executor.run(functions.fail_while_others_wait)
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    with pytest.raises(JobFailedError, match=r"rank 1 failed in a call .* and 1 other rank had not ended it 1 s later"):
        executor.run(functions.places)
    cluster.await_gone_workers()


def test_a_call_that_is_over_leaves_no_thread(cluster: Running) -> None:
    """Ray ends a process in which a reference to one of its objects goes while ``ray.shutdown()`` is at work elsewhere:
    a thread that keeps one must not outlive the call."""
    with RayExecutor(RayExecutor.create_settings(grace_period=functions.FOREVER), num_workers=2) as executor:
        executor.start()
        before = set(threading.enumerate())
        for failing in (0, 1, None):
            with pytest.raises(KeyError):
                executor.run(functions.fail, [failing])
        # Ray's own threads appear as they call something of ours.
        assert [thread for thread in set(threading.enumerate()) - before if isinstance(thread, threading.Timer)] == []


def test_references_of_a_job_that_has_failed_say_why(executor: RayExecutor) -> None:
    import ray

    killed, other = executor.run_remote(functions.kill, [0])
    with pytest.raises(JobFailedError, match=r"rank 0 on host .* was killed by signal 9"):
        ray.get(killed, timeout=PATIENCE_S)
    with pytest.raises((JobFailedError, PeerLostError), match=r"rank 0 (on |\()host .* was (killed|lost)"):
        ray.get(other, timeout=PATIENCE_S)


def test_an_actor_that_is_killed(executor: RayExecutor, cluster: Running, tmp_path: Path) -> None:
    import ray

    begun = _hanging(executor, tmp_path)
    os.kill(cluster.actor(), signal.SIGKILL)
    for reference in begun:
        with pytest.raises((JobFailedError, ray.exceptions.RayActorError)):
            ray.get(reference, timeout=PATIENCE_S)
    cluster.await_gone_workers()
    with pytest.raises(JobFailedError, match=r"the workers have ended: .*The actor is dead because its worker process"):
        executor.run(functions.places)


def test_run_says_that_the_only_actor_was_killed(cluster: Running, tmp_path: Path) -> None:
    def kill_when_started() -> None:
        await_true(lambda: list(tmp_path.glob("started.*")))
        os.kill(cluster.actor(), signal.SIGKILL)

    with RayExecutor(num_workers=1) as executor, ThreadPoolExecutor(1) as beside:
        executor.start()
        killing = beside.submit(kill_when_started)
        # The node is named if its connection is seen to end before Ray reports the actor.
        with pytest.raises(JobFailedError, match=r": the actor of rank 0 ended: The actor is dead because"):
            executor.run(functions.hang, [str(tmp_path / "started")])
        killing.result(PATIENCE_S)
    cluster.await_gone()


def test_an_actor_that_is_killed_between_calls(executor: RayExecutor, cluster: Running) -> None:
    os.kill(cluster.actor(), signal.SIGKILL)
    cluster.await_gone_workers()
    with pytest.raises(JobFailedError, match="The actor is dead because its worker process"):
        executor.run(functions.places)


def test_ray_cancel_ends_all(executor: RayExecutor, cluster: Running, tmp_path: Path) -> None:
    import ray

    begun = _hanging(executor, tmp_path)
    ray.cancel(begun[1])
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(begun[1], timeout=PATIENCE_S)
    with pytest.raises(JobFailedError, match=r"the call was cancelled on rank 1 \(ray.cancel\)"):
        ray.get(begun[0], timeout=PATIENCE_S)
    cluster.await_gone_workers()


def test_shutdown_while_a_call_is_made(executor: RayExecutor, cluster: Running, tmp_path: Path) -> None:
    import ray

    begun = _hanging(executor, tmp_path)
    executor.shutdown()
    cluster.await_gone()
    for reference in begun:
        with pytest.raises((JobFailedError, ray.exceptions.RayActorError)):
            ray.get(reference, timeout=PATIENCE_S)
    with pytest.raises(ConfigError, match=r"call start\(\) first"):
        executor.run(functions.places)


_SCRIPT = """
import sys
import ray
from hvdgloo.ray import RayExecutor
from tests.ray import functions

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
executor = RayExecutor(RayExecutor.create_settings(grace_period=1.0), num_workers=2)
executor.start()
executor.run(functions.hang, [sys.argv[2]])
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_ends(cluster: Running, tmp_path: Path, signum: signal.Signals) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    output = tmp_path / "output"
    with output.open("w") as shown:
        driver = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, address, str(tmp_path / "started")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=shown,
            stderr=subprocess.PIPE,
            text=True,
        )
    both = {"[0]<stdout>:hanging", "[1]<stdout>:hanging"}
    with driver:
        try:
            await_true(lambda: both <= set(output.read_text().splitlines()) or driver.poll() is not None)
            driver.send_signal(signum)
            _, said = driver.communicate(timeout=PATIENCE_S)
        finally:
            driver.kill()
    assert both <= set(output.read_text().splitlines()), output.read_text() + said
    if signum == signal.SIGINT:
        assert said.rstrip().endswith("KeyboardInterrupt"), said
    assert driver.returncode != 0
    cluster.await_gone()
    await_true(lambda: ray.available_resources().get("CPU") == 4.0)


def test_an_object_that_cannot_be_made(cluster: Running) -> None:
    executor = RayExecutor(num_workers=2)
    with pytest.raises(ValueError, match="this cannot be made") as caught:
        executor.start(functions.Broken)
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    cluster.await_gone()


def test_a_cluster_that_is_too_small(cluster: Running) -> None:
    executor = RayExecutor(num_workers=3, cpus_per_worker=2)
    with pytest.raises(
        ConfigError, match="3 workers with 2 CPUs each: that is 6 CPUs in all; the cluster has 4 CPUs on 1 node"
    ):
        executor.start()
    assert cluster.processes() == []


def test_a_cluster_that_is_busy(cluster: Running) -> None:
    import ray

    group = ray.util.placement_group([{"CPU": 3}])
    assert group.wait(PATIENCE_S)
    await_true(lambda: ray.available_resources().get("CPU") == 1.0)  # which takes note of it later
    try:
        executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=0.5), num_workers=2)
        with pytest.raises(
            LaunchError, match=r"no room within 0\.5 s for 2 workers with 1 CPU each: 2 CPUs needed, 1 of 4 free\."
        ):
            executor.start()
        assert cluster.processes() == []
    finally:
        ray.util.remove_placement_group(group)


def test_room_that_is_about_to_be_given_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray is asked: it would say no, and try again after pauses that grow."""
    import ray

    free: list[dict[str, float]] = [{}, {"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 2.0}]
    monkeypatch.setattr(ray, "available_resources", lambda: free.pop(0))
    two = demand(2, None, 1, 1, None, False)
    _placement._await_room(two, PATIENCE_S)
    assert free == [{"CPU": 2.0}]
    free[:] = [{}]
    _placement._await_room(two, 0.0)  # whatever there is: Ray says what is the matter
    assert free == [{}]


def test_an_actor_that_does_not_come_up(cluster: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(WorkerActor):
        async def place(self) -> Any:
            import asyncio

            await asyncio.sleep(functions.FOREVER)

    monkeypatch.setattr(_workers, "WorkerActor", Slow)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=1.0), num_workers=2)
    with pytest.raises(LaunchError, match=r"Ray has not started actors 0, 1 of 2 within 1 s; .*timeout_s="):
        executor.start()
    cluster.await_gone()


def test_gpus_of_a_node_are_visible_to_all_of_its_workers(cluster: Running) -> None:
    with RayExecutor(num_workers=2, use_gpu=True, gpus_per_worker=2) as executor:
        executor.start()
        seen = [each["CUDA_VISIBLE_DEVICES"] for each in executor.run(functions.surroundings)]
    assert seen[0] == seen[1]
    assert sorted(seen[0].split(",")) == ["0", "1", "2", "3"]


def test_the_callers_placement_group_is_used(cluster: Running) -> None:
    import ray

    def trial() -> Any:
        with RayExecutor(num_workers=2) as executor:
            executor.start()
            return executor.run(functions.places), ray.util.placement_group_table()

    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 2}])
    assert group.wait(PATIENCE_S)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    try:
        reference = ray.remote(trial).options(num_cpus=1, scheduling_strategy=strategy).remote()
        places, groups = ray.get(reference, timeout=PATIENCE_S)
    finally:
        ray.util.remove_placement_group(group)
    assert [place[:2] for place in places] == [(0, 2), (1, 2)]
    assert len([each for each in groups.values() if each["state"] == "CREATED"]) == 1
    cluster.await_gone()
