"""Random small programs, compiled: each collective gives what numpy says, whatever precedes it and follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hvdgloo.jax import _primitive as primitive
from hvdgloo.jax._frontend import JaxFrontend
from hvdgloo.types import ReduceOp
from tests.jax.support import on_ranks
from tests.support.selection import extended

Step = tuple[Callable[[JaxFrontend, Any], Any], Callable[[list[Any]], list[Any]]]


def unused(frontend: JaxFrontend, x: Any) -> Any:
    frontend.allreduce(x * 7)
    return x


def in_scan(frontend: JaxFrontend, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (frontend.allreduce(c) + frontend.rank(), None), x, length=2)[0]


def scanned(several: list[Any]) -> list[Any]:
    for _ in range(2):
        several = [np.mean(several, axis=0) + rank for rank in range(len(several))]
    return several


STEPS: list[Step] = [
    (lambda f, x: f.allreduce(x), lambda xs: [np.mean(xs, axis=0)] * len(xs)),
    (lambda f, x: f.allreduce(x, op=ReduceOp.MAX, name="max"), lambda xs: [np.max(xs, axis=0)] * len(xs)),
    (lambda f, x: f.broadcast(x, 1), lambda xs: [xs[1]] * len(xs)),
    (lambda f, x: f.allgather(x[None])[-1] - x, lambda xs: [xs[-1] - x for x in xs]),
    (lambda f, x: f.allgather(f.reducescatter(x, op=ReduceOp.SUM)) / 4, lambda xs: [np.sum(xs, axis=0) / 4] * len(xs)),
    (lambda f, x: f.alltoall(x), lambda xs: [np.concatenate(part) for part in exchanged(xs)]),
    (lambda f, x: jnp.tanh(x) + f.rank(), lambda xs: [np.tanh(x) + rank for rank, x in enumerate(xs)]),
    (unused, lambda xs: xs),
    (in_scan, scanned),
]


def exchanged(several: list[Any]) -> list[Any]:
    """Return the parts that each rank receives."""
    parts = [np.split(x, len(several)) for x in several]
    return [[theirs[rank] for theirs in parts] for rank in range(len(several))]


@pytest.mark.parametrize("callbacks", [False, True], ids=["calls", "callbacks"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", [0, *extended(*range(1, 10))])
def test_random_programs(seed: int, size: int, callbacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if callbacks:
        monkeypatch.setattr(primitive, "_uses_callbacks", lambda: True)
    generator = np.random.default_rng(seed)
    chosen = [STEPS[index] for index in generator.integers(len(STEPS), size=12)]
    values = list(generator.normal(size=(size, 6)))
    expected = values
    for _, simulate in chosen:
        expected = simulate(expected)

    def body(frontend: JaxFrontend) -> None:
        def program(x: Any) -> Any:
            for call, _ in chosen:
                x = call(frontend, x)
            return x

        given = jnp.asarray(values[frontend.rank()])
        for function in (program, jax.jit(program), jax.jit(jax.checkpoint(program))):
            np.testing.assert_allclose(function(given), expected[frontend.rank()], rtol=1e-9, atol=1e-9)

    on_ranks(body, size)
