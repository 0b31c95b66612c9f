"""The gradients that meet belong to the same variables, whatever else ranks have built and whatever comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from hvdgloo._job.context import Context
from hvdgloo._training import labels
from hvdgloo._training.options import GradientOptions
from hvdgloo.errors import HorovodInternalError, MismatchError, StallError
from hvdgloo.keras import _on_tensorflow as on_tensorflow
from hvdgloo.keras import _optimizer as hvd_keras
from hvdgloo.keras._distributed_optimizer import KerasOptions
from hvdgloo.tensorflow._gradients import GradientSync
from tests.support.ways import frontend_of
from tests.support.world import MakeWorld

way = pytest.mark.parametrize("way", ["eager", "function"])


def compiled(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return function if way == "eager" else tf.function(function, autograph=False)  # type: ignore[no-any-return]


def weights(*names: str) -> list[Any]:
    return [tf.Variable([1.0], name=name) for name in names]


def reduction(way: str, context: Context, variables: list[Any], **options: Any) -> Callable[[float], list[float]]:
    """A step's reduction of gradients that have some value."""
    sync = GradientSync(frontend_of(context), GradientOptions(**options))
    step = compiled(way, lambda x: sync.reduce([x * tf.ones([1]) for _ in variables], variables))
    return lambda value: [float(gradient[0]) for gradient in step(tf.constant(value))]


@way
def test_models_of_one_shape_that_a_rank_reduces_in_another_order_are_not_mixed(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        critics = [reduction(way, context, weights(f"{name}/kernel", f"{name}/bias")) for name in ("one", "two")]
        with pytest.raises(MismatchError, match=r"of one/kernel on rank 0 and of two/kernel on rank 1\. Reduce"):
            critics[context.rank](1.0)
        # The job goes on.
        for _ in range(2):
            for factor, critic in enumerate(critics, 1):
                assert critic(factor * (context.rank + 1.0)) == [factor * 1.5] * 2

    ranks(2).run(rank_body)


@way
def test_an_order_that_changes_later_is_a_stall_that_names_the_variables(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        critics = [reduction(way, context, weights(f"{name}/kernel")) for name in ("one", "two")]
        assert [critic(context.rank + 1.0) for critic in critics] == [[1.5], [1.5]]
        with pytest.raises(StallError) as caught:
            critics[context.rank](1.0)
        assert "one/kernel" in str(caught.value)
        assert "two/kernel" in str(caught.value)

    ranks(2, stall_warning_time=0.5, stall_shutdown_time=3.0).run(rank_body)


@way
def test_what_one_rank_alone_has_built_does_not_matter(
    ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Keras has counted on there. (Here ranks are threads, and have all variables in common.)"""
    monkeypatch.setattr(labels, "_exist", lambda paths, variables: False)

    def rank_body(context: Context) -> None:
        own = ["dense/kernel", "dense_1/kernel"] if context.rank else ["dense_3/kernel", "dense_4/kernel"]
        both = [reduction(way, context, weights(name)) for name in own]
        for _ in range(2):
            assert [step(factor * (context.rank + 1.0)) for factor, step in enumerate(both, 1)] == [[1.5], [3.0]]

    ranks(2).run(rank_body)


@way
def test_a_gradient_that_one_rank_does_not_have_is_named(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        variables = weights("dense/kernel", "dense/bias")
        sync = GradientSync(frontend_of(context), GradientOptions())

        def step(uses_all: bool) -> Callable[[Any], list[Any]]:
            return compiled(way, lambda x: sync.reduce([x * tf.ones([1]), x if uses_all else None], variables))

        text = r"the gradient of dense/bias is dense on rank 0, none on rank 1; .*unconnected_gradients='zero'"
        with pytest.raises(MismatchError, match=text) as caught:
            step(context.rank == 0)(tf.constant([1.0]))
        assert isinstance(caught.value, tf.errors.FailedPreconditionError)
        for uses_all in (True, False):  # on all ranks
            got = step(uses_all)(tf.constant([context.rank + 1.0]))
            assert [None if each is None else each.numpy().tolist() for each in got] == [
                [1.5],
                [1.5] if uses_all else None,
            ]
        # What is missing only later is all that the others wait for.
        with pytest.raises(HorovodInternalError) as late:
            [step(context.rank == 0)(tf.constant([1.0])) for _ in range(2)]  # rank 1 may go on once
        assert "dense/bias: " in str(late.value), str(late.value)

    ranks(2, stall_warning_time=0.5, stall_shutdown_time=3.0).run(rank_body)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras says it as well
def test_an_optimizer_of_keras_names_the_gradient_that_one_rank_does_not_have(ranks: MakeWorld) -> None:
    keras = tf.keras
    optimizers = [hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]

    def rank_body(context: Context) -> None:
        optimizer = optimizers[context.rank]
        optimizer._hvd.sync = sync = on_tensorflow.open_sync(KerasOptions())
        sync._sync = GradientSync(frontend_of(context), KerasOptions())
        variables = [keras.Variable([0.0], name="kernel"), keras.Variable([0.0], name="offset")]
        with pytest.raises(MismatchError, match="the gradient of offset is dense on rank 0, none on rank 1"):
            optimizer.apply([tf.ones([1]), None if context.rank else tf.ones([1])], variables)
        optimizer.apply([tf.ones([1]) * (context.rank + 1.0), None], variables)
        assert [float(v.value[0]) for v in variables] == [-1.5, 0.0]

    ranks(2).run(rank_body)


@way
def test_a_gradient_that_is_sparse_on_some_ranks_is_named(ranks: MakeWorld, way: str) -> None:
    def rank_body(context: Context) -> None:
        (table,) = weights("embedding/table")
        sync = GradientSync(frontend_of(context), GradientOptions())

        def step(x: Any) -> Any:
            slices = tf.IndexedSlices(x, tf.constant([0]), tf.constant([1]))
            return sync.reduce([slices if context.rank else x], [table])

        with pytest.raises(
            MismatchError, match=r"embedding/table is dense on rank 0, sparse on rank 1; sparse_as_dense"
        ):
            compiled(way, step)(tf.ones([1]))

    ranks(2).run(rank_body)


def test_names_of_a_session_are_the_variables_names(ranks: MakeWorld) -> None:
    """There a name is given when the operator is made, in whatever order."""

    def rank_body(context: Context) -> None:
        with tf.Graph().as_default():
            given = {name: tf.compat.v1.get_variable(name, initializer=[1.0]) for name in ("one", "two")}
            sync = GradientSync(frontend_of(context), GradientOptions())
            reduced = {}
            for name in ("one", "two") if context.rank else ("two", "one"):
                value = (10.0 if name == "two" else 1.0) * (context.rank + 1.0)
                reduced[name] = sync.reduce([tf.constant([value])], [given[name]])[0]
            with tf.compat.v1.Session() as session:
                got = session.run(reduced)
        assert {name: value.tolist() for name, value in got.items()} == {"one": [1.5], "two": [15.0]}

    ranks(2).run(rank_body)
