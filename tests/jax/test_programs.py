"""Programs on ranks that are processes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.jax.support import caching_in
from tests.support.examples import check_learned
from tests.support.frameworks import need_installed
from tests.support.launching import Launcher, clean_environment, run_command
from tests.support.tutorials import follow, sections

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
needs_optax = pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="optax is not installed")
ENV = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}


@needs_optax
@pytest.mark.timeout(130)  # two jobs; mostly a fifth of it
def test_the_example_learns_to_read_and_goes_on_from_its_checkpoint(launcher: Launcher) -> None:
    program, saved = str(EXAMPLES / "jax_digits.py"), str(launcher.folder / "digits.pickle")
    env = {**ENV, **caching_in(launcher.folder / "cache")}  # the second job need not compile what the first one has
    for epochs in ("1", "7"):
        done = launcher.run("-np", "2", program, "--epochs", epochs, "--checkpoint", saved, env=env, timeout=58)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after epoch 1" in done.stdout
    check_learned(done)


@pytest.mark.timeout(130)  # two jobs; mostly a fifth of it
def test_the_example_of_flax_nnx_learns_to_read_and_goes_on_from_its_checkpoint(launcher: Launcher) -> None:
    need_installed("flax")
    program, saved = str(EXAMPLES / "jax_nnx_digits.py"), launcher.folder / "saved"
    env = {**ENV, **caching_in(launcher.folder / "cache")}  # the second job need not compile what the first one has
    for ranks, epochs in (("1", "1"), ("2", "6")):
        done = launcher.run("-np", ranks, program, "--epochs", epochs, "--checkpoints", str(saved), env=env, timeout=58)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after epoch 1" in done.stdout
    check_learned(done)
    assert sorted(checkpoint.name for checkpoint in saved.iterdir()) == ["5", "6"]


@needs_optax
@pytest.mark.timeout(130)  # seconds; mostly a tenth of it
def test_the_benchmark_measures_each_way(tmp_path: Path) -> None:
    found, program = tmp_path / "times.json", EXAMPLES.parent / "benchmarks/jax_steps.py"
    command = [sys.executable, str(program), "--quick", "--json", str(found)]
    done = run_command(command, env=clean_environment(), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(found.read_text())
    alone = ["allreduce", "tiny jit", "tiny jax", "tiny numpy"]
    assert list(measured["hvdgloo"]) == ["none", "inside", "outside", *alone]
    assert list(measured["jax.distributed"]) == ["none", "jax.distributed"]
    times = [seconds for job in measured.values() for seconds in job.values()]
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in times)
    least = {way: min(seconds) for way, seconds in measured["hvdgloo"].items()}
    assert f"inside / outside: {least['inside'] / least['outside']:.2f} (aim: at most 0.8)" in done.stdout


UNUSED = """
import jax, jax.numpy as jnp
import hvdgloo.jax as hvd

hvd.init()

@jax.jit
def slow(x):
    for _ in range(10):
        x = x @ x / 800
    return hvd.allreduce(x, name="slow")

result = slow(jnp.ones((800, 800)))
if hvd.rank() == 0:
    print("result", float(result[0, 0]))  # and rank 1 ends without having looked
"""


def test_a_result_that_one_rank_does_not_use_arrives_on_the_others(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(UNUSED), env=ENV, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "result 1.0" in done.stdout
    assert "Error" not in done.stderr


KILLED = """
import os
import jax, jax.numpy as jnp
import hvdgloo.jax as hvd

hvd.init()
step = hvd.errors_of(jax.jit(lambda x: hvd.allreduce(x, name="step")))
try:
    x = step(jnp.ones(300_000))
    if hvd.rank() == 1:
        os._exit(0)  # as if killed, but the launcher does not end the job; rank 0 may still be in its first step
    step(x)
except hvd.HorovodInternalError as error:
    print("caught", type(error).__name__, flush=True)
    raise
"""


def test_a_killed_rank_is_our_error_at_once_and_nothing_hangs_at_exit(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(KILLED), env=ENV, timeout=50)
    assert done.returncode == 1
    assert "caught PeerLostError" in done.stdout
    assert "terminate called" not in done.stderr


CACHED = """
import sys
import jax, jax.numpy as jnp
import hvdgloo.jax as hvd

hvd.init()
jax.config.update("jax_compilation_cache_dir", sys.argv[1] + str(hvd.rank()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
print("sum", jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.ones(3)).tolist(), "hits", len(hits) > 0)
"""


def test_compiled_functions_come_from_jaxs_cache(launcher: Launcher) -> None:
    script, folder = launcher.script(CACHED), str(launcher.folder / "cache")
    for hits in (False, True):
        done = launcher.run("-np", "2", script, folder, env=ENV, timeout=50)
        assert done.stdout.count(f"sum [2.0, 2.0, 2.0] hits {hits}") == 2, done.stdout + done.stderr


DEVICES = """
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import hvdgloo.jax as hvd

hvd.init()
first, second = jax.devices()
spread = jax.device_put(jnp.ones(2), NamedSharding(Mesh([first, second], "x"), PartitionSpec("x")))
mesh = Mesh([first, second], "x")
mapped = jax.shard_map(hvd.allreduce, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
for call in (hvd.allreduce, jax.jit(hvd.allreduce), mapped, jax.pmap(hvd.allreduce)):
    try:
        jax.block_until_ready(call(spread))
    except ValueError as error:
        print(error)
on_second = jax.device_put(jnp.ones(4), second)
for call in (hvd.allreduce, jax.jit(hvd.allreduce)):
    print(call(on_second).devices() == {second})
"""


def test_several_devices_in_one_call_are_refused(launcher: Launcher) -> None:
    env = {**ENV, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = launcher.run("-np", "1", launcher.script(DEVICES), env=env, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "the array lies on 2 devices; start one process per device" in done.stdout
    refusal = "a function compiled for 2 devices has a collective; start one process per device"
    assert done.stdout.count(refusal) == 3, done.stdout  # jit, shard_map and pmap
    assert done.stdout.count("True") == 2


SINGLE_CORE = """
import os, threading
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax, jax.numpy as jnp
import hvdgloo.jax as hvd

jax.config.update("jax_cpu_enable_async_dispatch", False)
hvd.init()
begun = threading.Event()
found = {}

def run(name):
    def step(x):
        begun.set()  # traced, and about to run
        return hvd.allreduce(hvd.allreduce(x, name=name), name=name + " again")
    found[name] = float(jax.jit(step)(jnp.full(300_000, 1.0 + hvd.rank()))[0])

names = ["a", "b"] if hvd.rank() else ["b", "a"]
threads = [threading.Thread(target=run, args=(name,)) for name in names]
threads[0].start()
begun.wait()  # the other rank is in the other function
hvd.broadcast_object(None, name="both")
threads[1].start()
for thread in threads:
    thread.join()
print(sorted(found.items()))
"""


@pytest.mark.extended
def test_two_threads_on_a_single_core_each_run_their_own_function(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(SINGLE_CORE), env=ENV, timeout=50)
    assert done.stdout.count("[('a', 1.5), ('b', 1.5)]") == 2, done.stdout + done.stderr


SECTIONS = sections("docs/tutorial-jax.md")


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.timeout(130)  # seconds for up to two jobs; mostly a tenth of it
def test_the_tutorial_of_jax(section: str, tmp_path: Path) -> None:
    for package in SECTIONS[section]:
        need_installed(package)
    follow("docs/tutorial-jax.md", tmp_path, env=ENV, section=section)
