"""Optimizers of optax over several ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hvdgloo.jax as hvd
from hvdgloo.errors import InvalidArgumentError, MismatchError, NotInitializedError
from hvdgloo.jax import _optimizer
from hvdgloo.jax._compression import Compression
from hvdgloo.jax._frontend import JaxFrontend
from tests.jax.support import on_ranks

optax = pytest.importorskip("optax")


def tree_of(rank: int) -> dict[str, Any]:
    return {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3) * (rank + 1), "bias": jnp.ones(3) * rank}, "none": None}


MEAN = {"dense": {"kernel": np.arange(6.0).reshape(2, 3) * 1.5, "bias": np.full(3, 0.5)}, "none": None}


def assert_trees_close(got: Any, expected: Any, rtol: float = 1e-6) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), got, expected)


def with_frontend(frontend: JaxFrontend, **options: Any) -> Any:
    """Return ``distributed_gradients`` on one rank's Frontend."""
    compression = options.pop("compression", Compression.none)
    factor, groups = options.pop("gradient_predivide_factor", 1.0), options.pop("groups", 1)
    process_set = hvd.global_process_set
    operation = _optimizer._operation(hvd.Average, compression, factor, process_set)
    return optax.stateless(
        lambda updates, _: _optimizer.reduced(frontend, updates, operation, compression, groups, process_set)
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"groups": 9}, {"compression": Compression.fp16}, {"gradient_predivide_factor": 4.0}],
    ids=str,
)
def test_gradients_are_averaged(options: dict[str, Any]) -> None:
    def body(frontend: JaxFrontend) -> None:
        gradients = with_frontend(frontend, **options)
        for update in (gradients.update, jax.jit(gradients.update)):
            for _ in range(3):
                updates, _ = update(tree_of(frontend.rank()), gradients.init(None))
                assert_trees_close(updates, MEAN)

    on_ranks(body)


def test_names_tell_paths_shapes_and_types_and_nothing_else() -> None:
    """Ranks may trace differently often; only a tree that differs has another name."""

    def body(frontend: JaxFrontend) -> set[str]:
        gradients = with_frontend(frontend)
        for rank in range(frontend.rank() + 1):
            jax.jit(gradients.update).trace(tree_of(rank), optax.EmptyState())
        jax.jit(lambda tree: gradients.update(tree, optax.EmptyState())[0])(tree_of(0))
        calls = [
            str(eqn.params["call"].name)
            for tree in (tree_of(0), tree_of(1), {"dense": jnp.ones(2)}, {"other": jnp.ones(2)})
            for eqn in jax.make_jaxpr(lambda tree: gradients.update(tree, optax.EmptyState())[0])(tree)
            .jaxpr.eqns[0]
            .params["call_jaxpr"]
            .eqns
        ]
        assert calls[0] == calls[1]
        assert len(set(calls)) == 3
        return set(calls)

    first, second = on_ranks(body)
    assert first == second
    assert all(name.startswith("gradients.") for name in first)


def test_a_step_is_counted_when_its_gradients_have_arrived() -> None:
    def body(frontend: JaxFrontend) -> int:
        gradients = with_frontend(frontend, groups=2)
        update = jax.jit(gradients.update)
        for _ in range(4):
            jax.block_until_ready(update(tree_of(0), optax.EmptyState()))
        counters = frontend.context.engine.counters
        assert counters is not None
        return counters.steps

    assert on_ranks(body) == [4, 4]


def test_steps_in_a_jit_equal_one_process_that_has_all_the_data() -> None:
    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    y = x @ np.arange(5.0, dtype=np.float32)

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ w["w"] + w["b"] - y) ** 2)

    def trained(optimizer: Any, x: Any, y: Any) -> Any:
        parameters = {"w": jnp.zeros(5, jnp.float32), "b": jnp.zeros((), jnp.float32)}

        def step(carry: Any, _: Any) -> Any:
            parameters, state = carry
            updates, state = optimizer.update(jax.grad(loss)(parameters, x, y), state, parameters)
            return (optax.apply_updates(parameters, updates), state), None

        return jax.jit(lambda: jax.lax.scan(step, (parameters, optimizer.init(parameters)), length=20)[0][0])()

    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    expected = trained(plain, x, y)

    def body(frontend: JaxFrontend) -> None:
        mine = slice(frontend.rank(), None, 2)
        assert_trees_close(trained(optax.chain(with_frontend(frontend), plain), x[mine], y[mine]), expected, 1e-5)

    on_ranks(body)


def test_parameters_and_keys_of_the_root_are_returned_on_all_ranks() -> None:
    def body(frontend: JaxFrontend) -> None:
        rank = frontend.rank()
        tree = {**tree_of(rank), "step": rank, "key": jax.random.key(rank)}
        got = _optimizer.broadcast_tree(frontend, tree, 1, hvd.global_process_set)
        assert int(got.pop("step")) == 1
        assert jax.random.key_data(got.pop("key")).tolist() == jax.random.key_data(jax.random.key(1)).tolist()
        assert_trees_close(got, tree_of(1))
        with pytest.raises(MismatchError, match=r"parameters\['w'\]"):
            _optimizer.broadcast_tree(frontend, {"w": jnp.ones(1 + rank)}, 0, hvd.global_process_set)
        with pytest.raises(InvalidArgumentError, match=r"^parameters\['f'\]: |expected an array"):
            _optimizer.broadcast_tree(frontend, {"f": len}, 0, hvd.global_process_set)

    on_ranks(body)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"groups": 0}, "groups must be"),
        ({"op": 77}, "op must be"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be"),
        ({"optimizer": 0.1}, "an optimizer of optax"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_at_once(wrong: dict[str, Any], text: str) -> None:
    arguments = {"optimizer": optax.sgd(0.1), **wrong}
    with pytest.raises(InvalidArgumentError, match=text):
        hvd.DistributedOptimizer(**arguments)


def test_one_process_trains_as_without_hvdgloo_and_passes_add_up() -> None:
    with pytest.raises(NotInitializedError):
        hvd.DistributedOptimizer(optax.sgd(0.1)).update({"w": jnp.ones(2)}, (optax.EmptyState(), optax.EmptyState()))
    hvd.init()
    try:
        optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), backward_passes_per_step=2)
        parameters = {"w": jnp.zeros(2)}
        state = optimizer.init(parameters)
        for expected in (0.0, -0.3):
            updates, state = jax.jit(optimizer.update)({"w": jnp.full(2, 1.0 - 10 * expected / 3)}, state, parameters)
            np.testing.assert_allclose(updates["w"], expected)
    finally:
        hvd.shutdown()


def test_errors_of_a_compiled_function_are_ours_and_the_next_call_works() -> None:
    def body(frontend: JaxFrontend) -> None:
        def product(x: Any, count: Any) -> Any:
            for _ in range(5):
                x = x @ x / x.shape[0]
            return frontend.allreduce(x[:count], name="part") @ x

        x = jnp.ones((500, 500))
        function = jax.jit(product, static_argnums=1)
        with pytest.raises(MismatchError):
            hvd.errors_of(function)(x, 300 + frontend.rank())
        assert float(function(x, 300)[0, 0]) == 500.0
        with pytest.raises(MismatchError), hvd.translated():
            function(x, 200 + frontend.rank())
        assert float(function(x, 300)[0, 0]) == 500.0
        with pytest.raises(ZeroDivisionError), hvd.translated():
            _ = 1 / 0

    on_ranks(body)
