"""A ``RayExecutor`` whose workers stay: what calls see, and what they give back."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdgloo.errors import ConfigError, InvalidArgumentError, JobFailedError, RemoteTraceback
from hvdgloo.ray import RayExecutor
from tests.ray import functions
from tests.support.launching import run_command
from tests.support.pages import ROOT
from tests.support.ray import PATIENCE_S, Running, await_true


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that receives the workers' output."""
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def executor(cluster: Running, output: Path) -> Iterator[RayExecutor]:
    """Two workers with an object each. Every test leaves them ready for the next."""
    # The time that other ranks have to end a call that one has failed in: all do at once, but the machine may be busy.
    settings = RayExecutor.create_settings(output_filename=str(output), grace_period=60.0)
    with RayExecutor(settings, num_workers=2) as started:
        started.start(functions.Counter, [10], {"step": 5}, extra_env_vars={"FLAVOUR": "mint"})
        yield started
    cluster.await_gone()


def test_workers_of_a_node_form_one_host_with_shared_memory(executor: RayExecutor) -> None:
    assert executor.run(functions.places) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
    for result in executor.run(functions.total, [2.0]):
        np.testing.assert_array_equal(result, [6.0] * 3)
    assert executor.run(functions.shares_memory) == [True, True]


def test_an_object_is_kept_between_calls(executor: RayExecutor) -> None:
    before = executor.execute(lambda counter: counter.value)
    assert before[1] == before[0] + 1, "each rank has one of its own"
    assert executor.execute(lambda counter: counter.count()) == [value + 5 for value in before]
    assert executor.execute_single(lambda counter: counter.count()) == before[0] + 10
    assert executor.execute(lambda counter: counter.value) == [before[0] + 10, before[1] + 5]


def test_calls_may_be_many_and_are_made_in_their_order(executor: RayExecutor) -> None:
    import ray

    begun = [executor.run_remote(functions.total, kwargs={"value": float(n)}) for n in range(20)]
    assert all(isinstance(ref, ray.ObjectRef) for refs in begun for ref in refs)
    results = ray.get([refs[0] for refs in begun], timeout=PATIENCE_S)
    np.testing.assert_array_equal(np.array(results)[:, 0], 3.0 * np.arange(20))


def test_results_are_in_rays_store(executor: RayExecutor) -> None:
    import ray

    refs = executor.run_remote(lambda: {"big": np.arange(1_000_000.0)})
    first = ray.get(refs[0], timeout=PATIENCE_S)["big"]
    assert first[-1] == 999_999.0
    assert not first.flags.owndata, "the array is read where the store has it"
    assert not first.flags.writeable


def test_workers_that_need_not_read_rays_objects_do_not_import_ray(executor: RayExecutor) -> None:
    """It would be most of what the first call takes. Tests further down have them import it."""
    assert executor.run(lambda: "ray" in sys.modules) == [False, False]


def test_arguments_may_be_references_to_rays_objects(executor: RayExecutor) -> None:
    import ray

    reference = ray.put(np.arange(5))

    def read(references: list[Any]) -> int:
        import ray

        return int(ray.get(references[0], timeout=PATIENCE_S).sum())

    assert executor.run(read, [[reference]]) == [10, 10]


def test_an_exception_has_rank_and_node(executor: RayExecutor) -> None:
    import ray

    with pytest.raises(KeyError, match="no such thing") as caught:
        executor.run(functions.fail)
    error: Any = caught.value
    node = ray.get_runtime_context().get_node_id()
    assert error.rank == 0
    assert f"Ray node {node[:8]}" in error.host
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in fail" in error.__cause__.traceback
    assert "_worker.py" not in error.__cause__.traceback, "our own frames are not shown"


def test_workers_survive_a_mistake_that_leaves_none_waiting(executor: RayExecutor) -> None:
    pids = [each["pid"] for each in executor.run(functions.surroundings)]
    with pytest.raises(KeyError) as caught:
        executor.run(functions.fail, [1])
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    with pytest.raises(JobFailedError, match=r"rank 1 on host .* called sys.exit\(3\)"):
        executor.run(functions.leave)
    assert [each["pid"] for each in executor.run(functions.surroundings)] == pids


def test_references_raise_the_users_exception(executor: RayExecutor) -> None:
    import ray

    for reference in executor.run_remote(functions.fail):
        with pytest.raises(KeyError):
            ray.get(reference, timeout=PATIENCE_S)


def test_what_cannot_be_pickled_is_named(executor: RayExecutor) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidArgumentError, match=r"cannot be sent to the workers \(TypeError: .*lock"):
        executor.run(lambda: lock)
    with pytest.raises(JobFailedError, match=r"rank 0 on host .* returned a lock that cannot be pickled"):
        executor.run(lambda: __import__("threading").Lock())
    assert executor.run(lambda: 1) == [1, 1]


def test_what_workers_print_is_kept_by_rank(executor: RayExecutor, output: Path) -> None:
    executor.run(functions.greet, ["hello"])
    files = [output / f"rank.{rank}" / "stdout" for rank in range(2)]
    # What a call prints may come after its result.
    await_true(lambda: all("hello" in file.read_text() for file in files))
    assert [file.read_text().splitlines()[-1] for file in files] == ["hello from 0", "hello from 1"]


def test_workers_have_their_actors_surroundings(executor: RayExecutor) -> None:
    for each in executor.run(functions.surroundings):
        assert each["FLAVOUR"] == "mint"
        assert each["cwd"] == os.getcwd()
        assert "HVDGLOO_RAY_CALLS" not in each


def test_wrong_calls_are_refused(executor: RayExecutor) -> None:
    with pytest.raises(ConfigError, match="started already"):
        executor.start()
    with pytest.raises(ConfigError, match="the first argument is a function, not 3"):
        executor.run(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="callbacks"):
        executor.execute(print, callbacks=[print])
    with pytest.raises(ConfigError, match="give a tuple of arguments"):
        executor.run(print, "ab")


def test_processes_of_rays_own_can_meet_at_a_rendezvous(cluster: Running) -> None:
    """The statement in docs/ray.md about Ray Train, whose workers are such processes."""
    import ray

    from hvdgloo.rendezvous import RendezvousServer, generate_secret

    def loop(place: dict[str, str], rank: int) -> tuple[int, ...]:
        os.environ.update(place, HVDGLOO_RANK=str(rank))
        return functions.places()

    secret = generate_secret()
    with RendezvousServer(size=2, secret=secret, bind=(ray.util.get_node_ip_address(),)) as server:
        place = {"HVDGLOO_RENDEZVOUS": server.endpoint, "HVDGLOO_SECRET": secret.hex()}
        task = ray.remote(num_cpus=1, max_calls=1)(loop)
        joined = [task.remote(place, rank) for rank in range(2)]
        assert ray.get(joined, timeout=PATIENCE_S) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


def test_the_example_learns(cluster: Running) -> None:
    import ray

    done = run_command(
        [sys.executable, "examples/ray_torch_digits.py", "--address", ray.get_runtime_context().gcs_address],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"test accuracy averaged over 2 ranks: ([\d.]+)%\nall ranks hold identical parameters", done.stdout
    )
    assert found is not None, done.stdout
    assert float(found[1]) >= 96.0
