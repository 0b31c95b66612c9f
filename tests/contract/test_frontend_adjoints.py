"""The gradient of each collective against its definition in numpy.

numpy records no gradients, so there the rules are called by themselves; the others run them through their graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.adapter import Tape
from hvdgloo._collectives.adjoints import ADJOINTS
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import Collective, ReduceOp
from tests.support.arrays import assert_close
from tests.support.frameworks import Framework
from tests.support.world import MakeWorld

USED_AGAIN = True  # worlds, by the tests that follow
SIZE = 3
INPUTS = np.array([[1.0, -2.0, 3.0, 0.0], [1.0, 5.0, -3.0, 2.0], [4.0, 5.0, 0.5, 0.0]])
GRADIENTS = np.array([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, 1.0], [2.0, 2.0, 2.0, 0.25]])
"""By rank: inputs have ties and zeros, gradients differ between ranks."""


def gradients_of(
    framework: Framework,
    context: Context,
    operation: CollectiveSpec,
    inputs: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Return the gradients at the inputs of one rank when ``gradients`` arrive at its outputs."""
    frontend = framework.frontend(context)
    tensors = [framework.float64(x) for x in inputs]
    arriving = [framework.float64(g) for g in gradients]
    if framework.name == "torch":
        import torch

        for tensor in tensors:
            tensor.requires_grad_()
        outputs = frontend.apply(operation, tensors)
        results: Sequence[Any] = torch.autograd.grad(outputs, tensors, arriving)
    elif framework.name == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            outputs = frontend.apply(operation, tensors)
        results = tape.gradient(outputs, tensors, arriving)
    elif framework.name == "jax":
        import jax

        _, pull = jax.vjp(lambda *arrays: frontend.apply(operation, arrays), *tensors)
        results = pull(arriving)
    elif framework.name == "mxnet":
        from mxnet import autograd, util

        with util.np_shape(True):  # or there are no arrays without rows
            for tensor in tensors:
                tensor.attach_grad()
            with autograd.record():
                outputs = frontend.apply(operation, tensors)
            autograd.backward(outputs, arriving)
        results = [tensor.grad for tensor in tensors]
        for result in results:
            framework.adapter.export(result)  # raises what the rule raised
    else:
        outputs = frontend.apply(operation, tensors)
        left = Tape(tuple(x.shape for x in inputs), tuple(tensors), tuple(outputs))
        results = ADJOINTS[operation.collective, operation.op].rule(frontend, operation, left, arriving)
    return [framework.array(result) for result in results]


def extreme(op: Callable[..., np.ndarray], rank: int) -> np.ndarray:
    hits = op(INPUTS, axis=0) == INPUTS
    return np.asarray(GRADIENTS.sum(axis=0) * hits[rank] / hits.sum(axis=0))


EXPECTED: dict[ReduceOp, Callable[[int], np.ndarray]] = {
    ReduceOp.SUM: lambda rank: GRADIENTS.sum(axis=0),
    ReduceOp.AVERAGE: lambda rank: GRADIENTS.mean(axis=0),
    ReduceOp.MIN: lambda rank: extreme(np.min, rank),
    ReduceOp.MAX: lambda rank: extreme(np.max, rank),
    ReduceOp.PRODUCT: lambda rank: GRADIENTS.sum(axis=0) * np.delete(INPUTS, rank, axis=0).prod(axis=0),
}


@pytest.mark.parametrize("op", list(EXPECTED), ids=lambda op: op.name.lower())
def test_allreduce(world: MakeWorld, framework: Framework, op: ReduceOp) -> None:
    def rank_body(context: Context) -> None:
        operation = CollectiveSpec(Collective.ALLREDUCE, op)
        rank = context.rank
        (result,) = gradients_of(framework, context, operation, [INPUTS[rank]], [GRADIENTS[rank]])
        assert_close(result, EXPECTED[op](rank))

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT], ids=lambda op: op.name.lower())
def test_factors_are_part_of_the_gradient(world: MakeWorld, framework: Framework, op: ReduceOp) -> None:
    factor = 0.5 * 3.0 if op is not ReduceOp.PRODUCT else 0.5**SIZE * 3.0

    def rank_body(context: Context) -> None:
        operation = CollectiveSpec(Collective.ALLREDUCE, op, prescale=0.5, postscale=3.0)
        rank = context.rank
        (result,) = gradients_of(framework, context, operation, [INPUTS[rank]], [GRADIENTS[rank]])
        assert_close(result, EXPECTED[op](rank) * factor)

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name.lower())
def test_extremes_with_factors_refuse(world: MakeWorld, framework: Framework, op: ReduceOp) -> None:
    def rank_body(context: Context) -> None:
        operation = CollectiveSpec(Collective.ALLREDUCE, op, prescale=2.0)
        with pytest.raises(InvalidArgumentError, match="multiply the tensor outside"):
            gradients_of(framework, context, operation, [INPUTS[0]], [GRADIENTS[0]])

    world(1).run(rank_body)  # of several callbacks that fail at a time, MXNet tells of one


@pytest.mark.parametrize("op", list(EXPECTED), ids=lambda op: op.name.lower())
def test_groups(world: MakeWorld, framework: Framework, op: ReduceOp) -> None:
    def rank_body(context: Context) -> None:
        rank, operation = context.rank, CollectiveSpec(Collective.ALLREDUCE, op)
        inputs = [INPUTS[rank], INPUTS[rank][:2].reshape(2, 1)]
        gradients = [GRADIENTS[rank], GRADIENTS[rank][:2].reshape(2, 1)]
        first, second = gradients_of(framework, context, operation, inputs, gradients)
        assert_close(first, EXPECTED[op](rank))
        assert_close(second, EXPECTED[op](rank)[:2].reshape(2, 1))

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("rows", [(2, 0, 3), (1, 1, 1)], ids=str)
def test_allgather_averages_and_takes_its_own_rows(
    world: MakeWorld, framework: Framework, rows: tuple[int, ...]
) -> None:
    total = sum(rows)
    by_rank = np.arange(SIZE * total * 2, dtype=float).reshape(SIZE, total, 2) ** 1.5

    def rank_body(context: Context) -> None:
        first = sum(rows[: context.rank])
        own = np.ones((rows[context.rank], 2))
        operation = CollectiveSpec(Collective.ALLGATHER)
        (result,) = gradients_of(framework, context, operation, [own], [by_rank[context.rank]])
        assert_close(result, by_rank.mean(axis=0)[first : first + rows[context.rank]])

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("root", range(SIZE))
def test_broadcast_averages_to_the_root(world: MakeWorld, framework: Framework, root: int) -> None:
    def rank_body(context: Context) -> None:
        gradient = GRADIENTS[context.rank].copy()
        gradient[0] = np.inf  # zero elsewhere means zero, not zero times infinity
        operation = CollectiveSpec(Collective.BROADCAST, root=root)
        (result,) = gradients_of(framework, context, operation, [INPUTS[context.rank]], [gradient])
        expected = GRADIENTS.mean(axis=0) if context.rank == root else np.zeros(4)
        expected[0] = np.inf if context.rank == root else 0.0
        assert_close(result, expected)

    world(SIZE).run(rank_body)
