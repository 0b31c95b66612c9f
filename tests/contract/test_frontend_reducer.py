"""The promises of ready(name, gradient) and wait() to optimizers, tapes and trainers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives import agreement
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.errors import GradientsInFlightError, HorovodInternalError, InvalidArgumentError
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.types import DType, ReduceOp
from tests.support.arrays import assert_close
from tests.support.frameworks import Framework
from tests.support.interrupting import Line, at_each_line, interrupted_at
from tests.support.threads import Task
from tests.support.world import MakeWorld

USED_AGAIN = True  # worlds, by the tests that follow
SIZE = 3
MEAN = (SIZE - 1) / 2


def gradient_of(framework: Framework, context: Context, base: float = 0.0) -> Any:
    return framework.writable(framework.float64([base + context.rank, base]))


@pytest.fixture(autouse=True)
def _has_reducers(framework: Framework) -> None:
    if not framework.writes:
        pytest.skip(f"{framework.name} computes all gradients of a step in one function, and reduces them there")


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "new"])
def test_gradients_are_averaged(world: MakeWorld, framework: Framework, in_place: bool) -> None:
    def rank_body(context: Context) -> None:
        reducer = GradientReducer(framework.frontend(context), in_place=in_place)
        given = {f"w{i}": gradient_of(framework, context, 10.0 * i) for i in range(5)}
        for name in sorted(given, reverse=context.rank == 1):
            reducer.ready(name, given[name])
        assert reducer.open == set(given)
        reduced = reducer.wait()
        assert reducer.open == set()
        for i in range(5):
            assert framework.array(reduced[f"w{i}"]).tolist() == [10 * i + MEAN, 10 * i]
            assert (reduced[f"w{i}"] is given[f"w{i}"]) == in_place
            kept = 10 * i + (MEAN if in_place else context.rank)
            assert framework.array(given[f"w{i}"])[0] == kept
        assert reducer.wait() == {}

    world(SIZE).run(rank_body)


def test_nothing_blocks_before_wait(world: MakeWorld, framework: Framework) -> None:
    """A rank hands over all its gradients although the others have not begun."""
    all_ready = threading.Event()

    def rank_body(context: Context) -> None:
        reducer = GradientReducer(framework.frontend(context))
        if context.rank:
            assert all_ready.wait(10)
        for i in range(20):
            reducer.ready(f"w{i}", gradient_of(framework, context))
        if context.rank == 0:
            all_ready.set()
        assert framework.array(reducer.wait()["w19"])[0] == MEAN

    world(SIZE).run(rank_body)


def test_only_the_last_pass_sends(world: MakeWorld, framework: Framework) -> None:
    def rank_body(context: Context) -> None:
        reducer = GradientReducer(framework.frontend(context), passes=3)
        gradient = gradient_of(framework, context)
        for _ in range(2):
            reducer.ready("w", gradient)
            assert not reducer.open
        reducer.ready("w", gradient)
        assert reducer.open
        with pytest.raises(GradientsInFlightError, match="more backward passes"):
            reducer.ready("w", gradient)
        assert framework.array(reducer.wait()["w"])[0] == MEAN
        # An incomplete round can be sent all the same, and the count starts again.
        other = gradient_of(framework, context, 1.0)
        reducer.ready("w", other)
        reducer.ready("w", other, final=True)
        assert framework.array(reducer.wait()["w"])[0] == 1 + MEAN
        reducer.ready("w", other)
        assert not reducer.open
        reducer.set_passes(1)
        reducer.ready("w", other)
        assert reducer.open
        reducer.wait()

    world(SIZE).run(rank_body)


def test_a_group_goes_when_its_last_member_is_ready(world: MakeWorld, framework: Framework) -> None:
    def rank_body(context: Context) -> None:
        reducer = GradientReducer(framework.frontend(context), groups=[["a", "b"], ["c"]])
        order = ["b", "a"] if context.rank else ["a", "b"]  # hooks may fire in another order on another rank
        given = {name: gradient_of(framework, context, base) for name, base in zip("abcd", range(4), strict=True)}
        reducer.ready(order[0], given[order[0]])
        assert reducer.wait() == {}  # nothing was sent
        assert reducer.open == {order[0]}
        reducer.ready(order[1], given[order[1]])
        reducer.ready("c", given["c"])
        reducer.ready("d", given["d"])  # in no group: by itself
        reduced = reducer.wait()
        assert {name: framework.array(t)[0] for name, t in reduced.items()} == {
            name: base + MEAN for name, base in zip("abcd", range(4), strict=True)
        }

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name.lower())
def test_other_reductions(world: MakeWorld, framework: Framework, op: ReduceOp) -> None:
    expected = {ReduceOp.SUM: sum(range(SIZE)), ReduceOp.MIN: 0, ReduceOp.MAX: SIZE - 1}[op]

    def rank_body(context: Context) -> None:
        reducer = GradientReducer(framework.frontend(context), op=op)
        reducer.ready("w", gradient_of(framework, context))
        assert framework.array(reducer.wait()["w"])[0] == expected

    world(SIZE).run(rank_body)


def test_predivision_keeps_float16_sums_finite(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        # Three times 40,000 overflows float16; divided by 4 before the sum, it does not.
        reducer = GradientReducer(frontend, predivide_factor=4.0)
        reducer.ready("w", framework.writable(framework.tensor([40_000.0, 8.0], DType.FLOAT16)))
        assert_close(framework.array(reducer.wait()["w"]), [40_000, 8], rtol=1e-3)

    world(SIZE).run(rank_body, framework.frontend)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "new"])
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "group"])
def test_compressed_gradients_arrive_in_their_own_type(
    world: MakeWorld, framework: Framework, in_place: bool, grouped: bool
) -> None:
    def rank_body(context: Context) -> None:
        reducer = GradientReducer(
            framework.frontend(context),
            compression=framework.compression.fp16,
            groups=[["f", "i"]] if grouped else [],
            op=ReduceOp.SUM,
            in_place=in_place,
        )
        floats = framework.writable(framework.float64([0.1, context.rank]))
        integers = framework.writable(framework.tensor([context.rank], DType.INT32))
        reducer.ready("f", floats)
        reducer.ready("i", integers)
        reduced = reducer.wait()
        assert framework.adapter.describe(reduced["f"]).dtype is DType.FLOAT64
        # Rounded to float16 on the way, so near the sum but not the sum.
        assert 0 < abs(framework.array(reduced["f"])[0] - SIZE * 0.1) < 2e-3
        assert framework.array(reduced["i"]).tolist() == [3 * MEAN]
        assert (reduced["f"] is floats) == in_place
        if in_place:
            assert framework.array(floats)[1] == 3 * MEAN
        else:
            assert framework.array(floats).tolist() == [0.1, context.rank]
            assert framework.array(integers).tolist() == [context.rank]

    world(SIZE).run(rank_body)


def test_a_failure_leaves_nothing_under_way(world: MakeWorld, framework: Framework) -> None:
    """One gradient's shapes differ between ranks; the rest is reduced, and the next step works."""

    def rank_body(context: Context) -> None:
        reducer = GradientReducer(framework.frontend(context))
        good = gradient_of(framework, context)
        reducer.ready("bad", framework.writable(framework.float64([0.0] * (1 + context.rank))))
        reducer.ready("good", good)
        with pytest.raises(HorovodInternalError, match="bad"):
            reducer.wait()
        assert reducer.open == set()
        assert framework.array(good)[0] == MEAN
        reducer.ready("bad", framework.writable(framework.float64([1.0])))
        assert framework.array(reducer.wait()["bad"]).tolist() == [1.0]

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("backend", ["local"], indirect=True)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "new"])
def test_waiting_again_after_ctrl_c_returns_all_of_it(world: MakeWorld, framework: Framework, in_place: bool) -> None:
    two = world(2)
    reducers = [
        GradientReducer(framework.frontend(context), in_place=in_place, compression=framework.compression.fp16)
        for context in two.contexts
    ]

    def begin(rank: int) -> GradientReducer[Any]:
        for i in range(3):
            reducers[rank].ready(f"w{i}", framework.writable(framework.float64([i + rank, float(i)])))
        return reducers[rank]

    def trial(line: Line) -> None:
        other = Task(lambda: begin(1).wait())
        reducer = begin(0)
        results: list[dict[str, Any]] = []
        interrupted_at(line, lambda: results.append(reducer.wait()))
        if reducer.open:
            with pytest.raises(GradientsInFlightError):
                reducer.ready("w1", framework.float64([0.0, 0.0]))
            results.append(reducer.wait())
        assert reducer.wait() == {}  # nothing is left that a repeated step would send a second time
        if results:  # or they were on the way to the caller
            assert [framework.array(results[0][f"w{i}"]).tolist() for i in range(3)] == [[i + 0.5, i] for i in range(3)]
        other.result(10)

    at_each_line(trial, 5)


@pytest.mark.parametrize("backend", ["local"], indirect=True)
@pytest.mark.parametrize("call", ["synchronize", "join", "highest"])
def test_other_waits_go_on_after_ctrl_c(world: MakeWorld, call: str) -> None:
    contexts = world(2).contexts
    frontends = [Frontend(NumpyAdapter(), lambda context=context: context) for context in contexts]

    def begin(rank: int) -> Callable[[], Any]:
        if call == "synchronize":
            handle = frontends[rank].allreduce_async(np.array([float(rank)]), op=ReduceOp.SUM)
            return lambda: float(frontends[rank].synchronize(handle)[0])
        if call == "join":
            return lambda: int(frontends[rank].join() >= 0)
        return lambda: agreement.highest(contexts[rank], "elastic", [rank])[0]

    def is_under_way() -> bool:
        session = frontends[0]._bind()[1]
        return bool(session.pending or session.join or agreement._asked.get(contexts[0]))

    def trial(line: Line) -> None:
        other = threading.Thread(target=lambda: begin(1)(), daemon=True)
        other.start()
        finish = begin(0)
        results: list[Any] = []
        interrupted_at(line, lambda: results.append(finish()))
        if not results and not is_under_way():
            other.join(0.2)  # if that is all it waited for, only the result was lost
        if not results and (is_under_way() or other.is_alive()):
            results.append(finish())
        other.join(10)
        assert not other.is_alive()
        assert results in ([1], [])

    at_each_line(trial, 3)


def test_reset_drops_what_is_held_back(world: MakeWorld, framework: Framework) -> None:
    def rank_body(context: Context) -> None:
        reducer = GradientReducer(framework.frontend(context), passes=2, groups=[["a", "b"]])
        gradient = gradient_of(framework, context)
        reducer.ready("a", gradient, final=True)
        reducer.ready("c", gradient)
        reducer.reset()
        assert reducer.open == set()
        reducer.ready("c", gradient)
        assert not reducer.open
        reducer.ready("c", gradient)
        assert framework.array(reducer.wait()["c"])[0] == MEAN

    world(SIZE).run(rank_body)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": ReduceOp.SUM, "predivide_factor": 2.0}, "needs op=Average"),
        ({"predivide_factor": 0.0}, "greater than 0"),
        ({"predivide_factor": float("nan")}, "greater than 0"),
        ({"passes": 0}, "whole number from 1"),
        ({"passes": 1.5}, "whole number from 1"),
        ({"op": ReduceOp.ADASUM, "predivide_factor": 2.0}, "needs op=Average"),
        ({"groups": [["a"], ["a"]]}, "a is in two groups"),
    ],
)
def test_wrong_options(world: MakeWorld, framework: Framework, options: dict[str, Any], text: str) -> None:
    frontend = framework.frontend(world(1).contexts[0])
    with pytest.raises(InvalidArgumentError, match=text):
        GradientReducer(frontend, **options)
