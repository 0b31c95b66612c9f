"""Elastic states of JAX: what is saved, restored and sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hvdgloo._collectives.compression import NoneCompressor
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import global_process_set
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._job import process
from hvdgloo._job.context import Context
from hvdgloo.errors import MismatchError
from hvdgloo.jax import _retracing, elastic
from hvdgloo.jax._adapter import JaxAdapter
from hvdgloo.jax._frontend import JaxFrontend
from hvdgloo.jax._optimizer import reduced
from hvdgloo.jax.elastic import JaxState
from hvdgloo.numpy import _frontend as numpy_frontend
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.rendezvous._elastic.messages import Alone
from hvdgloo.types import Collective
from tests.jax.support import on_ranks
from tests.support.world import World


class Moments(NamedTuple):
    """An optimizer's state, as optax makes them."""

    count: Any
    mean: Any


def parameters(value: float, dtype: Any = jnp.float32) -> Any:
    return {"kernel": jnp.full((3, 2), value, dtype), "bias": (jnp.asarray(value, dtype), None)}


def moments(value: int) -> Moments:
    return Moments(jnp.asarray(value, jnp.int32), parameters(value))


def assert_equal(tree: Any, expected: Any) -> None:
    """Compare structure, values, and types."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert type(leaf) is type(wanted)
        if isinstance(leaf, (jax.Array, np.ndarray)):
            assert (leaf.dtype, leaf.shape) == (wanted.dtype, wanted.shape)
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, wanted = jax.random.key_data(leaf), jax.random.key_data(wanted)
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))


def on(context: Context, state: JaxState) -> JaxState:
    """Put a state into a job of ranks as threads."""
    frontend = Frontend(NumpyAdapter(), lambda: context)
    state._frontend, state._context = frontend, lambda: context
    state._bcast_object, state._rank = frontend.broadcast_object, frontend.rank
    return state


def sync_all(states: list[JaxState], root: int) -> None:
    def sync(context: Context) -> None:
        state = on(context, states[context.rank])
        with state._progress.syncing(newest=1, root=root, unchanged=False):
            state.sync()

    with World(len(states), "inline") as world:
        world.run(sync)


TREES: dict[str, Callable[[int], Any]] = {
    "parameters": parameters,
    "bfloat16": lambda value: parameters(value, jnp.bfloat16),
    "four bits": lambda value: jnp.full((3,), value, jnp.int4),
    "float8": lambda value: jnp.full((2, 2), value, jnp.float8_e4m3fn),
    "optimizer": moments,
    "typed key": jax.random.key,
    "keys in a tree": lambda value: {"noise": jax.random.split(jax.random.key(value), 3)},
    "another generator": lambda value: jax.random.key(value, impl="rbg"),
    "numpy": lambda value: [np.full(2, value, np.int64), jnp.full(2, value)],
    "nothing": lambda value: jnp.zeros((0, value)),
    "plain": lambda value: {"losses": [0.5] * value, "name": "of no array"},
}


@pytest.mark.parametrize("kind", TREES)
def test_a_state_returns_to_its_last_commit(kind: str) -> None:
    make = TREES[kind]
    state: Any = JaxState(tree=make(1), step=1)
    state.tree, state.step = make(2), 2
    state.restore()
    assert_equal([state.tree, state.step], [make(1), 1])
    state.tree, state.step = make(2), 2
    state.save()
    state.tree, state.step = make(3), 3
    for _ in range(2):
        state.restore()
        assert_equal([state.tree, state.step], [make(2), 2])


def test_a_dictionary_that_jax_cannot_sort_is_a_plain_object() -> None:
    state: Any = JaxState(seen={"a": [1], 2: [3]})
    state.seen["a"].append(4)
    state.restore()
    assert state.seen == {"a": [1], 2: [3]}


def test_what_was_restored_is_not_written_by_the_next_commit() -> None:
    state: Any = JaxState(params=jnp.zeros(4096))
    state.restore()
    restored = state.params
    state.params = jnp.ones(4096)
    state.save()
    np.testing.assert_array_equal(restored, np.zeros(4096))


def test_a_commit_takes_the_memory_of_the_one_before() -> None:
    state: Any = JaxState(params=parameters(0), opt_state=moments(0))
    kept = [array.ctypes.data for array in state._kept]
    assert len(kept) == 5
    state.params, state.opt_state = parameters(1), moments(1)
    state.save()
    assert [array.ctypes.data for array in state._kept] == kept


def test_arrays_return_to_the_device_that_they_were_put_on() -> None:
    device = jax.devices("cpu")[-1]
    state: Any = JaxState(params=jax.device_put(jnp.ones(3), device), other=jnp.ones(3))
    state.restore()
    assert state.params.committed
    assert state.params.devices() == {device}
    assert not state.other.committed


@pytest.mark.parametrize("kind", TREES)
def test_newcomers_get_the_newest_trees(kind: str) -> None:
    make = TREES[kind]
    states: list[Any] = [JaxState(tree=make(rank), step=rank) for rank in (3, 5)]
    states[1].tree, states[1].step = make(7), 7
    sync_all(states, root=1)
    for state in states:
        assert_equal([state.tree, state.step], [make(7), 7])
        state.tree = make(2)
        state.restore()
        assert_equal([state.tree, state.step], [make(7), 7])


def test_a_newcomer_gets_a_tree_that_it_has_not_made_itself() -> None:
    """Such as the best parameters so far, of which there are none when a program begins."""
    states: list[Any] = [JaxState(best=None, params=parameters(1)), JaxState(best=None, params=parameters(2))]
    states[0].best = parameters(4)
    sync_all(states, root=0)
    for state in states:
        assert_equal([state.best, state.params], [parameters(4), parameters(1)])


def test_workers_that_have_changed_alike_are_alike() -> None:
    """Their fingerprints decide if trees must be sent when a job's workers have changed."""
    states: list[Any] = [JaxState(params=parameters(1), step=0) for _ in range(2)]
    assert states[0]._fingerprint() == states[1]._fingerprint()
    states[0].params = parameters(2)
    assert states[0]._fingerprint() != states[1]._fingerprint()
    states[1].params = parameters(2)
    assert states[0]._fingerprint() == states[1]._fingerprint()


def test_a_commit_that_fails_changes_nothing() -> None:
    """Of a step that has failed, some results exist and others do not."""

    def body(frontend: JaxFrontend) -> None:
        state: Any = JaxState(first=jnp.zeros(3), second=jnp.zeros(3), step=0)
        failing = jax.jit(lambda x: frontend.allreduce(x, name="differs"))
        state.first, state.step = jnp.ones(3), 1

        def step() -> None:  # either line may raise: JAX may run small functions at once
            state.second = failing(jnp.ones(3 + frontend.rank()))
            state.save()

        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            step()
        assert isinstance(elastic._failure_in(raised.value), MismatchError)
        state.restore()
        assert_equal([state.first, state.second, state.step], [jnp.zeros(3), jnp.zeros(3), 0])
        # Nor does the failure return with the next function.
        assert jax.jit(frontend.allreduce)(jnp.ones(2)).tolist() == [1.0, 1.0]

    on_ranks(body)


PLAN = Alone(rank=1, size=3, local_rank=1, local_size=2, cross_rank=0, cross_size=2)
SIZED: dict[str, Callable[[JaxFrontend, Any], Any]] = {
    "an allgather": lambda frontend, x: frontend.allgather(x),
    "a gradient": lambda frontend, x: jax.grad(lambda x: frontend.broadcast(x, 0).sum())(x),
    "size()": lambda frontend, x: x * frontend.size(),
    "rank()": lambda frontend, x: x * frontend.rank(),
    "local_size()": lambda frontend, x: x * frontend.local_size(),
    "another front-end's size()": lambda frontend, x: x * numpy_frontend.FRONTEND.size(),
    "a process set's size()": lambda frontend, x: x * (global_process_set.size() or 0),
    "a process set's rank()": lambda frontend, x: x * global_process_set.rank(),
    "an optimizer of a single process": lambda frontend, x: reduced(
        frontend, x, CollectiveSpec(Collective.ALLREDUCE), NoneCompressor, 1, global_process_set
    ),
}


@pytest.mark.parametrize("kind", [*SIZED, "an allreduce"])
def test_functions_are_traced_again_where_they_depend_on_sizes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    with World(1, "inline") as world:
        first, second = world.contexts[0], copy.copy(world.contexts[0])
        second.plan = PLAN  # so it tells other numbers, and its collectives end at once
        frontend = JaxFrontend(JaxAdapter(), process.current)

        @jax.jit
        def step(x: Any) -> Any:
            traced.append(x)
            return SIZED[kind](frontend, x) if kind in SIZED else frontend.allreduce(x)

        def enter(context: Context) -> None:
            monkeypatch.setattr(process, "_current", context)
            _retracing._entered(context)
            step(jnp.ones(3))

        monkeypatch.setattr(_retracing, "_depends", False)
        enter(first)
        enter(first)
        assert len(traced) == 1, "the numbers are the same"
        enter(second)
        assert len(traced) == 1 + (kind in SIZED)


def test_a_newcomer_traces_again_what_it_traced_when_it_was_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told the numbers that it would have, but its collectives had one rank."""
    cleared: list[bool] = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(True))
    monkeypatch.setattr(_retracing, "_depends", True)
    with World(2, "inline") as world:
        formed = world.contexts[0]
        alone = copy.copy(formed)
        alone.plan = Alone(*(getattr(formed, name) for name in Alone.__struct_fields__))
        _retracing._entered(alone)
        del cleared[:]
        monkeypatch.setattr(_retracing, "_depends", True)
        _retracing._entered(formed)
        assert cleared == [True]
