"""OuterOptimizer: the outer steps of any training loop, on numpy's arrays and whatever can be read as one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError, MismatchError
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.numpy._outer import OuterOptimizer
from tests.support.world import World

MakeWorld = Callable[..., World]

USED_AGAIN = True


def outer_of(context: Context, variables: Any, sync_every: int, **options: Any) -> OuterOptimizer:
    class Own(OuterOptimizer):
        frontend = Frontend(NumpyAdapter(), lambda: context)

    return Own(variables, sync_every, **options)


class Assigned:
    """A variable of another framework's shape: it is read by one method and written by another."""

    def __init__(self, value: Any) -> None:
        self._value = np.array(value, np.float32)

    def numpy(self) -> Any:
        return self._value.copy()

    def assign(self, value: Any) -> None:
        assert value.dtype == np.float32
        self._value = value


def test_variables_of_all_kinds_are_averaged_every_so_many_steps(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[bytes]:
        array, half, single, other = np.zeros(5), np.ones(3, np.float16), np.array(2.0), Assigned([1.0, 2.0])
        mean_of = np.zeros(2)
        given = {"a": array, "h": half, "s": single, "o": other}
        outer = outer_of(context, given, 2, statistics=[mean_of], outer_lr=0.5)
        for done in range(1, 5):
            array += context.rank + 1
            half += context.rank
            single += context.rank
            mean_of += context.rank
            other.assign(other.numpy() - np.float32(context.rank))
            outer.step()
            assert outer.is_synchronized == (done % 2 == 0)
        mean = (context.size - 1) / 2
        np.testing.assert_allclose(array, 2 * (mean + 1))  # the outer rate is 0.5
        np.testing.assert_allclose(half, 1 + 2 * mean)
        np.testing.assert_allclose(single, 2 + 2 * mean)
        np.testing.assert_allclose(other.numpy(), [1 - 2 * mean, 2 - 2 * mean])
        np.testing.assert_allclose(mean_of, 4 * mean)
        return [array.tobytes(), half.tobytes(), single.tobytes(), other.numpy().tobytes()]

    for size in (1, 3):
        results = world(size).run(rank_body)
        assert all(result == results[0] for result in results)


@pytest.mark.parametrize("sizes", [[9, 3], [9, 9, 3, 2], [9, 9, 9, 3], [3, 9, 2]], ids=str)
def test_variables_too_large_for_one_operation_are_averaged_all(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr("hvdgloo._training.outer._GROUP_BYTES", 8 * 8)  # nine float64 exceed it

    def rank_body(context: Context) -> None:
        variables = [np.full(size, float(number)) for number, size in enumerate(sizes)]
        outer = outer_of(context, variables, 2)
        for _ in range(2):
            for variable in variables:
                variable += context.rank
            outer.step()
        for number, variable in enumerate(variables):
            np.testing.assert_allclose(variable, number + (context.size - 1))

    world(2).run(rank_body)


def test_large_changes_are_applied_though_their_sum_is_infinite(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        variable = np.zeros(4, np.float32)
        outer = outer_of(context, [variable], 1)
        variable += np.float32(2e38)
        outer.step()
        np.testing.assert_array_equal(variable, np.float32(2e38))

    world(1).run(rank_body)


@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_loop_equals_an_uninterrupted_one_bit_by_bit(world: MakeWorld, at: int) -> None:
    options: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_clip": 3.0}

    def train(outer: OuterOptimizer, weights: Any, random: np.random.Generator, steps: int) -> None:
        for _ in range(steps):
            weights -= random.standard_normal(weights.shape).astype(np.float32)
            outer.step()

    def rank_body(context: Context) -> None:
        weights, random = np.zeros(100, np.float32), np.random.default_rng(context.rank)
        outer = outer_of(context, [weights], 2, **options)
        train(outer, weights, random, at)
        saved = copy.deepcopy((weights, random, outer.state_dict()))
        train(outer, weights, random, 5)
        outer.finish()
        again, random, state = saved
        resumed = outer_of(context, [again], 2, **options)
        resumed.load_state_dict(state)
        train(resumed, again, random, 5)
        resumed.finish()
        assert (again == weights).all()

    # In the midst of a round each rank begins with weights of its own, which a new one takes for a mistake.
    world(2, check_weights=at == 2).run(rank_body)


@pytest.mark.parametrize(
    ("variables", "fact"),
    [
        ([], "no variables"),
        ([np.arange(3)], "int64"),
        ([3.0], "cannot be written"),
        ([np.broadcast_to(np.zeros(1), 3)], "cannot be written"),
    ],
    ids=["none", "integers", "a number", "read-only"],
)
def test_variables_that_cannot_be_averaged_are_refused(world: MakeWorld, variables: Any, fact: str) -> None:
    def rank_body(context: Context) -> None:
        with pytest.raises(InvalidArgumentError, match=fact):
            outer_of(context, variables, 2)

    world(1).run(rank_body)


def test_ranks_with_other_variables_are_refused_alike(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        with pytest.raises(
            MismatchError, match=r"the trained variables: 0: float64\[2\] on rank 0, float64\[3\] on rank 1"
        ):
            outer_of(context, [np.zeros(2 + context.rank)], 2)

    world(2).run(rank_body)


def test_steps_and_outer_steps_of_the_loop_are_counted(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        array = np.zeros(5)
        outer = outer_of(context, [array], 2)
        before = context.metrics()
        for _ in range(4):
            array += context.rank
            outer.step()
        change = context.metrics() - before
        assert (change.steps, change.outer_steps, change.outer_bytes) == (4, 2, 2 * array.nbytes)

    world(2).run(rank_body)
