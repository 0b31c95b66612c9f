"""Ranks that start from different weights are told so, in the second step; those that were broadcast late are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo._training import weights
from hvdgloo._training.options import GradientOptions
from hvdgloo.tensorflow import _distributed_optimizer as v1
from hvdgloo.tensorflow import _tape as tape
from hvdgloo.tensorflow._gradients import GradientSync
from hvdgloo.tensorflow._weights import checksum_of
from hvdgloo.types import ReduceOp
from tests.support.ways import frontend_of, session_config
from tests.support.world import MakeWorld

way = pytest.mark.parametrize("way", ["eager", "function"])


class Training:
    """One rank's, by plain gradient descent.

    Args:
        start: the value that its weights begin with.
    """

    def __init__(self, context: Context, way: str, start: float, **options: Any) -> None:
        # One that TensorFlow pads, one that is sampled, and one that cannot be.
        self.variables = [tf.Variable(tf.fill(shape, start)) for shape in ([3], [50, 2], [0, 4])]
        self.frontend = frontend_of(context)
        self.sync = GradientSync(self.frontend, GradientOptions(**options))
        self.reduce = self._compiled(way, self._reduced)

    def step(self, rate: float = 1.0) -> None:
        for variable, gradient in zip(self.variables, self.reduce(), strict=True):
            variable.assign_sub(rate * gradient)

    def _reduced(self) -> list[Any]:
        return self.sync.reduce([tf.ones_like(variable) for variable in self.variables], self.variables)

    def _compiled(self, way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if way == "eager" else tf.function(function, autograph=False)  # type: ignore[no-any-return]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "same weights" in record.getMessage()]


@way
@pytest.mark.parametrize("check", [True, False])
def test_ranks_that_start_from_different_weights_are_told(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, way: str, check: bool
) -> None:
    def rank_body(context: Context) -> None:
        training = Training(context, way, start=float(context.rank == 1))
        for step in range(4):
            assert told(caplog) == [] or step > 1
            training.step()
            training.frontend.barrier()

    ranks(3, check_weights=check).run(rank_body)
    texts = told(caplog)
    assert len(texts) == int(check)  # once, by one rank
    if check:
        assert re.match("rank 1 .* rank 0, ", texts[0])
        assert "hvd.broadcast_variables(model.variables, root_rank=0)" in texts[0]


@way
def test_weights_that_are_broadcast_after_the_first_step_are_equal(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    def rank_body(context: Context) -> None:
        training = Training(context, way, start=float(context.rank))
        for step in range(3):
            training.step()
            if step == 0:
                for variable in training.variables:
                    variable.assign(training.frontend.broadcast(variable, 0))

    ranks(2).run(rank_body)
    assert told(caplog) == []


def test_weights_that_hosts_round_differently_are_equal(ranks: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    def rank_body(context: Context) -> None:
        training = Training(context, "eager", start=1.0)
        for _ in range(3):
            training.step(rate=1.0 + 1e-6 * context.rank)

    ranks(2).run(rank_body)
    assert told(caplog) == []


def test_weights_are_not_compared_before_they_have_changed(ranks: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    """A program may add up the gradients of several batches itself, step once, and broadcast then."""

    def rank_body(context: Context) -> None:
        training = Training(context, "eager", start=float(context.rank))
        for _ in range(4):
            training.reduce()
        for variable in training.variables:
            variable.assign(training.frontend.broadcast(variable, 0))
        training.step()

    ranks(2).run(rank_body)
    assert told(caplog) == []


def test_weights_that_never_change_are_compared_in_the_end(ranks: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    def rank_body(context: Context) -> None:
        training = Training(context, "eager", start=float(context.rank))
        for _ in range(12):
            training.step(rate=0.0)

    ranks(2).run(rank_body)
    assert len(told(caplog)) == 1


@way
def test_a_broadcast_that_a_callback_is_going_to_make_is_awaited(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """With ``steps_per_execution``, Keras calls it after several steps only."""

    def rank_body(context: Context) -> None:
        training, token = Training(context, way, start=float(context.rank)), object()
        weights.expect_broadcast(context, token)
        for step in range(6):
            training.step()
            if step == 3:
                for variable in training.variables:
                    variable.assign(training.frontend.broadcast(variable, 0))
                weights.broadcast_made(context, token)

    ranks(2).run(rank_body)
    assert told(caplog) == []


@way
def test_variables_of_a_rank_s_own_are_not_compared(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    def rank_body(context: Context) -> None:
        training = Training(context, way, start=float(context.rank))
        training.variables[0].assign(tf.zeros(3))
        training.sync.register_local_source(training.variables[1])
        for _ in range(3):
            training.step()

    ranks(2).run(rank_body)
    assert told(caplog) == []


@way
def test_only_ranks_that_share_gradients_are_compared(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    def rank_body(context: Context) -> None:
        groups = [frontend_of(context).add_process_set(ranks) for ranks in ([0, 2], [1, 3])]
        training = Training(context, way, start=float(context.rank % 2), process_set=groups[context.rank % 2])
        for _ in range(3):
            training.step()

    ranks(4).run(rank_body)
    assert told(caplog) == []


def test_a_tape_s_sources_that_are_no_variables_are_not_compared(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        for step in range(3):
            given = tf.constant([float(frontend.rank() + step)])
            with tf.GradientTape() as plain:
                plain.watch(given)
                loss = tf.reduce_sum(given * given)
            tape.wrap(frontend, plain, GradientOptions()).gradient(loss, [given])

    ranks(2).run(rank_body, frontend_of)
    assert told(caplog) == []


def test_a_new_tape_in_each_step_counts_steps_all_the_same(ranks: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    def rank_body(context: Context) -> None:
        frontend, weight = frontend_of(context), tf.Variable([1.0 + context.rank])
        for _ in range(3):
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(weight * weight)
            (gradient,) = tape.wrap(frontend, plain, GradientOptions()).gradient(loss, [weight])
            weight.assign_sub(0.1 * gradient)

    ranks(2).run(rank_body)
    assert len(told(caplog)) == 1


def test_a_rank_that_has_joined_is_not_compared(ranks: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    def rank_body(context: Context) -> None:
        training = Training(context, "eager", start=float(context.rank == 2))
        for _ in range(3 if context.rank else 1):
            training.step()
        training.frontend.join()

    ranks(3).run(rank_body)
    (text,) = told(caplog)
    assert re.match("rank 2 .* rank 1, ", text)


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.ADASUM])
@pytest.mark.parametrize("way", ["eager", "session"])
def test_equal_weights_under_an_optimizer_of_tensorflow_1_are_equal(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, op: ReduceOp, way: str
) -> None:
    """Adasum reduces changes, when each rank's own step has changed its weights already."""

    def eagerly(context: Context, optimizer: Any) -> None:
        weight = tf.Variable([1.0, 2.0])
        for step in range(3):
            optimizer.minimize(
                lambda step=step: tf.reduce_sum(weight**2) * (context.rank + step + 1), var_list=[weight]
            )

    def in_session(context: Context, optimizer: Any) -> None:
        with tf.Graph().as_default():
            weight = tf.compat.v1.get_variable("w", initializer=np.array([1.0, 2.0], np.float32))
            loss = tf.reduce_sum(weight**2) * (context.rank + 1)
            train = optimizer().minimize(loss, var_list=[weight])
            with tf.compat.v1.Session(config=session_config()) as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for _ in range(3):
                    session.run(train)

    def rank_body(context: Context) -> None:
        def make() -> Any:
            plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            return v1.wrap(frontend_of(context), plain, GradientOptions(op=op))

        if way == "eager":
            eagerly(context, make())
        else:
            in_session(context, make)

    ranks(2).run(rank_body)
    assert told(caplog) == []


def test_each_job_compares_again(caplog: pytest.LogCaptureFixture, ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        for start in (0.0, 0.0):
            training = Training(context, "eager", start=start + context.rank)
            for _ in range(3):
                training.step()

    ranks(2).run(rank_body)
    assert len(told(caplog)) == 1  # the second one is called as the first
    ranks(2).run(rank_body)
    assert len(told(caplog)) == 2


def test_variables_of_every_kind_have_a_checksum() -> None:
    for variables in (
        [tf.Variable([1.0 + 2.0j, 3.0], dtype=tf.complex64)],
        [tf.Variable([1.0, 2.0], dtype=tf.bfloat16), tf.Variable(1.5, dtype=tf.float64)],
    ):
        before = checksum_of(variables)
        assert before == checksum_of(variables)
        variables[0].assign(variables[0] * 2)
        assert None not in (before, checksum_of(variables))
        assert before != checksum_of(variables)
    assert checksum_of([tf.Variable(["text"]), tf.constant([1.0]), tf.Variable([1])]) is None
