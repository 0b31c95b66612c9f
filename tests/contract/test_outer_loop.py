"""OuterOptimizer: the outer steps of any training loop, on numpy's arrays and whatever can be read as one."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError, MismatchError
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.numpy._outer import OuterOptimizer
from hvdgloo.types import Buffer
from tests.support.world import MakeWorld

USED_AGAIN = True


def outer_of(
    context: Context, variables: Any, sync_every: int, *, adapter: NumpyAdapter | None = None, **options: Any
) -> OuterOptimizer:
    class Own(OuterOptimizer):
        frontend = Frontend(adapter or NumpyAdapter(), lambda: context)

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


# Fragments and overlap ------------------------------------------------------------------------------------------------

COUNTS = (6, 1, 3, 2, 12)
"""Elements of the variables: half of them in the last one, a fragment of its own."""


def inner_step(variables: Any, rank: int) -> None:
    """Change what a rank has, in a way that depends on it."""
    for number, variable in enumerate(variables):
        variable += 0.25 * (rank + number + 1 - variable)


def loop_by_hand(size: int, steps: int, every: int, fragments: Any, overlap: int, lr: float, momentum: float) -> Any:
    """Return each rank's variables after some steps, computed in one process."""
    ranks = [[np.zeros(count) for count in COUNTS] for _ in range(size)]
    anchor, moments = [np.zeros(count) for count in COUNTS], [np.zeros(count) for count in COUNTS]
    under_way: list[Any] = []
    for done in range(1, steps + 1):
        for rank, variables in enumerate(ranks):
            inner_step(variables, rank)
        for number, fragment in enumerate(fragments):
            if done % every == (number + 1) * every // len(fragments) % every:
                under_way.append((done + overlap, fragment, copy.deepcopy(ranks)))
        for _, fragment, then in [each for each in under_way if each[0] == done]:
            for i in fragment:
                change = anchor[i] - sum(before[i] for before in then) / size
                moments[i] = momentum * moments[i] + change
                anchor[i] = anchor[i] - lr * (change + momentum * moments[i])
                for variables, before in zip(ranks, then, strict=True):
                    variables[i][:] = anchor[i] + (variables[i] - before[i])
        under_way = [each for each in under_way if each[0] > done]
    return ranks


@pytest.mark.parametrize("group", [1 << 22, 8 * 4, 1], ids=["one operation", "several", "one for each"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("count", "overlap"), [(2, 0), (1, 3), (2, 2)], ids=["fragments", "overlap", "both"])
def test_fragments_meet_one_after_another_while_the_loop_goes_on(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, size: int, count: int, overlap: int, group: int
) -> None:
    monkeypatch.setattr("hvdgloo._training.outer._GROUP_BYTES", group)
    fragments = [range(5)] if count == 1 else [range(4), [4]]
    steps, every, options = 14, 6, {"outer_lr": 0.7, "outer_momentum": 0.5}

    def rank_body(context: Context) -> list[bytes]:
        variables = [np.zeros(each) for each in COUNTS]
        outer = outer_of(context, variables, every, fragments=count, overlap=overlap, **options)
        for done in range(1, steps + 1):
            inner_step(variables, context.rank)
            outer.step()
            expected = loop_by_hand(size, done, every, fragments, overlap, 0.7, 0.5)[context.rank]
            for got, wanted in zip(variables, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-9)
        assert not outer.is_synchronized
        outer.finish()
        assert outer.is_synchronized
        return [variable.tobytes() for variable in variables]

    results = world(size).run(rank_body)
    assert all(result == results[0] for result in results)


class Noting(NumpyAdapter):
    """Counts what is sent."""

    def __init__(self) -> None:
        self.sent = 0

    def export(self, tensor: Any, **how: Any) -> Buffer:
        self.sent += 1
        return super().export(tensor, **how)


def test_the_loop_does_not_wait_for_an_outer_step_that_overlaps(world: MakeWorld) -> None:
    """Rank 1 makes its fourth inner step only when rank 0 has made all of its own that overlap."""
    ahead = threading.Event()

    def rank_body(context: Context) -> list[int]:
        variables, adapter = [np.zeros(each) for each in COUNTS], Noting()
        outer = outer_of(context, variables, 4, overlap=2, adapter=adapter)
        counts = []
        for done in range(1, 7):
            if done == 4 and context.rank == 1:
                assert ahead.wait(30)
            before = adapter.sent
            inner_step(variables, context.rank)
            outer.step()
            counts.append(adapter.sent - before)
            if done == 5 and context.rank == 0:
                ahead.set()
        return counts

    assert world(2).run(rank_body) == [[0, 0, 0, len(COUNTS), 0, 0]] * 2


def test_statistics_are_averaged_with_the_last_fragment_and_take_no_outer_rate(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        variables, mean = [np.zeros(2), np.zeros(2)], np.zeros(3, np.float16)
        outer = outer_of(context, variables, 4, statistics=[mean], fragments=2, overlap=1, outer_lr=0.5)
        for done in range(1, 6):
            for variable in variables:
                variable += context.rank
            mean += context.rank
            outer.step()
            own = done * context.rank
            assert mean.tolist() == [own if done < 5 else 4 * 0.5 + context.rank] * 3
            assert variables[0].tolist() == [own if done < 3 else 0.5 * 2 * 0.5 + (done - 2) * context.rank] * 2
        outer.finish()
        assert mean.tolist() == [5 * 0.5] * 3

    world(2).run(rank_body)


def test_an_average_that_is_not_finite_takes_all_fragments_of_a_loop_back(world: MakeWorld) -> None:
    def rank_body(context: Context) -> list[bytes]:
        variables = [np.zeros(3, np.float32), np.zeros(3, np.float32)]
        outer = outer_of(context, variables, 4, fragments=2, overlap=1)
        for done in range(1, 6):
            inner_step(variables, context.rank)
            if done == 2 and context.rank == 1:
                variables[0][1] = np.nan
            outer.step()
            if done == 3:
                assert outer.state_dict()["refused"] == 1
                assert not any(variable.any() for variable in variables)
        outer.finish()
        assert outer.state_dict()["refused"] == 1
        assert all(np.isfinite(variable).all() and variable.all() for variable in variables)
        return [variable.tobytes() for variable in variables]

    first, second = world(2).run(rank_body)
    assert first == second


# Checkpoints, and what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "streaming"),
    [(2, {}), (3, {}), (2, {"fragments": 2, "overlap": 1}), (3, {"fragments": 2, "overlap": 1}), (5, {"overlap": 3})],
    ids=str,
)
def test_a_resumed_loop_equals_an_uninterrupted_one_bit_by_bit(
    world: MakeWorld, at: int, streaming: dict[str, int]
) -> None:
    options: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_clip": 3.0, **streaming}
    every = 4 if streaming else 2

    def train(outer: OuterOptimizer, weights: list[Any], random: np.random.Generator, steps: int) -> None:
        for _ in range(steps):
            for each in weights:
                each -= random.standard_normal(each.shape).astype(np.float32)
            outer.step()

    def rank_body(context: Context) -> None:
        weights, random = [np.zeros(50, np.float32), np.zeros(50, np.float32)], np.random.default_rng(context.rank)
        outer = outer_of(context, weights, every, **options)
        train(outer, weights, random, at)
        saved = copy.deepcopy((weights, random, outer.state_dict()))
        train(outer, weights, random, 7)
        outer.finish()
        again, random, state = saved
        assert (state["under_way"] is not None) == ((at, streaming.get("overlap")) in ((2, 1), (5, 3)))
        resumed = outer_of(context, again, every, **options)
        resumed.load_state_dict(state)
        train(resumed, again, random, 7)
        resumed.finish()
        for one, other in zip(again, weights, strict=True):
            assert (one == other).all()

    # In the midst of a round each rank begins with weights of its own, which a new one takes for a mistake.
    world(2, check_weights=at == 2 and not streaming).run(rank_body)


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


def test_a_loop_s_ranks_with_other_fragments_are_refused_alike(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        with pytest.raises(MismatchError, match="fragments: 1 on rank 0, 2 on rank 1"):
            outer_of(context, [np.zeros(2)], 4, fragments=1 + context.rank)

    world(2).run(rank_body)


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
