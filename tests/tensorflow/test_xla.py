"""Functions for XLA, which cannot compile collectives."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdgloo._job.context import Context
from hvdgloo._training.options import GradientOptions
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.keras import _legacy as legacy
from hvdgloo.keras import _on_tensorflow as on_tensorflow
from hvdgloo.keras import _optimizer as hvd_keras
from hvdgloo.keras._distributed_optimizer import KerasOptions
from hvdgloo.tensorflow import _tape as tapes
from hvdgloo.tensorflow import _xla as xla
from hvdgloo.tensorflow._frontend import TensorFlowFrontend
from hvdgloo.tensorflow._gradients import GradientSync
from tests.support.ways import frontend_of
from tests.support.world import MakeWorld

LIBRARIES = ["keras", "tf_keras"]
library = pytest.mark.parametrize("library", LIBRARIES)


def library_of(name: str) -> Any:
    made = pytest.importorskip(name)
    xla.spare(made.Model)
    return made


def model_of(keras: Any, step: Callable[[Any, Any, Any], None]) -> Any:
    """A model with one weight, which starts at 0, and a step of its own."""

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data[0], data[1]
            step(self, x, y)
            return {"loss": tf.reduce_mean(y)}

        def test_step(self, data: Any) -> Any:
            step(self, data[0], data[1])
            return {"loss": tf.reduce_mean(data[1])}

    return Model()


def by_a_tape(keras: Any, frontend: TensorFlowFrontend) -> Callable[[Any, Any, Any], None]:
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)

    def step(model: Any, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) * y)
        tape = tapes.wrap(frontend, tape, GradientOptions())
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def distributed(keras: Any, frontend: TensorFlowFrontend) -> Any:
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    sync = GradientSync(frontend, KerasOptions())
    if legacy.is_legacy(optimizer):
        optimizer._hvd.sync = sync
    else:
        optimizer._hvd.sync = on_tensorflow.open_sync(KerasOptions())
        optimizer._hvd.sync._sync = sync
    return optimizer


def by_an_optimizer(keras: Any, frontend: TensorFlowFrontend, *, early: bool = True) -> Callable[[Any, Any, Any], None]:
    made = [distributed(keras, frontend)] if early else []

    def step(model: Any, x: Any, y: Any) -> None:
        if not made:
            made.append(distributed(keras, frontend))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) * y)
        gradients = tape.gradient(loss, model.trainable_variables)
        made[0].apply_gradients(list(zip(gradients, model.trainable_variables, strict=True)))

    return step


def by_an_optimizer_made_late(keras: Any, frontend: TensorFlowFrontend) -> Callable[[Any, Any, Any], None]:
    return by_an_optimizer(keras, frontend, early=False)


def by_fit(model: Any, x: Any, y: Any) -> None:
    model.fit(x, y, batch_size=1, verbose=0)


def by_batches(model: Any, x: Any, y: Any) -> None:
    for index in range(len(x)):
        model.train_on_batch(x[index : index + 1], y[index : index + 1])


def by_evaluating(model: Any, x: Any, y: Any) -> None:
    model.evaluate(x, y, batch_size=1, verbose=0)


@library
@pytest.mark.parametrize(
    "reducing", [by_a_tape, by_an_optimizer, by_an_optimizer_made_late], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("running", [by_fit, by_batches, by_evaluating], ids=lambda each: each.__name__)
def test_a_model_that_reduces_gradients_itself_trains_without_xla_and_says_so(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, library: str, reducing: Any, running: Any
) -> None:
    keras = library_of(library)
    size = 2
    x = np.ones([3, 1], np.float32)

    def rank_body(context: Context) -> None:
        steps: list[Any] = []
        model = model_of(keras, lambda *given: steps[0](*given))
        model.compile(jit_compile=True)
        assert model.jit_compile
        steps.append(reducing(keras, frontend_of(context)))
        running(model, x, np.full([3, 1], context.rank + 1, np.float32))
        assert not model.jit_compile
        # Three steps of the average of 1 and 2, with momentum; no batch was lost, none was seen twice.
        assert model.get_weights()[0].tolist() == [[-1.5 * (1 + 1.5 + 1.75)]]

    with caplog.at_level(logging.WARNING, "hvdgloo"):
        ranks(size).run(rank_body)
    said = [record.getMessage() for record in caplog.records if "XLA" in record.getMessage()]
    assert len(said) == size
    verb = "is evaluated" if running is by_evaluating else "trains"
    assert all(f"{verb} without it (jit_compile=False)" in line for line in said)


@library
def test_a_model_without_collectives_is_compiled_by_xla_as_ever(library: str) -> None:
    keras = library_of(library)
    traced: list[str] = []

    def step(model: Any, x: Any, y: Any) -> None:
        model(x)
        traced.append("")
        # Whether this is compiled shows where a collective could not be.
        before = xla._met.count
        try:
            xla.meet()
        except InvalidArgumentError:
            traced[-1] = "compiled"
        xla._met.count = before

    model = model_of(keras, step)
    model.compile(jit_compile=True)
    for running in (by_fit, by_batches, by_evaluating):
        traced.clear()
        running(model, np.ones([3, 1], np.float32), np.ones([3, 1], np.float32))
        assert model.jit_compile
        assert traced[-1:] != [""], running
    by_fit(model, np.ones([3, 1], np.float32), np.ones([3, 1], np.float32))
    assert traced[-1] == "compiled"


@pytest.mark.parametrize("within", ["", "a function", "a branch"])
def test_a_collective_that_xla_is_to_compile_is_refused_in_a_sentence(ranks: MakeWorld, within: str) -> None:
    frontend = frontend_of(ranks(1).contexts[0])

    def body(x: Any) -> Any:
        if within == "a function":
            return tf.function(frontend.allreduce, autograph=False)(x)
        if within == "a branch":
            return tf.cond(tf.size(x) > 0, lambda: frontend.allreduce(x), lambda: x)
        return frontend.allreduce(x)

    with pytest.raises(InvalidArgumentError, match="without jit_compile=True") as caught:
        tf.function(body, jit_compile=True)(tf.ones([2]))
    assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    assert tf.function(body)(tf.ones([2])).numpy().tolist() == [1.0, 1.0]


def test_importing_the_front_end_is_enough() -> None:
    importlib.import_module("hvdgloo.tensorflow")
    assert hasattr(tf.keras.Model.make_train_function, "hvdgloo")
