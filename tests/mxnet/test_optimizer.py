"""DistributedOptimizer against the plain optimizer that is given the ranks' average."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import hvdgloo.mxnet as hvd
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._job.context import Context
from hvdgloo._training.options import GradientOptions
from hvdgloo.errors import DuplicateNameError, InvalidArgumentError, NotInitializedError
from hvdgloo.mxnet._optimizer import wrap
from hvdgloo.mxnet.compression import Compression
from hvdgloo.mxnet.functions import _broadcast_parameters
from tests.support.frameworks import load
from tests.support.world import MakeWorld

SHAPES = [(5, 3), (5,), (2, 5), (2,), (4, 2), (1,)]
SIZE = 3
STEPS = 4

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd, four at once": lambda: mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=0.5),
    "sgd, one at a time": lambda: mx.optimizer.SGD(learning_rate=0.1, wd=0.01, lazy_update=False),
    "adam": lambda: mx.optimizer.Adam(learning_rate=0.05, clip_gradient=0.5),
    "lamb": lambda: mx.optimizer.LAMB(learning_rate=0.05),
    "lars": lambda: mx.optimizer.LARS(learning_rate=0.05),
}

frontend_of = load("mxnet").frontend


def gradients(rank: int, step: int, dtype: str) -> list[np.ndarray]:
    numbers = np.random.default_rng([rank, step])
    # In eighths: exact in float16, and so are their averages over a power of two.
    return [(numbers.integers(-16, 16, shape) / 8).astype(dtype) for shape in SHAPES]


def train(optimizer: Any, of_step: Callable[[int], list[np.ndarray]], dtype: str = "float32") -> list[np.ndarray]:
    """Train as the Module API does: all weights go to the updater at once, by number."""
    weights = [mx.nd.ones(shape, dtype=dtype) for shape in SHAPES]
    updater = mx.optimizer.get_updater(optimizer)
    for step in range(STEPS):
        given = [mx.nd.array(gradient, dtype=dtype) for gradient in of_step(step)]
        updater(list(range(len(SHAPES))), given, weights)
    return [weight.asnumpy() for weight in weights]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "options", [GradientOptions(), GradientOptions(groups=2, gradient_predivide_factor=2.0)], ids=["", "groups"]
)
def test_weights_equal_one_process_s_with_all_the_data(ranks: MakeWorld, name: str, options: GradientOptions) -> None:
    def average(step: int) -> list[np.ndarray]:
        return [
            np.mean(each, axis=0) for each in zip(*(gradients(r, step, "float32") for r in range(SIZE)), strict=True)
        ]

    expected = train(OPTIMIZERS[name](), average)

    def rank_body(context: Context) -> list[np.ndarray]:
        optimizer = wrap(frontend_of(context), OPTIMIZERS[name](), options)
        return train(optimizer, lambda step: gradients(context.rank, step, "float32"))

    for result in ranks(SIZE).run(rank_body):
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("at_once", [True, False])
def test_each_step_is_counted_once_however_weights_are_updated(ranks: MakeWorld, at_once: bool, size: int) -> None:
    """A step ends where the next one begins, with the same weight."""

    def rank_body(context: Context) -> int:
        optimizer = wrap(frontend_of(context), mx.optimizer.SGD(0.1), GradientOptions())
        weights = [mx.nd.ones(shape) for shape in SHAPES]
        updater = mx.optimizer.get_updater(optimizer)
        for _ in range(STEPS):
            given = [mx.nd.ones(shape) for shape in SHAPES]
            if at_once:
                updater(list(range(len(SHAPES))), given, weights)
            else:
                for index, (gradient, weight) in enumerate(zip(given, weights, strict=True)):
                    updater(index, gradient, weight)
        return context.metrics().steps

    assert ranks(size).run(rank_body) == [STEPS - 1] * size


@pytest.mark.parametrize("make", [lambda: mx.optimizer.SGD(0.1, multi_precision=True), lambda: mx.optimizer.Adam()])
@pytest.mark.filterwarnings("ignore:Accumulating with float16")
def test_weights_of_float16(ranks: MakeWorld, make: Callable[[], Any]) -> None:
    """Also where a plain ``update_multi_precision`` calls ``update``, which must not reduce a second time."""
    plain = make()
    plain.multi_precision = True

    def average(step: int) -> list[np.ndarray]:
        return [np.mean(each, axis=0) for each in zip(*(gradients(r, step, "float16") for r in range(2)), strict=True)]

    expected = train(plain, average, "float16")

    def rank_body(context: Context) -> list[np.ndarray]:
        held = make()
        held.multi_precision = True
        optimizer = wrap(frontend_of(context), held, GradientOptions())
        return train(optimizer, lambda step: gradients(context.rank, step, "float16"), "float16")

    for result in ranks(2).run(rank_body):
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_all_gradients_of_a_step_are_under_way_at_once(ranks: MakeWorld) -> None:
    """Or there is nothing to fuse."""

    def rank_body(context: Context) -> tuple[int, list[str]]:
        frontend, events = frontend_of(context), []
        register = frontend.persistent

        def watched(spec: Any, name: Any, **how: Any) -> Any:
            operation = register(spec, name, **how)

            def start(tensors: Any) -> Any:
                pending = operation.start(tensors)
                events.append(name)

                class Watched(type(pending)):  # type: ignore[misc]
                    __slots__ = ()

                    def result(self, timeout: float | None = None) -> Any:
                        events.append("wait")
                        return super().result(timeout)

                pending.__class__ = Watched
                return pending

            return SimpleNamespace(in_place=operation.in_place, start=start)

        frontend.persistent = watched  # type: ignore[method-assign]
        train(wrap(frontend, mx.optimizer.Adam(), GradientOptions()), lambda step: gradients(0, step, "float32"))
        return events.index("wait"), events[: len(SHAPES)]

    for first_wait, names in ranks(2).run(rank_body):
        assert first_wait == len(SHAPES)
        assert names == [f"gradient.{i}" for i in reversed(range(len(SHAPES)))]  # as the backward pass computes them


def test_one_process_alone_does_nothing_else(ranks: MakeWorld) -> None:
    context = ranks(1).contexts[0]
    frontend = frontend_of(context)
    frontend.persistent = None  # type: ignore[method-assign,assignment]
    optimizer = wrap(frontend, mx.optimizer.Adam(), GradientOptions(compression=Compression.fp16))
    alone = train(mx.optimizer.Adam(), lambda step: gradients(0, step, "float32"))
    for got, wanted in zip(train(optimizer, lambda step: gradients(0, step, "float32")), alone, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_ranks_outside_of_the_set_train_alone(ranks: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> float:
        pair = frontend.add_process_set(ProcessSet([0, 2]))
        optimizer = wrap(frontend, mx.optimizer.SGD(learning_rate=1.0), GradientOptions(process_set=pair))
        weight = mx.nd.zeros((1,))
        optimizer.update("w", weight, mx.nd.array([frontend.rank() + 1.0]), None)
        return float(weight.asscalar())

    assert ranks(3).run(rank_body, frontend_of) == [-2.0, -2.0, -2.0]


def test_one_state(ranks: MakeWorld) -> None:
    frontend = frontend_of(ranks(1).contexts[0])
    plain = mx.optimizer.SGD(learning_rate=0.5)
    optimizer = wrap(frontend, plain, GradientOptions())
    optimizer.rescale_grad = 0.25
    plain.set_learning_rate(0.125)
    assert (plain.rescale_grad, optimizer.learning_rate) == (0.25, 0.125)
    assert (plain.aggregate_num, type(optimizer).__name__) == (4, "SGD")
    assert "_sync" not in vars(plain)
    with pytest.raises(InvalidArgumentError, match="already distributed"):
        wrap(frontend, optimizer, GradientOptions())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("make", [mx.optimizer.SGD, mx.optimizer.Adam])
def test_copies_are_distributed(
    ranks: MakeWorld, copied: Callable[[Any], Any], make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same options, and a state of their own."""
    narrowed = []
    compress = Compression.fp16.compress
    monkeypatch.setattr(Compression.fp16, "compress", lambda tensor: (narrowed.append(tensor), compress(tensor))[1])

    def rank_body(context: Context) -> list[np.ndarray]:
        optimizer = wrap(frontend_of(context), make(learning_rate=0.25), GradientOptions(compression=Compression.fp16))
        made = copied(optimizer)
        optimizer.set_learning_rate(0.0)
        assert (made.learning_rate, type(made)) == (0.25, type(optimizer))
        return train(made, lambda step: gradients(context.rank, step, "float32"))

    def average(step: int) -> list[np.ndarray]:
        return [np.mean(each, axis=0) for each in zip(*(gradients(r, step, "float32") for r in range(2)), strict=True)]

    expected = train(make(learning_rate=0.25), average)
    for result in ranks(2).run(rank_body):
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert len(narrowed) == 2 * STEPS * len(SHAPES)


def test_a_loaded_one_does_not_train_alone_for_want_of_init() -> None:
    hvd.init()
    try:
        pickled = pickle.dumps(hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.5)))
    finally:
        hvd.shutdown()
    loaded = pickle.loads(pickled)
    assert loaded.learning_rate == 0.5
    weight = mx.nd.zeros((1,))
    with pytest.raises(NotInitializedError):
        loaded.update(0, weight, mx.nd.ones((1,)), None)
    assert weight.asscalar() == 0.0


def test_a_gradient_that_cannot_be_sent_leaves_the_others_at_rest(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> list[float]:
        optimizer = wrap(frontend_of(context), mx.optimizer.SGD(learning_rate=1.0), GradientOptions())
        weights = [mx.nd.zeros((2, 1)), mx.nd.zeros((2, 1))]
        good = mx.nd.ones((2, 1)) * (context.rank + 1)
        with pytest.raises(InvalidArgumentError, match="row_sparse"):
            optimizer.update([0, 1], weights, [good.tostype("row_sparse"), good.copy()], [None, None])
        try:
            optimizer.update([0, 1], weights, [good.copy(), good.copy()], [None, None])
        except DuplicateNameError:
            pytest.fail("the other gradient is still under way")
        return [float(weight.asnumpy().sum()) for weight in weights]

    assert ranks(2).run(rank_body) == [[-3.0, -3.0]] * 2


def test_parameters_that_are_not_initialised_are_broadcast_once_they_are(ranks: MakeWorld) -> None:
    def rank_body(frontend: Frontend[Any]) -> list[list[float]]:
        known = mx.gluon.Parameter("known", shape=(2,))
        late = mx.gluon.Parameter("late", shape=(0,), allow_deferred_init=True)
        never = mx.gluon.Parameter("never", shape=(3,))
        value = mx.init.Constant(frontend.rank() + 1.0)
        known.initialize(value)
        late.initialize(value)
        both = {"a": known, "b": late, "c": mx.nd.ones((1,)) * frontend.rank(), "d": never}
        _broadcast_parameters(frontend, both, 0, "old.")
        _broadcast_parameters(frontend, both, 1, "new.")  # in place of the first
        late.shape = (2,)
        late._finish_deferred_init()
        never.initialize(value)
        results = [known.data(), late.data(), both["c"], never.data()]
        never.initialize(mx.init.Constant(frontend.rank()), force_reinit=True)  # this rank's own affair
        return [list(each.asnumpy()) for each in [*results, never.data()]]

    for rank, results in enumerate(ranks(2).run(rank_body, frontend_of)):
        assert results == [[1.0] * 2, [2.0] * 2, [0.0], [2.0] * 3, [float(rank)] * 3]


def test_a_deep_copy_of_a_net_that_awaits_its_shapes_gets_its_own_values(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> list[list[float]]:
        late = mx.gluon.Parameter("late", shape=(0,), allow_deferred_init=True)
        late.initialize(mx.init.Constant(context.rank + 1.0))
        _broadcast_parameters(frontend_of(context), {"late": late}, 1, "")
        nets = [*copy.deepcopy([late]), late]
        for number, parameter in enumerate(nets):
            parameter.shape = (number + 1,)
            parameter._finish_deferred_init()
        return [list(parameter.data().asnumpy()) for parameter in nets]

    assert ranks(2).run(rank_body) == [[[2.0], [2.0] * 2]] * 2
