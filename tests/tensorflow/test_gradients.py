"""DistributedGradientTape and what optimizers do with gradients, on ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job.context import Context
from hvdgloo._training.options import GradientOptions
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError
from hvdgloo.keras import _functions as keras_functions
from hvdgloo.keras import _optimizer as hvd_keras
from hvdgloo.numpy._adapter import NumpyAdapter
from hvdgloo.tensorflow import _distributed_optimizer as v1
from hvdgloo.tensorflow import _tape as tapes
from hvdgloo.tensorflow import util
from hvdgloo.tensorflow._frontend import TensorFlowFrontend
from hvdgloo.tensorflow._gradients import GradientSync, _Batch
from hvdgloo.tensorflow._state import broadcast_variables
from hvdgloo.tensorflow.compression import Compression
from hvdgloo.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
from hvdgloo.types import ReduceOp
from tests.support.threads import at_once
from tests.support.ways import frontend_of, session_config
from tests.support.world import MakeWorld

SIZE = 3
way = pytest.mark.parametrize("way", ["eager", "function"])


def compiled(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return function if way == "eager" else tf.function(function, autograph=False)  # type: ignore[no-any-return]


def mean_over_ranks(function: Callable[[int], Any]) -> Any:
    return np.mean([function(rank) for rank in range(SIZE)], axis=0)


@way
@pytest.mark.parametrize(
    "options",
    [
        GradientOptions(),
        GradientOptions(op=ReduceOp.SUM),
        GradientOptions(op=ReduceOp.MAX),
        GradientOptions(gradient_predivide_factor=2.0),
        GradientOptions(compression=Compression.fp16),
        GradientOptions(groups=2),
        GradientOptions(groups=1),
    ],
    ids=["average", "sum", "max", "predivided", "fp16", "two groups", "one group"],
)
def test_gradients_come_from_all_ranks(ranks: MakeWorld, way: str, options: GradientOptions) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        a, b, unused = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]]), tf.Variable(1.0)

        def step(x: Any) -> Any:
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(a * x) + tf.reduce_sum(b * x * x)
            return tapes.wrap(frontend, plain, options).gradient(loss, {"a": a, "rest": [b, unused]})

        step = compiled(way, step)
        for _ in range(3):
            got = step(tf.constant(float(rank + 1)))
            by_rank = np.array([[r + 1.0, (r + 1.0) ** 2] for r in range(SIZE)])
            combine = {ReduceOp.SUM: np.sum, ReduceOp.MAX: np.max}.get(ReduceOp(options.op), np.mean)
            of_a, of_b = combine(by_rank, axis=0)
            np.testing.assert_allclose(got["a"], [of_a, of_a], rtol=1e-3)
            np.testing.assert_allclose(got["rest"][0], [[of_b]], rtol=1e-3)
            assert got["rest"][1] is None

    ranks(SIZE).run(rank_body)


@way
def test_each_reduction_ends_a_step_in_metrics(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> int:
        frontend, a = frontend_of(context), tf.Variable([1.0, 2.0])

        def step(x: Any) -> Any:
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(a * x)
            return tapes.wrap(frontend, plain, GradientOptions()).gradient(loss, [a])

        step = compiled(way, step)
        for _ in range(4):
            step(tf.constant(1.0))
        return context.metrics().steps

    assert ranks(2).run(rank_body) == [4, 4]


@way
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_training_is_equal_to_one_process_on_the_whole_batch(ranks: MakeWorld, way: str, size: int, kind: str) -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(4, 12, 5)).astype(np.float32)
    y = (x @ generator.normal(size=(5, 2))).astype(np.float32)
    start = [generator.normal(size=s).astype(np.float32) for s in ((5, 8), (8,), (8, 2))]

    def train(part: slice, wrap: Callable[[Any], Any]) -> list[np.ndarray]:
        weights = [tf.Variable(values) for values in start]
        optimizer = {"SGD": partial(tf.keras.optimizers.SGD, momentum=0.9), "Adam": tf.keras.optimizers.Adam}[kind](
            0.02
        )
        optimizer.build(weights)

        def step(inputs: Any, wanted: Any) -> None:
            with tf.GradientTape() as plain:
                made = tf.tanh(inputs @ weights[0] + weights[1]) @ weights[2]
                loss = tf.reduce_mean((made - wanted) ** 2)
            optimizer.apply_gradients(zip(wrap(plain).gradient(loss, weights), weights, strict=True))

        step = compiled(way, step)
        for _ in range(2):
            for inputs, wanted in zip(x, y, strict=True):
                step(tf.constant(inputs[part]), tf.constant(wanted[part]))
        return [weight.numpy() for weight in weights]

    alone = train(slice(None), lambda plain: plain)

    def rank_body(frontend: Frontend[Any]) -> None:
        own = train(slice(frontend.rank(), None, size), lambda plain: tapes.wrap(frontend, plain, GradientOptions()))
        for got, expected, before in zip(own, alone, start, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)
            assert np.abs(got - before).max() > 0.01

    ranks(size).run(rank_body, frontend_of)


@way
def test_gradients_that_are_one_and_the_same_tensor(ranks: MakeWorld, way: str) -> None:
    """The gradients of ``a + b`` for a and b are: nothing that was given may be written, and results are two."""

    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        a, b = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
        weights = tf.constant([1.0, 10.0]) * (rank + 1)

        def step() -> Any:
            with tf.GradientTape(persistent=True) as plain:
                loss = tf.reduce_sum((a + b) * weights)
            own = plain.gradient(loss, [a, b])
            return (
                own,
                tapes.wrap(frontend, plain, GradientOptions()).gradient(loss, [a, b]),
                plain.gradient(loss, [a, b]),
            )

        before, reduced, after = compiled(way, step)()
        for kept in (*before, *after):
            np.testing.assert_array_equal(kept, [rank + 1.0, 10.0 * (rank + 1)])
        for tensor in reduced:
            np.testing.assert_array_equal(tensor, [2.0, 20.0])
        reduced[0]._numpy()[0] = -1.0
        assert reduced[1].numpy()[0] == 2.0

    ranks(SIZE).run(rank_body)


@way
@pytest.mark.parametrize("as_dense", [False, True], ids=["gathered", "as dense"])
def test_gradients_of_an_embedding(ranks: MakeWorld, way: str, as_dense: bool) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        table, scale = tf.Variable(tf.ones([5, 2])), tf.Variable(2.0)

        def step(rows: Any) -> Any:
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, rows)) * scale
            shared = tapes.wrap(frontend, plain, GradientOptions(sparse_as_dense=as_dense))
            of_table, of_scale = shared.gradient(loss, [table, scale])
            assert isinstance(of_table, tf.IndexedSlices) != as_dense
            return tf.convert_to_tensor(of_table), of_scale

        step = compiled(way, step)
        rows = list(range(rank + 1))  # of different length on each rank
        of_table, of_scale = step(tf.constant(rows))
        np.testing.assert_allclose(of_table[:, 0], np.array([3, 2, 1, 0, 0]) * 2 / SIZE)
        np.testing.assert_allclose(of_scale, (2 + 4 + 6) / SIZE)

    ranks(SIZE).run(rank_body)


def test_a_sparse_gradient_has_no_maximum_and_is_in_no_group(ranks: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        table = tf.Variable(tf.ones([5, 2]))

        def gradient(options: GradientOptions) -> Any:
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
            return tapes.wrap(frontend, plain, options).gradient(loss, [table])

        with pytest.raises(NotImplementedError, match="sparse_as_dense"):
            gradient(GradientOptions(op=ReduceOp.MAX))
        with pytest.raises(InvalidArgumentError, match="cannot be in a group"):
            gradient(GradientOptions(groups=[[table]]))

    ranks(2).run(rank_body, frontend_of)


@way
@pytest.mark.parametrize("scale", [True, False], ids=["scaled", "as it is"])
def test_local_sources_are_left_to_their_rank(ranks: MakeWorld, way: str, scale: bool) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        own, shared = tf.Variable(1.0), tf.Variable(1.0)

        def step() -> Any:
            with tf.GradientTape() as plain:
                loss = (own + shared) * (rank + 1.0)
            distributed = tapes.wrap(frontend, plain, GradientOptions(scale_local_gradients=scale))
            distributed.register_local_source(own)
            return distributed.gradient(loss, [own, shared])

        of_own, of_shared = compiled(way, step)()
        assert float(of_own) == pytest.approx((rank + 1.0) / (SIZE if scale else 1))
        assert float(of_shared) == 2.0

    ranks(SIZE).run(rank_body)


def test_the_tape_is_the_users(ranks: MakeWorld) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    x = tf.constant(3.0)
    plain = tf.GradientTape()
    with tapes.wrap(frontend, plain, GradientOptions()) as shared:
        shared.watch(x)
        y = x * x
    assert isinstance(shared, tf.GradientTape)
    assert type(shared).__name__ == "GradientTape"
    assert float(shared.gradient(y, x)) == 6.0
    with pytest.raises(InvalidArgumentError, match="already distributed"):
        tapes.wrap(frontend, shared, GradientOptions())
    with pytest.raises(InvalidArgumentError, match=r"expected a tf\.GradientTape"):
        tapes.wrap(frontend, x, GradientOptions())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (GradientOptions(op=ReduceOp.ADASUM, gradient_predivide_factor=2.0), "needs op=Average"),
        (GradientOptions(op=77), "must be one of"),
        (GradientOptions(op=ReduceOp.SUM, gradient_predivide_factor=2.0), "needs op=Average"),
        (GradientOptions(groups=-1), "0 or more"),
        (GradientOptions(groups="all"), "number of groups"),  # type: ignore[arg-type]
    ],
)
def test_wrong_options(ranks: MakeWorld, options: GradientOptions, text: str) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    with pytest.raises(InvalidArgumentError, match=text):
        tapes.wrap(frontend, tf.GradientTape(), options)


def test_gradients_travel_while_the_backward_pass_is_computed(ranks: MakeWorld) -> None:
    """The last layer's gradient is with the engine before the first layer's is computed, in a graph's one run.

    A chain of layers whose backward pass stops at a gate until the other rank has the last layer's gradient, reduced.
    If gradients were sent after the backward pass only, nothing would open the gate.
    """
    arrived = [threading.Event(), threading.Event()]

    def rank_body(frontend: Frontend[Any]) -> None:
        weights = [tf.Variable([float(i + 1)]) for i in range(4)]
        reduced = threading.Event()
        register = frontend.persistent

        def watched(*args: Any, **kwargs: Any) -> Any:
            operation = register(*args, **kwargs)

            def start(tensors: Any) -> Any:
                pending = operation.start(tensors)
                pending.add_done_callback(lambda _: (reduced.set(), arrived[frontend.rank()].set()))
                return pending

            return SimpleNamespace(in_place=operation.in_place, start=start)

        frontend.persistent = watched  # type: ignore[method-assign]
        opened: list[bool] = []

        @tf.custom_gradient
        def gate(x: Any) -> Any:
            def wait(g: Any) -> Any:
                opened.append(reduced.wait(10) and arrived[1 - frontend.rank()].wait(10))
                return g

            return tf.identity(x), lambda g: tf.ensure_shape(
                tf.numpy_function(wait, [g], tf.float32, stateful=False), [1]
            )

        @tf.function(autograph=False)
        def step() -> Any:
            with tf.GradientTape() as plain:
                x = gate(tf.ones([1]) * weights[0])
                for weight in weights[1:]:
                    x = x * weight
            return tapes.wrap(frontend, plain, GradientOptions()).gradient(x, weights)

        gradients = step()
        assert opened == [True]
        np.testing.assert_allclose(np.ravel(gradients), [24.0, 12.0, 8.0, 6.0])

    ranks(2).run(rank_body, frontend_of)


class _Slow:
    """A data plane on which an allreduce takes a known time for each gradient that is in it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allreduce(self, buffer: Any, op: Any) -> Any:
        time.sleep(LENGTH * buffer.nbytes / 4)  # stands for a transfer, which takes longer if it is of several
        return self._inner.allreduce(buffer, op)


LENGTH = 0.05
LAYERS = 6


def test_communication_of_known_length_hides_behind_a_backward_pass_of_known_length(ranks: MakeWorld) -> None:
    """Six layers whose backward passes take 50 ms each, and 50 ms to send each gradient.

    One after the other that is 600 ms; overlapped, 350. With nothing overlapped the test fails.
    """
    slow = ranks(2, wrap=lambda rank, inner: _Slow(inner), inline_threshold=0)

    def rank_body(frontend: Frontend[Any]) -> float:
        weights = [tf.Variable([1.0]) for _ in range(LAYERS)]

        def compute(g: Any) -> Any:
            time.sleep(LENGTH)  # stands for the work of a layer
            return g

        @tf.custom_gradient
        def layer(x: Any) -> Any:
            def backward(g: Any) -> Any:
                return tf.ensure_shape(tf.numpy_function(compute, [g], tf.float32, stateful=False), [1])

            return tf.identity(x), backward

        @tf.function(autograph=False)
        def step() -> Any:
            with tf.GradientTape() as plain:
                x = tf.ones([1])
                for weight in weights:
                    x = layer(x * weight)
            return tapes.wrap(frontend, plain, GradientOptions()).gradient(x, weights)

        step()  # traces
        seconds = []
        for _ in range(3):
            frontend.barrier()
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)  # others use the machine, too

    seconds = max(slow.run(rank_body, frontend_of))
    serial = 2 * LAYERS * LENGTH
    assert LAYERS * LENGTH < seconds < 0.85 * serial, seconds


def test_two_models_of_one_shape_in_one_function(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        first, second = tf.Variable([1.0]), tf.Variable([1.0])

        @tf.function(autograph=False)
        def step() -> Any:
            with tf.GradientTape() as one:
                loss = tf.reduce_sum(first * (rank + 1.0))
            with tf.GradientTape() as two:
                other = tf.reduce_sum(second * (rank + 1.0) * 10)
            return (
                tapes.wrap(frontend, one, GradientOptions()).gradient(loss, [first]),
                tapes.wrap(frontend, two, GradientOptions()).gradient(other, [second]),
            )

        for _ in range(3):
            ((a,), (b,)) = step()
            assert (a.numpy().tolist(), b.numpy().tolist()) == ([1.5], [15.0])

    ranks(2).run(rank_body)


@pytest.mark.parametrize("nested", ["calls", "branches", "call and bare"])
def test_two_nested_functions_of_one_shape_meet_their_like(ranks: MakeWorld, nested: str) -> None:
    """Twin critics: nothing but what is in them tells TensorFlow that one comes before the other."""

    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        critics = [tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])]

        def training(critic: Any, factor: float) -> Callable[..., Any]:
            def step(x: Any) -> Any:
                with tf.GradientTape() as plain:
                    loss = tf.reduce_sum(critic * x) * factor
                return tapes.wrap(frontend, plain, GradientOptions()).gradient(loss, [critic])[0]

            return step

        first, second = (training(critic, factor) for critic, factor in zip(critics, (1.0, 10.0), strict=True))
        if nested != "call and bare":
            second = tf.function(second, autograph=False)
        first = tf.function(first, autograph=False)

        @tf.function(autograph=False)
        def both(x: Any) -> Any:
            if nested == "branches":
                always = tf.reduce_sum(x) > 0
                return [tf.cond(always, lambda f=f: f(x), lambda: tf.zeros([2])) for f in (first, second)]
            return first(x), second(x), first(2 * x)

        for _ in range(5):
            of_first, of_second, *again = both(tf.ones([2]) * (rank + 1.0))
            assert of_first.numpy().tolist() == [1.5, 1.5]
            assert of_second.numpy().tolist() == [15.0, 15.0]
            assert [t.numpy().tolist() for t in again] == [[3.0, 3.0]] * len(again)

    ranks(2).run(rank_body)


@way
def test_after_a_failed_step_the_next_one_works(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        weight, other = tf.Variable([1.0, 2.0]), tf.Variable(1.0)

        def step(x: Any, factor: Any) -> Any:
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(weight * x) * other
            return tapes.wrap(frontend, plain, GradientOptions(gradient_predivide_factor=factor)).gradient(
                loss, [weight, other]
            )

        with pytest.raises(HorovodInternalError, match="disagree"):
            compiled(way, step)(tf.constant(1.0), 1.0 + rank)
        good = compiled(way, step)
        for _ in range(2):
            assert good(tf.constant(rank + 1.0), 1.0)[0].numpy().tolist() == [1.5, 1.5]

    ranks(2).run(rank_body)


@pytest.mark.parametrize("way", ["eager", "function", "session"])
def test_variables_are_broadcast(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        if way == "session":
            with tf.Graph().as_default():
                held = [tf.compat.v1.get_variable(f"v{i}", initializer=float(rank + i)) for i in range(3)]
                broadcast = broadcast_variables(frontend, held, 1)
                with tf.compat.v1.Session(config=session_config()) as session:
                    session.run(tf.compat.v1.global_variables_initializer())
                    session.run(broadcast)
                    assert session.run(held) == [1.0, 2.0, 3.0]
            return
        held = [tf.Variable(float(rank + i)) for i in range(2)]
        held.append(tf.Variable(tf.constant([rank + 7, 8], tf.uint32)))
        held.append(tf.Variable(tf.cast([rank, 1], tf.bfloat16)))
        before = held[0].read_value()

        def body() -> None:
            broadcast_variables(frontend, held, 1)

        compiled(way, body)()
        assert [v.numpy().tolist() for v in held] == [1.0, 2.0, [8, 8], [1.0, 1.0]]
        assert float(before) == rank
        with pytest.raises(InvalidArgumentError, match="expected a variable"):
            broadcast_variables(frontend, [before], 0)

    ranks(2).run(rank_body)


@pytest.mark.parametrize("way", ["eager", "session"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("average", [False, True], ids=["sum of passes", "mean of passes"])
def test_optimizers_of_tensorflow_1(ranks: MakeWorld, way: str, passes: int, average: bool) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        x = rank + 1.0
        steps = 2
        # The gradient is x; what adds up over the passes is reduced and applied after the last one of each step.
        change = 0.5 * np.mean([1.0, 2.0]) * (1 if average else passes)

        def make() -> Any:
            plain = tf.compat.v1.train.MomentumOptimizer(0.5, 0.0)
            return v1.wrap(frontend, plain, GradientOptions(), passes, average=average)

        if way == "eager":
            weight = tf.Variable([10.0])
            optimizer = make()
            for call in range(1, steps * passes + 1):
                optimizer.minimize(lambda: tf.reduce_sum(weight * x), var_list=[weight])
                np.testing.assert_allclose(weight.numpy(), [10.0 - change * (call // passes)])
            assert len(optimizer.variables()) == 1
            return
        with tf.Graph().as_default():
            weight = tf.compat.v1.get_variable("w", initializer=[10.0])
            optimizer = make()
            train = optimizer.minimize(tf.reduce_sum(weight * x))
            assert optimizer.get_slot_names() == ["momentum"]
            with tf.compat.v1.Session(config=session_config()) as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for call in range(1, steps * passes + 1):
                    session.run(train)
                    np.testing.assert_allclose(session.run(weight), [10.0 - change * (call // passes)])

    ranks(2).run(rank_body)


@pytest.mark.parametrize("kind", ["Momentum", "Adam"])
def test_a_checkpoint_of_tensorflow_1s_optimizers_equals_the_plain_one_s(
    ranks: MakeWorld, tmp_path: Path, kind: str
) -> None:
    """Momenta and Adam's powers come back."""
    frontend = frontend_of(ranks(1).contexts[0])
    arguments = {"learning_rate": 0.1} | ({"momentum": 0.9} if kind == "Momentum" else {})

    def make(start: float, *, distributed: bool) -> tuple[Any, Any, Any]:
        weight, plain = tf.Variable([start, 2 * start]), getattr(tf.compat.v1.train, f"{kind}Optimizer")(**arguments)
        optimizer = v1.wrap(frontend, plain, GradientOptions()) if distributed else plain
        return weight, optimizer, tf.train.Checkpoint(weight=weight, optimizer=optimizer)

    def step(weight: Any, optimizer: Any) -> list[Any]:
        optimizer.apply_gradients([(tf.ones(2), weight)])
        return [np.asarray(v) for v in (weight, *optimizer.variables())]

    weight, optimizer, checkpoint = make(1.0, distributed=True)
    assert isinstance(optimizer, getattr(tf.compat.v1.train, f"{kind}Optimizer"))
    step(weight, optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    expected = step(weight, optimizer)
    for distributed in (True, False):
        weight, optimizer, checkpoint = make(7.0, distributed=distributed)
        status = checkpoint.read(path)
        for got, value in zip(step(weight, optimizer), expected, strict=True):
            np.testing.assert_allclose(got, value)
        status.assert_consumed()


def test_variables_by_their_references() -> None:
    variables = [tf.Variable(1.0), tf.Variable([2.0])]
    references = util.vars_to_refs(variables)
    assert hash(references) == hash(util.vars_to_refs(tuple(variables)))
    assert all(found is each for found, each in zip(util.refs_to_vars(references), variables, strict=True))
    assert util._executing_eagerly()
    assert not tf.function(lambda: tf.constant(util._executing_eagerly()))()


def test_gradients_that_add_up_in_an_eager_program() -> None:
    """By Horovod's name, for programs with an optimizer of their own."""
    weight, reduced = tf.Variable([1.0, 2.0]), []

    def reduce(gradients: Any, variables: Any) -> list[Any]:
        reduced.append([g.numpy().tolist() for g in gradients])
        assert len(variables) == 1
        return [g * 10.0 for g in gradients]

    helper = LocalGradientAggregationHelperEager(2, reduce, average_aggregated_gradients=True)
    with pytest.raises(InvalidArgumentError, match="comes after compute_gradients"):
        helper.apply_gradients(lambda: None)
    for call in range(1, 5):
        gradients = helper.compute_gradients([tf.constant([1.0, 4.0 * call])], [weight])
        stepped = helper.apply_gradients(lambda gradients=gradients: weight.assign_sub(gradients[0]))
        assert bool(stepped) == (call % 2 == 0)
    assert reduced == [[[1.0, 6.0]], [[1.0, 14.0]]]
    assert weight.numpy().tolist() == [-19.0, -198.0]


def test_keras_has_no_adasum() -> None:
    with pytest.raises(InvalidArgumentError, match="op=Adasum combines the changes"):
        hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(), op=ReduceOp.ADASUM)


def adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By the definition."""
    return np.asarray((1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b)


DIRECTIONS = np.array([[3.0, 1.0, 0.5], [1.0, -2.0, 4.0]], np.float32)


@way
@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MAX], ids=lambda op: op.name.lower())
def test_gradients_of_gradients(ranks: MakeWorld, way: str, op: ReduceOp) -> None:
    """As for a gradient penalty: an outer tape around the distributed one."""

    def rank_body(context: Context) -> None:
        frontend, weights = frontend_of(context), [tf.Variable(2.0), tf.Variable([1.0, 3.0])]
        own = context.rank + 1.0

        def step(factor: Any) -> Any:
            with tf.GradientTape() as outer:
                with tapes.wrap(frontend, tf.GradientTape(), GradientOptions(op=op)) as inner:
                    loss = factor * (weights[0] ** 3 + tf.reduce_sum(weights[1] ** 3))
                first = inner.gradient(loss, weights)
                penalty = factor * tf.add_n([tf.reduce_sum(each**2) for each in first])
            return first, outer.gradient(penalty, weights)

        if op is ReduceOp.MAX:
            with pytest.raises((InvalidArgumentError, tf.errors.OpError), match="op=Average or Sum"):
                compiled(way, step)(tf.constant(own))
            return
        first, second = compiled(way, step)(tf.constant(own))
        factor = 2.0 if op is ReduceOp.AVERAGE else 6.0  # of ranks 1, 2, 3: the mean, or the sum
        for got, again, weight in zip(first, second, weights, strict=True):
            value = weight.numpy()
            np.testing.assert_allclose(got, factor * 3 * value**2)
            # d penalty / d first, reduced in turn, times d gradient / d weight, which is this rank's
            np.testing.assert_allclose(again, factor * 2 * (factor * 3 * value**2) * own * 6 * value)

    ranks(SIZE).run(rank_body)


@way
def test_adasum_of_a_tapes_gradients(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        frontend, weight = frontend_of(context), tf.Variable(tf.zeros(3))

        def step(direction: Any) -> Any:
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(weight * direction)
            return tapes.wrap(frontend, plain, GradientOptions(op=ReduceOp.ADASUM)).gradient(loss, weight)

        got = compiled(way, step)(tf.constant(DIRECTIONS[context.rank]))
        np.testing.assert_allclose(got, adasum(*DIRECTIONS), rtol=1e-6)

    ranks(2).run(rank_body)


@pytest.mark.parametrize(("passes", "use_resource"), [(1, True), (2, True), (1, False)])
def test_adasum_combines_what_a_sessions_optimizers_did(ranks: MakeWorld, passes: int, use_resource: bool) -> None:
    """Of momentum's second step the change is not its gradient's; a local variable goes its own way."""
    momentum, rate, passed = 0.5, 0.1, [np.zeros(3), np.zeros(3)]
    expected = np.full(3, 10.0)
    for _ in range(2):
        passed = [momentum * v + d * passes for v, d in zip(passed, DIRECTIONS.astype(float), strict=True)]
        expected = expected + adasum(*(-rate * v for v in passed))

    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        with tf.Graph().as_default():
            weight, own = (
                tf.compat.v1.get_variable(name, initializer=np.full(3, 10.0, np.float32), use_resource=use_resource)
                for name in ("w", "own")
            )
            plain = tf.compat.v1.train.MomentumOptimizer(rate, momentum)
            optimizer = v1.wrap(frontend, plain, GradientOptions(op=ReduceOp.ADASUM), passes)
            optimizer.register_local_var(own)
            count = tf.compat.v1.train.get_or_create_global_step()
            train = optimizer.minimize(tf.reduce_sum((weight + own) * DIRECTIONS[rank]), global_step=count)
            with tf.compat.v1.Session(config=session_config()) as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for _ in range(2 * passes):
                    session.run(train)
                np.testing.assert_allclose(session.run(weight), expected, rtol=1e-5)
                alone = 10.0 - rate * passes * DIRECTIONS[rank] * (1 + (1 + momentum))
                np.testing.assert_allclose(session.run(own), alone, rtol=1e-5)
                assert session.run(count) == 2

    ranks(2).run(rank_body)


@pytest.mark.parametrize("way", ["eager", "function", "session"])
@pytest.mark.parametrize(
    ("value", "text"), [([b"a" * 16], "tensors of strings"), ([1j], "complex numbers")], ids=["strings", "complex"]
)
def test_a_variable_that_cannot_be_broadcast_is_named(ranks: MakeWorld, way: str, value: Any, text: str) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    with tf.Graph().as_default() if way == "session" else nullcontext():
        weight, words = tf.Variable(1.0, name="weight"), tf.Variable(value, name="words")

        def broadcast() -> Any:
            return broadcast_variables(frontend, [weight, words], 0)

        with pytest.raises(InvalidArgumentError, match=f"^words: {text}.* cannot be sent"):
            compiled("eager" if way == "session" else way, broadcast)()


def test_a_variable_of_keras_that_cannot_be_broadcast_is_named(
    ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ranks(1).contexts[0]
    monkeypatch.setattr(keras_functions, "FRONTEND", Frontend(NumpyAdapter(), lambda: context))
    words = tf.Variable([b"a" * 16], name="words")
    with pytest.raises(InvalidArgumentError, match=r"^words: arrays of strings cannot be sent"):
        keras_functions.broadcast_weights([tf.Variable(1.0), words], 0)


@pytest.mark.parametrize("passes", [1, 2])
def test_two_optimizers_of_one_shape_in_one_session(ranks: MakeWorld, passes: int) -> None:
    def rank_body(context: Context) -> None:
        frontend, rank = frontend_of(context), context.rank
        with tf.Graph().as_default():
            weights = [tf.compat.v1.get_variable(f"w{i}", initializer=[0.0, 0.0]) for i in range(2)]
            trains = []
            for factor, weight in zip((1.0, 10.0), weights, strict=True):
                plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
                optimizer = v1.wrap(frontend, plain, GradientOptions(), passes, average=True)
                trains.append(optimizer.minimize(tf.reduce_sum(weight * factor * (rank + 1.0)), var_list=[weight]))
            with tf.compat.v1.Session(config=session_config()) as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for _ in range(passes):
                    session.run(trains)
                assert [w.tolist() for w in session.run(weights)] == [[-1.5, -1.5], [-15.0, -15.0]]

    ranks(2).run(rank_body)


@way
def test_batch_normalisation_over_all_ranks(ranks: MakeWorld, way: str) -> None:
    from hvdgloo.tensorflow.sync_batch_norm import SyncBatchNormalization

    generator = np.random.default_rng(1)
    batches = [generator.normal(100.0, 2.0, (n, 3, 2)).astype(np.float32) for n in (2, 4, 3)]
    whole = np.concatenate(batches)
    weights = generator.normal(size=whole.shape).astype(np.float32)
    plain = tf.keras.layers.BatchNormalization(momentum=0.9)
    with tf.GradientTape() as tape:
        everything = tf.constant(whole)
        tape.watch(everything)
        expected = plain(everything, training=True)
        loss = tf.reduce_sum(expected * weights)
    of_whole = tape.gradient(loss, everything)

    def rank_body(context: Context) -> None:
        rank = context.rank
        first = sum(len(b) for b in batches[:rank])
        own = slice(first, first + len(batches[rank]))
        layer = SyncBatchNormalization(momentum=0.9)
        layer.frontend = frontend_of(context)
        layer.build((None, 3, 2))

        def step(x: Any) -> Any:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = layer(x, training=True)
                own_loss = tf.reduce_sum(y * weights[own])
            return y, inner.gradient(own_loss, x)

        y, of_own = compiled(way, step)(tf.constant(batches[rank]))
        np.testing.assert_allclose(y, expected[own], atol=2e-3)
        np.testing.assert_allclose(of_own, of_whole[own], atol=2e-3)
        np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-4)
        np.testing.assert_allclose(layer.moving_variance, plain.moving_variance, rtol=1e-3)

    ranks(SIZE).run(rank_body)
    for fused in (True, None):
        with pytest.raises(ValueError, match="fused"):
            SyncBatchNormalization(fused=fused)


def batch_of(frontend: TensorFlowFrontend, names: list[str], groups: list[list[str]]) -> _Batch:
    return _Batch(GradientSync(frontend, GradientOptions()), names, groups, lambda: {name: name for name in names})


def test_gradients_may_become_ready_in_several_threads(ranks: MakeWorld) -> None:
    """As in a session, where nothing orders them: what keeps the members of a group together sees one at a time."""

    def rank_body(frontend: Frontend[Any]) -> None:
        batch = batch_of(frontend, ["a", "b"], [["a", "b"]])
        batch.begin()
        ready, inside, together = batch._reducer.ready, threading.Semaphore(), threading.Event()

        def alone(*args: Any, **kwargs: Any) -> None:
            if not inside.acquire(blocking=False):
                together.set()
                return
            together.wait(0.1)  # until the other one comes, who must not
            ready(*args, **kwargs)
            inside.release()

        batch._reducer.ready = alone  # type: ignore[method-assign]
        at_once(*(partial(batch.ready, i, np.ones(2, np.float32)) for i in range(2)))
        assert not together.is_set()
        assert [t.tolist() for (t,) in batch.wait()] == [[1.0, 1.0]] * 2

    ranks(2).run(rank_body, frontend_of)


@pytest.mark.parametrize("names", [["dense", "sparse"], ["sparse", "dense"]], ids=lambda names: names[0])
@pytest.mark.parametrize("sent", [1, 2, 3])
def test_what_a_broken_off_step_has_sent_is_dropped(ranks: MakeWorld, names: list[str], sent: int) -> None:
    """As where an operator of the backward pass raised an error: what was sent before it was not waited for."""

    def rank_body(context: Context) -> None:
        everything = [*names, "grouped", "with it"]
        batch = batch_of(frontend_of(context), everything, [everything[2:]])

        def ready(name: str, value: float) -> None:
            values = np.full((1, 2), value, np.float32)
            batch.ready(everything.index(name), values, *([np.array([context.rank])] if name == "sparse" else []))

        batch.begin()
        for name in everything[:sent]:
            ready(name, np.nan)
        for step in range(2):
            batch.begin()
            for name in everything:
                ready(name, step + context.rank)
            results = dict(zip(everything, batch.wait(), strict=True))
            (dense,), (values, indices) = results["dense"], results["sparse"]
            assert dense.tolist() == [[step + 0.5] * 2]
            assert values.tolist() == [[step] * 2, [step + 1.0] * 2]
            assert indices.tolist() == [0, 1]
            assert results["grouped"][0].tolist() == results["with it"][0].tolist() == dense.tolist()

    ranks(2).run(rank_body)


def test_the_step_after_a_broken_off_one_may_begin_with_another_gradient(
    ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session nothing orders them: what the new step has sent already is not dropped with what is left over."""
    sent = [[threading.Event(), threading.Event()] for _ in range(2)]
    plain = _Batch.ready

    def ready(batch: _Batch, index: int, *tensors: Any) -> None:
        plain(batch, index, *tensors)
        sent[batch._frontend.rank()][index].set()

    monkeypatch.setattr(_Batch, "ready", ready)

    def rank_body(context: Context) -> None:
        own = sent[context.rank]
        step = 0

        def first() -> Any:
            if step == 0:
                assert own[1].wait(10)
                raise ZeroDivisionError("the backward pass failed")
            return np.full(2, step + context.rank, np.float32)

        def second() -> Any:
            if step == 0:
                return np.full(2, np.nan, np.float32)
            assert own[0].wait(10)
            return np.full(2, 10 * step + context.rank, np.float32)

        with tf.Graph().as_default():
            gradients = [tf.numpy_function(function, [], tf.float32, stateful=True) for function in (first, second)]
            for gradient in gradients:
                gradient.set_shape([2])
            variables = [tf.compat.v1.get_variable(name, [2]) for name in "ab"]
            reduced = GradientSync(frontend_of(context), GradientOptions()).reduce(gradients, variables)
            config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)
            with tf.compat.v1.Session(config=config) as session:
                with pytest.raises(tf.errors.OpError, match="the backward pass failed"):
                    session.run(reduced)
                for step in (1, 2):
                    for event in own:
                        event.clear()
                    assert [each.tolist() for each in session.run(reduced)] == [[step + 0.5] * 2, [10 * step + 0.5] * 2]

    ranks(2).run(rank_body)
