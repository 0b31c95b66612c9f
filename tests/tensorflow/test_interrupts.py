"""Ctrl-C in an eager reduction of gradients: a program that repeats the step trains as if it had not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdgloo._training.options import GradientOptions
from hvdgloo.tensorflow import _distributed_optimizer as v1
from hvdgloo.tensorflow import _tape as tape
from hvdgloo.tensorflow._gradients import GradientSync, _interrupted
from hvdgloo.types import ReduceOp
from tests.support.interrupting import Line, at_each_line, interrupted_at
from tests.support.selection import extended
from tests.support.threads import Task
from tests.support.ways import frontend_of
from tests.support.world import MakeWorld, World

DENSE, SPARSE = ("one", "two"), ("table", "two")
CASES: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "grouped": (DENSE, {"groups": 1}),
    "sparse": (SPARSE, {}),
    "sum": (DENSE, {"op": ReduceOp.SUM}),
}


class Training:
    """Two ranks that train by plain gradient descent, rank 0 on the main thread, with a new tape in each step."""

    def __init__(self, two: World, case: str) -> None:
        self.names, options = CASES[case]
        self.options = GradientOptions(**options)
        self.frontends = [frontend_of(context) for context in two.contexts]
        self.weights = [[tf.Variable([[1.0, 2.0], [3.0, 4.0]], name=name) for name in self.names] for _ in range(2)]

    def gradients(self, rank: int, step: int) -> list[Any]:
        first, second = self.weights[rank]
        with tf.GradientTape() as plain:
            used = tf.gather(first, [rank]) if "table" in self.names else first
            loss = tf.reduce_sum(used**2) * (rank + step + 1) + tf.reduce_sum(first * second)
            if "table" in self.names:
                loss = tf.reduce_sum(used**2) * (rank + 1) + tf.reduce_sum(second**3)
        distributed = tape.wrap(self.frontends[rank], plain, self.options)
        found: list[Any] = distributed.gradient(loss, self.weights[rank])
        return found

    def step(self, rank: int, step: int, call: Callable[[Callable[[], list[Any]]], list[Any]]) -> None:
        gradients = call(lambda: self.gradients(rank, step))
        for weight, gradient in zip(self.weights[rank], gradients, strict=True):
            weight.assign_sub(0.01 * tf.convert_to_tensor(gradient))

    def run(self, calls: Sequence[Callable[[Callable[[], list[Any]]], list[Any]]]) -> list[np.ndarray]:
        """Train, having rank 0's gradients computed by ``calls``; return the weights, which both ranks end with."""

        def other() -> None:
            for step in range(len(calls)):
                self.step(1, step, plainly)

        thread = Task(other)
        for step, call in enumerate(calls):
            self.step(0, step, call)
        thread.result(20)
        ours, theirs = [[weight.numpy() for weight in weights] for weights in self.weights]
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
        return ours


def plainly(compute: Callable[[], list[Any]]) -> list[Any]:
    return compute()


@pytest.mark.parametrize("stride", [397, *extended(31)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["the first step", "the second step", "a later step"])
def test_a_reduction_that_is_repeated_after_ctrl_c_is_made_once(
    ranks: MakeWorld, case: str, which: int, stride: int
) -> None:
    two = ranks(2, stall_warning_time=1.0, stall_shutdown_time=2.0)
    expected = Training(two, case).run([plainly] * 4)

    def trial(line: Line) -> None:
        interrupted = False

        def repeatedly(compute: Callable[[], list[Any]]) -> list[Any]:
            nonlocal interrupted
            found: list[list[Any]] = []
            interrupted = interrupted_at(line, lambda: found.append(compute()))
            return found[0] if found else compute()

        calls = [plainly] * 4
        calls[which] = repeatedly
        try:
            actual = Training(two, case).run(calls)
        except Exception as error:
            raise AssertionError(f"interrupted at {line}") from error
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=f"interrupted at {line}")

    at_each_line(trial, stride)


@pytest.mark.parametrize("stride", [211, *extended(23)])
def test_a_step_that_is_not_repeated_is_brought_to_its_end(ranks: MakeWorld, stride: int) -> None:
    """As with one of two models, when the program goes on with the other one."""
    two = ranks(2, stall_warning_time=1.0, stall_shutdown_time=2.0)
    frontends = [frontend_of(context) for context in two.contexts]
    models = [[[tf.Variable([1.0, 2.0], name=name)] for name in ("one", "two")] for _ in frontends]

    def reduced(rank: int, which: int, value: float) -> float:
        sync = GradientSync(frontends[rank], GradientOptions(op=ReduceOp.SUM))
        (gradient,) = sync.reduce([tf.fill([2], value)], models[rank][which])
        return float(gradient[0])

    def trial(line: Line) -> None:
        theirs: list[float] = []

        def other() -> None:
            theirs.extend(reduced(1, which, value) for which, value in ((0, 1.0), (1, 2.0), (0, 3.0), (1, 4.0)))

        thread = Task(other)
        made: list[float] = []
        interrupted_at(line, lambda: made.append(reduced(0, 0, 10.0)))
        if not made and two.contexts[0] not in _interrupted:  # it came before anything was sent
            reduced(0, 0, 10.0)
        ours = [reduced(0, which, value) for which, value in ((1, 20.0), (0, 30.0), (1, 40.0))]
        thread.result(20)
        assert theirs == [11.0, 22.0, 33.0, 44.0], f"interrupted at {line}"
        assert ours == [22.0, 33.0, 44.0], f"interrupted at {line}"

    at_each_line(trial, stride)


@pytest.mark.parametrize("stride", [397, *extended(31)])
def test_an_optimizer_of_tensorflow_1_goes_on(ranks: MakeWorld, stride: int) -> None:
    two = ranks(2, stall_warning_time=1.0, stall_shutdown_time=2.0)

    def trial(line: Line) -> None:
        weights = [tf.Variable([1.0, 2.0], name="weight") for _ in range(2)]
        optimizers = [
            v1.wrap(frontend_of(c), tf.compat.v1.train.GradientDescentOptimizer(0.1), GradientOptions())
            for c in two.contexts
        ]

        def computed(rank: int) -> list[Any]:
            pairs: list[Any] = optimizers[rank].compute_gradients(
                lambda: tf.reduce_sum(weights[rank]) * (rank + 1), var_list=[weights[rank]]
            )
            return pairs

        def other() -> None:
            for _ in range(3):
                optimizers[1].apply_gradients(computed(1))

        thread = Task(other)
        found: list[list[Any]] = []
        interrupted_at(line, lambda: found.append(computed(0)))
        optimizers[0].apply_gradients(found[0] if found else computed(0))
        for _ in range(2):
            optimizers[0].apply_gradients(computed(0))
        thread.result(20)
        for weight in weights:
            np.testing.assert_allclose(weight.numpy(), [0.55, 1.55], rtol=1e-6, err_msg=f"interrupted at {line}")

    at_each_line(trial, stride)
