"""Programs for JAX on ranks that are processes: one is killed in a compiled step, others come, and programs end."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.jax.support import caching_in
from tests.support import warm
from tests.support.examples import check_elastic_demo
from tests.support.frameworks import need_installed
from tests.support.job import Job

pytestmark = pytest.mark.timeout(120)  # seconds; mostly a tenth of it
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENVIRON = {"JAX_PLATFORMS": "cpu"}

LOST = """
    import os, signal, time
    import jax, jax.numpy as jnp
    import hvdgloo.jax as hvd
    from hvdgloo._platform.error_tokens import recall

    hvd.init()
    killed = os.environ["JOB_FOLDER"] + "/killed"

    @jax.jit
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: hvd.allreduce(x * 1.5), x)

    def failure_of(function):
        try:
            while True:
                function()
        except Exception as error:
            return error

    jax.block_until_ready(step(jnp.ones(1000)))
    if hvd.rank() == 1:
        # Rank 0 waits in its compiled step for this one.
        with open(killed, "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure_of(lambda: jax.block_until_ready(step(jnp.ones(1000))))
    took = time.time() - float(open(killed).read())
    print("compiled:", type(error).__name__, type(recall(str(error))).__name__, "soon" if took < 10 else took)
    print("again:", type(recall(str(failure_of(lambda: jax.block_until_ready(step(jnp.ones(1000))))))).__name__)
    print("eager:", type(failure_of(lambda: hvd.allreduce(jnp.ones(3)))).__name__)
    step(jnp.ones(1000))  # whose result is not used
"""


def test_the_loss_of_a_rank_ends_a_compiled_step_at_once(tmp_path: Path) -> None:
    with Job(2, LOST, tmp_path, python=python(), **ENVIRON) as job:
        rank0, rank1 = job.wait(60)
    assert rank1.returncode == -9, rank1
    assert (rank0.returncode, rank0.stdout.splitlines()) == (
        0,
        ["compiled: JaxRuntimeError PeerLostError soon", "again: PeerLostError", "eager: PeerLostError"],
    ), rank0


ELASTIC = """
    import os, signal
    import jax, jax.numpy as jnp
    import numpy as np
    import hvdgloo.jax as hvd

    hvd.init()
    folder = os.environ["JOB_FOLDER"]
    # A newcomer runs this before it is in elastic.run, alone.
    assert float(hvd.allreduce(jnp.ones(()), op=hvd.Sum)) == (2.0 if os.environ.get("FIRST") else 1.0)
    traced, resets = [], []

    @jax.jit
    def step(params, velocity, x):
        traced.append("step")
        gradients = hvd.allreduce({"weight": params["weight"] * 0 + x})
        velocity = velocity + gradients["weight"]
        return {"weight": params["weight"] - gradients["weight"]}, velocity

    @jax.jit
    def everyones(x):
        traced.append("everyones")
        return hvd.allgather(x[None])

    @jax.jit
    def place(x):
        ranks = hvd.global_process_set
        return x + jnp.array([hvd.rank(), hvd.size(), hvd.local_size(), ranks.rank(), ranks.size(), len(ranks.ranks)])

    def changes(sizes):
        return [size for size, before in zip(sizes, [0, *sizes]) if size != before]

    @hvd.elastic.run
    def train(state):
        while True:
            so_far = changes(state.sizes)
            is_time = hvd.size() == 2 and so_far == [2] and len(state.sizes) == 6
            if is_time and hvd.rank() != int(os.environ["SURVIVOR"]):
                os.kill(os.getpid(), signal.SIGKILL)
            params, velocity = step(state.params, state.velocity, hvd.rank() + 1.0)
            if os.environ.get("GATHERS"):
                assert everyones(velocity).shape == (hvd.size(), 3)
            if os.environ.get("ASKS"):
                rank, size = hvd.rank(), hvd.size()
                assert place(0).tolist() == [rank, size, size, rank, size, size]
            state.params, state.velocity = params, velocity
            state.sizes.append(hvd.size())
            state.reached += 1.0 if hvd.size() == 1 else 1.5  # the mean of the ranks' contributions
            so_far = changes(state.sizes)
            if so_far == [2, 1] and not os.path.exists(folder + "/alone"):
                open(folder + "/alone.part", "w").close()
                os.rename(folder + "/alone.part", folder + "/alone")
            state.commit()
            if so_far == [2, 1, 2] and state.sizes[-5:] == [2] * 5:
                return

    params = {"weight": jnp.zeros(3)}
    state = hvd.elastic.JaxState(params=params, velocity=jnp.zeros(3), sizes=[], reached=0.0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    np.testing.assert_allclose(state.params["weight"], np.full(3, -state.reached), rtol=1e-6)
    np.testing.assert_allclose(state.velocity, np.full(3, state.reached), rtol=1e-6)
    print(changes(state.sizes), resets, traced.count("step"), flush=True)
"""


@pytest.mark.parametrize("survivor", [0, 1])
def test_an_elastic_job_goes_on_without_compiling_again(tmp_path: Path, survivor: int) -> None:
    assert follow_changes(tmp_path, survivor=survivor) == 1


@pytest.mark.parametrize("uses", ["GATHERS", "ASKS"])
def test_an_elastic_job_compiles_again_what_has_its_size_in_shapes_or_numbers(tmp_path: Path, uses: str) -> None:
    assert follow_changes(tmp_path, survivor=0, **{uses: "1"}) > 1


def follow_changes(folder: Path, *, survivor: int, **environ: str) -> int:
    """Run a job of two, of which one goes and another comes; return how often the survivor has traced its step."""
    epochs = ElasticEpochs(Rules(size=2, smallest=1, launched=False, failures_per_host=99))
    environ |= {**ENVIRON, "SURVIVOR": str(survivor)}
    with Job(0, ELASTIC, folder, python=python(), elastic=epochs, **environ) as job:
        job.add(FIRST="1")
        job.add(FIRST="1")
        job.wait_for_file("alone", timeout=50)
        job.add()
        ended = job.wait(60)
    assert sorted(end.returncode for end in ended) == [-9, 0, 0], ended
    assert ended[2].stdout == "[2, 1, 2] [2] 1\n", ended
    (said,) = [end.stdout for end in ended[:2] if end.stdout]
    before, times = said.split("] ")[:2], said.split("] ")[2]
    assert before == ["[2, 1, 2", "[1, 2"], ended
    return int(times)


@pytest.mark.timeout(180)  # mostly a tenth of it
def test_the_elastic_example_loses_a_worker_and_gains_others(tmp_path: Path) -> None:
    """Newcomers find compiled functions in JAX's cache."""
    need_installed("optax")
    # The others wait for newcomers: they would have trained all epochs before these had imported JAX.
    env = {**ENVIRON, **caching_in(tmp_path / "cache"), "HVDGLOO_ELASTIC_JOIN": "now"}
    check_elastic_demo("jax_digits_elastic.py", python(), env, timeout=170)


ENDS = """
    import gc, os, threading
    import jax, jax.numpy as jnp
    import hvdgloo.jax as hvd

    hvd.init()

    @jax.jit
    def step(x):
        return hvd.allreduce(x) + 1

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    x = jnp.ones(250_000)  # 1 MB: it does not travel with the agreement, and results come by futures
    for count in (50, 200):
        for _ in range(count):
            x = step(x) * 0
        jax.block_until_ready(x)
        gc.collect()
        if count == 50:
            before = resident()
    print("grown", (resident() - before) // 1_000_000 < 50, flush=True)

    # A function that waits for a rank that never comes.
    traced = threading.Event()

    @jax.jit
    def never(x):
        traced.set()
        return hvd.allreduce(x, name="never")

    if hvd.rank() == 0:
        threading.Thread(target=lambda: never(jnp.ones(3)), daemon=True).start()
        traced.wait()
    hvd.broadcast_object("so far", name="so far")
    print("end", flush=True)
"""


def test_futures_are_freed_and_a_call_that_waits_does_not_hold_the_end(tmp_path: Path) -> None:
    with Job(2, ENDS, tmp_path, python=python(), **ENVIRON) as job:
        ended = job.wait(60)
    assert [(end.returncode, end.stdout.split()) for end in ended] == [(0, ["grown", "True", "end"])] * 2, ended


def python() -> str:
    """Return an interpreter for workers. Threads of XLA's do not survive a fork, so ``jax`` is imported, not used."""
    return warm.python("hvdgloo.jax", **ENVIRON)
