"""Training steps in JAX: collectives inside the compiled step and outside of it, and JAX's own collectives.

    python benchmarks/jax_steps.py [--np 2] [--jobs 3] [--rounds 20] [--quick] [--json FILE]

A network of 5 million parameters on made-up data, batches of 32, one thread for each rank's XLA. In a job of hvdgloo's
the ways are "inside" (DistributedOptimizer in the compiled step), "outside" (one compiled function for gradients, which
are then reduced, and one that applies them) and "none" (ranks do not communicate: nothing can be faster). A round is
one step of each in turn, after a barrier; and also "allreduce" (of numpy's arrays of the parameters' sizes, in place),
and an allreduce of one number, compiled ("tiny jit"), of a jax.Array ("tiny jax") and of numpy's ("tiny numpy").

hvdgloo.jax refuses processes that jax.distributed has joined. So pmean by JAX's own Gloo collectives is measured in
other jobs, next to a "none" of their own, and these jobs alternate with hvdgloo's.

The time of a step is the slowest rank's. Least and median over all jobs are printed, then ratios of the least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hvdgloo.run

WIDTHS = (1024, 1600, 1600, 512)
QUICK_WIDTHS = (64, 64, 16)
BATCH = 32
RATIOS = (
    ("inside", "outside", 0.8),
    ("tiny jit", "tiny numpy", 3.0),
    ("tiny jax", "tiny numpy", 3.0),
)
"""Pairs of ways, and what the first is meant to take at most, in times the second."""

Times = dict[str, list[float]]


def worker(rounds: int, widths: tuple[int, ...], joined: bool) -> Times:
    """Measure one rank's seconds by way.

    Args:
        rounds: how often each way is measured.
        widths: of the network's layers.
        joined: measure jax.distributed's collectives, not hvdgloo's.
    """
    import socket

    import hvdgloo.numpy

    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    import jax

    hvdgloo.numpy.init()
    if joined:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(hvdgloo.numpy.broadcast_object(address), hvdgloo.numpy.size(), hvdgloo.numpy.rank())
    ways = _of_jax(widths) if joined else _of_hvdgloo(widths)
    seconds: Times = {way: [] for way in ways}
    for turn in range(rounds + 3):  # the first three are not counted
        for way, call in ways.items():
            hvdgloo.numpy.barrier()
            begin = time.perf_counter()
            call()
            if turn >= 3:
                seconds[way].append(time.perf_counter() - begin)
    hvdgloo.numpy.barrier()
    if joined:
        jax.distributed.shutdown()
    hvdgloo.numpy.shutdown()
    return seconds


def _of_hvdgloo(widths: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import hvdgloo.jax as hvd
    import hvdgloo.numpy

    parameters, images, digits = _data(widths)
    sgd = optax.sgd(0.01, momentum=0.9)
    gradients_of = jax.jit(jax.value_and_grad(_loss))

    @jax.jit  # type: ignore[untyped-decorator]
    def apply(parameters: Any, state: Any, gradients: Any) -> Any:
        updates, state = sgd.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def outside(parameters: Any, state: Any, images: Any, digits: Any) -> Any:
        _, gradients = gradients_of(parameters, images, digits)
        return apply(parameters, state, hvd.allreduce(gradients, name="outside"))

    gradients = [np.ones(leaf.shape, np.float32) for leaf in jax.tree.leaves(parameters)]
    one = np.ones(1, np.float32)
    one_of_jax = jnp.ones(1)
    tiny = jax.jit(lambda x: hvd.allreduce(x, name="tiny jit"))
    return {
        "none": _repeated(_compiled(sgd), parameters, sgd.init(parameters), images, digits),
        "inside": _repeated(
            _compiled(hvd.DistributedOptimizer(sgd)),
            parameters,
            hvd.DistributedOptimizer(sgd).init(parameters),
            images,
            digits,
        ),
        "outside": _repeated(outside, parameters, sgd.init(parameters), images, digits),
        "allreduce": lambda: hvdgloo.numpy.grouped_allreduce_(gradients, name="allreduce"),
        "tiny jit": lambda: tiny(one_of_jax).block_until_ready(),
        "tiny jax": lambda: hvd.allreduce(one_of_jax, name="tiny jax"),
        "tiny numpy": lambda: hvdgloo.numpy.allreduce(one, name="tiny numpy"),
    }


def _of_jax(widths: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    parameters, images, digits = _data(widths)
    sgd = optax.sgd(0.01, momentum=0.9)
    mesh = Mesh(np.array(jax.devices()), ("rank",))
    everywhere, rows = PartitionSpec(), PartitionSpec("rank")

    def shared(tree: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda a: jax.make_array_from_process_local_data(sharding, np.asarray(a)), tree)

    def step(parameters: Any, state: Any, images: Any, digits: Any) -> Any:
        gradients = jax.lax.pmean(jax.grad(_loss)(parameters, images, digits), "rank")
        updates, state = sgd.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    specs = (everywhere, everywhere, rows, rows)
    whole = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(everywhere, everywhere), check_vma=False)
    return {
        "none": _repeated(_compiled(sgd), parameters, sgd.init(parameters), images, digits),
        "jax.distributed": _repeated(
            jax.jit(whole, donate_argnums=(0, 1)),
            shared(parameters, everywhere),
            shared(sgd.init(parameters), everywhere),
            shared(images, rows),
            shared(digits, rows),
        ),
    }


def _data(widths: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return the first parameters, and a batch."""
    import jax.numpy as jnp
    import numpy as np

    import hvdgloo.numpy

    made = np.random.default_rng(hvdgloo.numpy.rank())
    parameters = [
        {
            "weight": jnp.asarray(made.normal(size=(rows, columns)) / rows**0.5, jnp.float32),
            "bias": jnp.zeros(columns, jnp.float32),
        }
        for rows, columns in itertools.pairwise(widths)
    ]
    images = jnp.asarray(made.normal(size=(BATCH, widths[0])), jnp.float32)
    return parameters, images, jnp.arange(BATCH) % widths[-1]


def _loss(parameters: Any, images: Any, digits: Any) -> Any:
    import jax.numpy as jnp
    import optax

    x = images
    for layer in parameters[:-1]:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    x = x @ parameters[-1]["weight"] + parameters[-1]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(x, digits).mean()


def _compiled(optimizer: Any) -> Any:
    import jax
    import optax

    def step(parameters: Any, state: Any, images: Any, digits: Any) -> Any:
        gradients = jax.grad(_loss)(parameters, images, digits)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def _repeated(step: Callable[..., Any], parameters: Any, state: Any, images: Any, digits: Any) -> Callable[[], None]:
    """Return a function that takes the next step, and waits for its results."""
    import jax

    # Copies, since the step takes over the memory of what it is given.
    now = jax.tree.map(lambda array: array.copy(), (parameters, state))

    def call() -> None:
        nonlocal now
        now = jax.block_until_ready(step(*now, images, digits))

    return call


def report(hvdgloos: Mapping[str, list[float]], jaxs: Mapping[str, list[float]]) -> list[str]:
    """Return the lines to print."""
    lines = [
        f"{title:>9} {way:<16} least {min(each) * 1e3:9.3f} ms, median {statistics.median(each) * 1e3:9.3f} ms"
        for title, times in (("hvdgloo", hvdgloos), ("jax", jaxs))
        for way, each in times.items()
    ]
    least = {way: min(each) for way, each in hvdgloos.items()}
    ratios = [(f"{way} / {other}", least[way] / least[other], aim) for way, other, aim in RATIOS]
    cost = least["inside"] - least["none"]
    ratios.append(("(inside - none) / allreduce", cost / least["allreduce"], 1.3))
    # Each job's least is seen in relation to its own "none": what else the machine does may change from job to job.
    own = min(jaxs["jax.distributed"]) / min(jaxs["none"])
    ratios.append(("inside / jax.distributed, each in times its none", least["inside"] / least["none"] / own, 0.5))
    return lines + [f"{what}: {ratio:.2f} (aim: at most {aim})" for what, ratio, aim in ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each kind, in turn (default: 3)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds in each job (default: 20)")
    parser.add_argument("--quick", action="store_true", help="one job of each, a small network, and 3 rounds")
    parser.add_argument("--json", metavar="FILE", help="write all times there")
    given = parser.parse_args()
    jobs, rounds, widths = (1, 3, QUICK_WIDTHS) if given.quick else (given.jobs, given.rounds, WIDTHS)
    found: tuple[Times, Times] = {}, {}
    for _ in range(jobs):
        for joined, times in enumerate(found):
            ranks = hvdgloo.run.run(worker, args=(rounds, widths, bool(joined)), np=given.np)
            for way in ranks[0]:
                times.setdefault(way, []).extend(map(max, zip(*(rank[way] for rank in ranks), strict=True)))
    print("\n".join(report(*found)))
    if given.json:
        Path(given.json).write_text(json.dumps({"hvdgloo": found[0], "jax.distributed": found[1]}, indent=1))


if __name__ == "__main__":
    main()
