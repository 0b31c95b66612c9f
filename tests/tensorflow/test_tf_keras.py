"""Optimizers of tf_keras, on ranks that are threads: gradients that a program looks at before it steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.keras import _legacy as legacy
from hvdgloo.keras._distributed_optimizer import KerasOptions
from hvdgloo.tensorflow._gradients import GradientSync
from hvdgloo.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from hvdgloo.types import ReduceOp
from tests.support.ways import frontend_of
from tests.support.world import MakeWorld

tf_keras = pytest.importorskip("tf_keras")

Pairs = list[tuple[Any, Any]]

new, old = tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD
scaled = tf_keras.mixed_precision.LossScaleOptimizer
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "new": lambda: new(1.0),
    "legacy": lambda: old(1.0),
    "new, scaled": lambda: scaled(new(1.0), dynamic=False, initial_scale=4.0),
    "legacy, scaled": lambda: scaled(old(1.0), dynamic=False, initial_scale=4.0),
}


class Training:
    """One rank's optimizer and variable, which starts at 0; its gradient is 1 on rank 0 and 2 on rank 1."""

    def __init__(self, context: Context, optimizer: Any) -> None:
        state = getattr(optimizer, "inner_optimizer", optimizer)._hvd
        state.sync = GradientSync(frontend_of(context), state.sync.options)
        self.optimizer = optimizer
        self.variable = tf.Variable([0.0])
        self.slope = float(context.rank + 1)

    def loss(self) -> Any:
        return tf.reduce_sum(self.variable * self.slope)

    def compute(self) -> Pairs:
        if hasattr(self.optimizer, "compute_gradients"):
            pairs: Pairs = self.optimizer.compute_gradients(self.loss, [self.variable])
            return pairs
        return self.private()

    def private(self) -> Pairs:
        pairs: Pairs = self.optimizer._compute_gradients(self.loss, [self.variable])
        return pairs

    def apply(self, pairs: Pairs) -> None:
        self.optimizer.apply_gradients(pairs)

    def local(self) -> Pairs:
        with tf.GradientTape() as tape:
            loss = self.loss()
        return [(tape.gradient(loss, self.variable), self.variable)]


def clipped(pairs: Pairs) -> Pairs:
    return [(tf.clip_by_value(gradient, -2.5, 2.5), variable) for gradient, variable in pairs]


def eagerly(train: Training) -> None:
    train.apply(clipped(train.compute()))


def in_one_function(train: Training) -> None:
    tf.function(lambda: train.apply(clipped(train.compute())), autograph=False)()


def by_the_private_method(train: Training) -> None:
    pairs = train.private() if hasattr(train.optimizer, "_compute_gradients") else train.compute()
    train.apply(clipped(pairs))


def computed_in_a_function(train: Training) -> None:
    compute = tf.function(lambda: [gradient for gradient, _ in train.compute()], autograph=False)
    for _ in range(2):  # the second time nothing is traced
        train.variable.assign([0.0])
        train.apply(clipped([(compute()[0], train.variable)]))


def in_two_functions(train: Training) -> None:
    compute = tf.function(lambda: [gradient for gradient, _ in train.compute()], autograph=False)
    apply = tf.function(lambda gradient: train.apply(clipped([(gradient, train.variable)])), autograph=False)
    for _ in range(2):
        train.variable.assign([0.0])
        apply(compute()[0])


def in_either_branch(train: Training) -> None:
    def step(large: Any) -> None:
        pairs = train.compute()

        def apply(pairs: Pairs) -> Any:
            train.apply(pairs)
            return tf.constant(0)

        tf.cond(large, lambda: apply(clipped(pairs)), lambda: apply(pairs))

    train.optimizer.build([train.variable])  # a branch can make no variables
    tf.function(step, autograph=False)(tf.constant(True))


WAYS = [eagerly, in_one_function, by_the_private_method, computed_in_a_function, in_two_functions]


@pytest.mark.parametrize(
    ("kind", "clip"),
    # In a branch the others cannot step.
    [pytest.param(kind, way, id=f"{kind}, {way.__name__}") for kind in OPTIMIZERS for way in WAYS]
    + [pytest.param("new", in_either_branch, id="new, in_either_branch")],
)
def test_gradients_clipped_before_the_step_come_from_all_ranks_and_are_reduced_once(
    ranks: MakeWorld, kind: str, clip: Callable[[Training], None]
) -> None:
    optimizers = [legacy.wrap(OPTIMIZERS[kind](), KerasOptions(op=ReduceOp.SUM)) for _ in range(2)]

    def rank_body(context: Context) -> None:
        train = Training(context, optimizers[context.rank])
        clip(train)
        # The sum is 3 and is clipped to 2.5; clipped before it would be 3, and 5 if it were reduced again.
        assert train.variable.numpy().tolist() == [-2.5]

    ranks(2).run(rank_body)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_all_other_steps_reduce_the_gradients_that_they_are_given(ranks: MakeWorld, kind: str) -> None:
    optimizers = [legacy.wrap(OPTIMIZERS[kind](), KerasOptions(op=ReduceOp.SUM)) for _ in range(2)]

    def rank_body(context: Context) -> None:
        train = Training(context, optimizers[context.rank])

        def minimize() -> None:
            train.optimizer.minimize(train.loss, [train.variable])

        def own_tape() -> None:
            train.apply(train.local())

        def step(way: Callable[[], None], *, traced: bool = False) -> list[float]:
            train.variable.assign([0.0])
            (tf.function(way, autograph=False) if traced else way)()
            return np.asarray(train.variable).tolist()

        for traced in (False, True):
            assert step(minimize, traced=traced) == [-3.0]
            assert step(own_tape, traced=traced) == [-3.0]
        train.compute()  # only looked at: minimize() has gradients of its own, ...
        assert step(minimize) == [-3.0]
        assert step(own_tape) == [-3.0]  # ... and with it the others are forgotten
        tf.function(lambda: train.apply(train.compute()), autograph=False)()
        assert step(own_tape) == [-3.0]

    ranks(2).run(rank_body)


def test_passes_that_add_up_are_reduced_in_the_last_one(ranks: MakeWorld) -> None:
    optimizers = [legacy.wrap(new(1.0), KerasOptions(op=ReduceOp.SUM)) for _ in range(2)]

    def rank_body(context: Context) -> None:
        train = Training(context, optimizers[context.rank])
        state = train.optimizer._hvd
        state.passes = LocalGradientAggregationHelper(2, state.sync.reduce, renewed=state.sync.renewed)
        seen = []
        for _ in range(2):
            ((gradient, variable),) = train.compute()
            seen.append(float(gradient[0]))
            train.apply([(gradient / 2.0, variable)])
        assert seen == [train.slope, 6.0]
        assert train.variable.numpy().tolist() == [-3.0]

    ranks(2).run(rank_body)


def test_a_legacy_optimizers_get_gradients_is_reduced_too(ranks: MakeWorld) -> None:
    optimizers = [legacy.wrap(old(1.0), KerasOptions(op=ReduceOp.SUM)) for _ in range(2)]

    def rank_body(context: Context) -> None:
        train = Training(context, optimizers[context.rank])

        def step() -> Any:
            (gradient,) = train.optimizer.get_gradients(train.loss(), [train.variable])
            train.apply([(gradient, train.variable)])
            return gradient

        assert tf.function(step, autograph=False)().numpy().tolist() == [3.0]
        assert train.variable.numpy().tolist() == [-3.0]

    ranks(2).run(rank_body)


def test_the_factor_that_only_legacy_optimizers_take_is_refused_in_a_sentence(ranks: MakeWorld) -> None:
    train = Training(ranks(1).contexts[0], legacy.wrap(new(1.0), KerasOptions()))
    with pytest.raises(InvalidArgumentError, match=r"grad_loss= is for tf_keras.optimizers.legacy"):
        train.optimizer._compute_gradients(train.loss, [train.variable], grad_loss=tf.ones([]))
