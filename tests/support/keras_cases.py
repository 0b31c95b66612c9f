"""Ways to train with Keras, each on all ranks of a job; the test starts the job once for each of Keras's backends.

    hvdgloo-run -np 2 --grace-period 30 tests/support/keras_cases.py RESULTS [CASE...]

Every rank runs every case (or those that are named) and writes, for each, "ok" or what it raised, to
RESULTS.<rank>.json. Ranks compare what they have with training in one process on the concatenated batches, which the
first of them does. After all cases the last rank is killed in the middle of ``fit``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import hvdgloo.keras as hvd
from hvdgloo._job import process
from hvdgloo.errors import InvalidArgumentError, MismatchError

BACKEND = keras.backend.backend()
E = TypeVar("E", bound=Exception)
CASES: dict[str, Callable[[], None]] = {}
ALONE: dict[str, list[np.ndarray]] = {}
BATCH, BATCHES = 12, 4
RNG = np.random.default_rng(7)
X = RNG.normal(size=(BATCH * BATCHES, 4)).astype(np.float32)
Y = (X @ RNG.normal(size=(4, 3))).astype(np.float32)
WORDS = RNG.integers(0, 6, size=(BATCH * BATCHES, 2))


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def eagerly(function: Callable[[], None]) -> Callable[[], None]:
    """A case that is the same in TensorFlow's graphs, whose tracing would take most of its time."""

    @functools.wraps(function)
    def run() -> None:
        if BACKEND != "tensorflow":
            return function()
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)
        try:
            function()
        finally:
            tf.config.run_functions_eagerly(False)

    return run


def own(values: np.ndarray, size: int | None = None) -> np.ndarray:
    """This rank's part of each batch, of which the first ``size`` ranks have a part."""
    batches = values.reshape(BATCHES, BATCH, *values.shape[1:])
    return batches[:, hvd.rank() :: size or hvd.size()].reshape(-1, *values.shape[1:])


def dense(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((4,)), *layers])


def embedding(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Embedding(6, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((2,), dtype="int32"), *layers])


def same_everywhere(model: Any, process_set: Any = hvd.global_process_set) -> None:
    weights = [np.asarray(w).tobytes() for w in model.get_weights()]
    everyone = hvd.allgather_object(weights, "weights", process_set)  # named: unnamed calls are counted on all ranks
    assert all(other == everyone[0] for other in everyone), "ranks hold different weights"


def trained_as_one(
    make: Callable[[], Any],
    wrap: Callable[[Any], Any] = hvd.DistributedOptimizer,
    build: Callable[[], Any] = dense,
    x: np.ndarray = X,
    epochs: int = 2,
    tolerance: float = 1e-5,
    process_set: Any = hvd.global_process_set,
    **compiling: Any,
) -> Any:
    """Train on a set of ranks and in this process alone; the weights must agree. Returns the distributed model."""
    # How a step is compiled makes no difference to it, so few have to be trained.
    ranks = process_set.ranks
    key = f"{build.__name__} {epochs} {ranks} {make().get_config()}"
    if key not in ALONE:
        alone = build()
        if hvd.rank() == ranks[0]:
            # Nor does tracing one, which takes longer than this training.
            eager = {"run_eagerly": True} if BACKEND == "tensorflow" else {}
            alone.compile(optimizer=make(), loss=keras.losses.MeanSquaredError(), **eager)
            alone.fit(x, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
        ALONE[key] = hvd.broadcast_object(alone.get_weights(), ranks[0], "alone", process_set)
    model = build()
    before = model.get_weights()
    model.compile(optimizer=wrap(make()), loss=keras.losses.MeanSquaredError(), **compiling)
    size = process_set.size()
    batches = own(x, size), own(Y, size)
    model.fit(*batches, batch_size=BATCH // size, epochs=epochs, shuffle=False, verbose=0)
    for got, expected, start in zip(model.get_weights(), ALONE[key], before, strict=True):
        np.testing.assert_allclose(got, expected, atol=tolerance)
        assert np.abs(expected - start).max() > 4 * tolerance, "nothing was learnt"
    same_everywhere(model, process_set)
    return model


def raised(kind: type[E], function: Callable[[], Any]) -> E:
    """Return the exception that a function raises, which must be of a kind."""
    try:
        function()
    except kind as error:
        return error
    raise AssertionError("no error")


def counted(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return a function's result, and the number of allreduces of gradients, and of the ranks' agreements about them
    before a step, that this rank submitted meanwhile."""
    from hvdgloo._engine.engine import Engine

    plain, calls = Engine.launch, []

    def launch(self: Any, persistent: Any, *args: Any, **kwargs: Any) -> Any:
        if persistent.request.name.startswith(("allreduce.gradients", "allreduce.finite")):
            calls.append(persistent.request.name)
        return plain(self, persistent, *args, **kwargs)

    Engine.launch = launch  # type: ignore[method-assign]
    try:
        return function(), len(calls)
    finally:
        Engine.launch = plain  # type: ignore[method-assign]


def sgd_with_momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


@case
def sgd_is_equal_to_one_process() -> None:
    trained_as_one(sgd_with_momentum)


@case
def adam_is_equal_to_one_process() -> None:
    _, calls = counted(lambda: trained_as_one(adam))
    assert calls == 4 * 2 * BATCHES, calls  # one for each gradient in each step: nothing is reduced twice


@case
def two_of_three_ranks_are_equal_to_one_process() -> None:
    if hvd.size() != 3:
        return
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        for make in (sgd_with_momentum, adam):
            trained_as_one(make, lambda o: hvd.DistributedOptimizer(o, process_set=pair), process_set=pair)
    hvd.remove_process_set(pair)


@case
def local_sgd_meets_every_so_many_batches() -> None:
    callback = hvd.callbacks.LocalSGDCallback
    if BACKEND == "jax":
        refused = dense()
        refused.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
        error = raised(InvalidArgumentError, lambda: refused.fit(own(X), own(Y), callbacks=[callback(2)], verbose=0))
        assert "JAX" in str(error)
        return
    alone, every, some = dense(), dense(), dense()
    per = BATCH // hvd.size()
    for model in (alone, every, some):
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    alone.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    every.fit(own(X), own(Y), batch_size=per, epochs=2, shuffle=False, verbose=0, callbacks=[callback(1)])
    for got, expected in zip(every.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    streamed = dense()
    streamed.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    # Also at the end of each epoch, of four batches. In fragments, the first meets after the second batch of each.
    for model, options, steps in (
        (some, {"sync_every": 3}, 4),
        (streamed, {"sync_every": 4, "fragments": 2, "overlap": 1}, 6),
    ):
        before = hvd.metrics().outer_steps
        meets = callback(**options)
        model.fit(own(X), own(Y), batch_size=per, epochs=2, shuffle=False, verbose=0, callbacks=[meets])
        assert hvd.metrics().outer_steps - before == steps
        everyones = hvd.allgather_object([weight.tobytes() for weight in model.get_weights()])
        assert all(weights == everyones[0] for weights in everyones)
        assert not np.array_equal(model.get_weights()[0], every.get_weights()[0]) or hvd.size() == 1
    distributed = dense()
    distributed.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    error = raised(InvalidArgumentError, lambda: distributed.fit(own(X), own(Y), callbacks=[callback(2)], verbose=0))
    assert "DistributedOptimizer" in str(error)


@case
def train_on_batch() -> None:
    alone, model = dense(), dense()
    alone.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    per = BATCH // hvd.size()
    for i in range(BATCHES):
        alone.train_on_batch(X[i * BATCH : (i + 1) * BATCH], Y[i * BATCH : (i + 1) * BATCH])
        model.train_on_batch(own(X)[i * per : (i + 1) * per], own(Y)[i * per : (i + 1) * per])
    for got, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@case
def metrics_and_progress_of_a_fit_are_logged() -> None:
    model = dense()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse", metrics=["mae"])
    callback = hvd.callbacks.LogCallback(average=True)
    per = BATCH // hvd.size()
    history = model.fit(
        own(X), own(Y), batch_size=per, epochs=2, validation_data=(own(X), own(Y)), verbose=0, callbacks=[callback]
    ).history
    logged = hvd.metrics().logged
    assert {"loss", "mae", "val_loss", "val_mae"} <= {*logged}, logged
    mine = [history[name][-1] for name in ("val_loss", "val_mae")]
    average = np.mean(hvd.allgather_object(mine), axis=0)
    np.testing.assert_allclose([logged["val_loss"], logged["val_mae"]], average, rtol=1e-5)
    counters = process.current().engine.counters
    assert counters is not None
    told = counters.progress.sample(0)
    assert (told.step, told.steps, told.epoch, told.epochs) == (None, BATCHES, 1, 2), told
    hvd.callbacks.LogCallback().on_epoch_end(2, {f"class {n}": 0.5 for n in range(80)})  # no failure of the training
    assert len(hvd.metrics().logged) == 64, hvd.metrics().logged


@case
def checkpoints_during_fit_are_counted_for_the_charts() -> None:
    model = dense()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    before, _ = process.group_counters().saves.get("checkpoint", (0, 0.0))
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [
            keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras"),
            keras.callbacks.ModelCheckpoint(f"{folder}/best.weights.h5", monitor="loss", mode="max",
                save_best_only=True, save_weights_only=True),  # only the first epoch's: the loss falls
            keras.callbacks.BackupAndRestore(f"{folder}/backup"),
            hvd.callbacks.LogCallback(),
        ]  # fmt: skip
        model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), epochs=3, verbose=0, callbacks=callbacks)
        assert {"1.keras", "2.keras", "3.keras", "best.weights.h5"} <= {*os.listdir(folder)}
        count, _ = process.group_counters().saves["checkpoint"]
        assert count - before == 3 + 1 + 3, count - before
        model.save(f"{folder}/after.keras")
        assert process.group_counters().saves["checkpoint"][0] == count, "counted after the fit"


@case
def each_batch_is_a_step_in_metrics() -> None:
    model = dense()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), epochs=1, shuffle=False, verbose=0)
    before = hvd.metrics()
    model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), epochs=2, shuffle=False, verbose=0)
    counted_since = hvd.metrics() - before
    assert counted_since.steps == 2 * BATCHES, counted_since
    assert counted_since.operations >= 2 * BATCHES, counted_since
    assert 0 < counted_since.step_waiting + counted_since.step_communicating <= counted_since.step_seconds


@case
def several_steps_per_execution() -> None:
    if BACKEND != "torch":  # where Keras has only one
        trained_as_one(lambda: keras.optimizers.SGD(0.05), steps_per_execution=2)


@case
def clipping_comes_after_reduction() -> None:
    trained_as_one(lambda: keras.optimizers.SGD(0.05, clipnorm=0.1))
    trained_as_one(lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1))


@case
@eagerly
def moving_averages_of_weights() -> None:
    trained_as_one(lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3))


@case
def accumulation_reduces_only_when_there_is_a_step() -> None:
    def make() -> Any:
        return keras.optimizers.SGD(0.05, momentum=0.5, gradient_accumulation_steps=2)

    _, calls = counted(lambda: trained_as_one(make))
    assert calls == 4 * 2 * BATCHES // 2, calls


@case
def several_passes_per_step() -> None:
    """The sums of two passes' gradients, or their means, make one step."""
    for average, rate in ((True, 0.05), (False, 0.025)):
        passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
        alone, model = dense(), dense()
        alone.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
        alone.fit(X, Y, batch_size=2 * BATCH, epochs=2, shuffle=False, verbose=0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **passes)
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), epochs=2, shuffle=False, verbose=0)
        for got, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@case
def gradients_of_embeddings() -> None:
    def make() -> Any:
        return keras.optimizers.SGD(0.5)

    def as_dense(optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, sparse_as_dense=True)

    trained_as_one(make, build=embedding, x=WORDS)
    trained_as_one(make, as_dense, build=embedding, x=WORDS)


@case
@eagerly
def groups_and_compression() -> None:
    def make() -> Any:
        return keras.optimizers.SGD(0.05)

    if BACKEND == "jax":  # which compiles long, and leaves all of this to the same reducer
        both = {"groups": 2, "gradient_predivide_factor": 2.0, "compression": hvd.Compression.fp16}
        trained_as_one(make, lambda o: hvd.DistributedOptimizer(o, **both), tolerance=5e-3)
        return
    trained_as_one(make, lambda o: hvd.DistributedOptimizer(o, groups=2))
    trained_as_one(make, lambda o: hvd.DistributedOptimizer(o, gradient_predivide_factor=2.0))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        trained_as_one(make, lambda o, c=compression: hvd.DistributedOptimizer(o, compression=c), tolerance=5e-3)


@case
def a_rank_with_nan_skips_with_all_others() -> None:
    model = dense()
    scaled = keras.optimizers.LossScaleOptimizer(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), initial_scale=8.0
    )
    model.compile(optimizer=scaled, loss="mse")
    per = BATCH // hvd.size()
    before = model.get_weights()
    x = own(X).copy()
    if hvd.rank() == 1:
        x[:per] = np.nan
    _, calls = counted(lambda: model.train_on_batch(x[:per], own(Y)[:per]))
    assert calls == 4, calls  # the gradients, and no agreement about them before
    for got, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, start)
    assert float(keras.ops.convert_to_numpy(scaled.dynamic_scale)) == 4.0
    model.train_on_batch(x[per : 2 * per], own(Y)[per : 2 * per])
    assert max(np.abs(a - b).max() for a, b in zip(model.get_weights(), before, strict=True)) > 1e-4
    same_everywhere(model)


@case
def ranks_agree_about_gradients_that_are_not_all_reduced() -> None:
    """Local layers, passes that only add up, and extremes, which a NaN of one rank need not reach."""
    per = BATCH // hvd.size()
    for options, layer in (({"op": hvd.Max}, None), ({"backward_passes_per_step": 2}, None), ({}, 0)):
        model = dense()
        local = [] if layer is None else [model.layers[layer]]
        partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=local, **options)
        scaled = keras.optimizers.LossScaleOptimizer(partial, initial_scale=8.0)
        model.compile(optimizer=scaled, loss="mse")
        x = own(X).copy()
        if hvd.rank() == 1:
            x[:per] = np.nan
        before = model.get_weights()
        for batch in range(3):
            part = slice(batch * per, (batch + 1) * per)
            model.train_on_batch(x[part], own(Y)[part])
        assert float(keras.ops.convert_to_numpy(scaled.dynamic_scale)) == 4.0
        after = model.get_weights()
        assert all(np.isfinite(w).all() for w in after)
        assert max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) > 1e-4
        if not local:
            same_everywhere(model)


@case
def mixed_precision_trains() -> None:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = dense()
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        history = model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), epochs=8, shuffle=False, verbose=0)
        assert history.history["loss"][-1] < history.history["loss"][0]
        same_everywhere(model)
    finally:
        keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Return the front-end's log messages meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvdgloo")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@case
@eagerly
def like_models_are_told_apart_by_their_names() -> None:
    def step(optimizer: Any, variable: Any, value: float) -> float:
        variable.assign([0.0])
        optimizer.apply([keras.ops.convert_to_tensor([value * (hvd.rank() + 1)], "float32")], [variable])
        return float(keras.ops.convert_to_numpy(variable.value)[0])

    def pair(*names: str) -> list[tuple[Any, Any]]:
        return [
            (hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), keras.Variable([0.0], name=name)) for name in names
        ]

    mean = -(hvd.size() + 1) / 2
    # What one rank alone has built has taken some of Keras's numbers.
    for _ in range(hvd.rank()):
        keras.layers.Dense(1).build((1, 1))
    layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
    for factor, layer in enumerate(layers, 1):
        layer.build((1, 1))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        layer.kernel.assign([[0.0]])
        optimizer.apply([keras.ops.convert_to_tensor([[factor * (hvd.rank() + 1.0)]], "float32")], [layer.kernel])
        np.testing.assert_allclose(layer.get_weights()[0], [[factor * mean]])
    twins = pair("critic_one", "critic_two")
    if BACKEND != "jax":  # whose step is compiled: it says so of itself
        mine = twins if hvd.rank() else twins[::-1]
        error = raised(MismatchError, lambda: step(*mine[0], 1.0))
        assert "of critic_two on rank 0 and of critic_one on rank 1" in str(error), error
    for factor, (optimizer, variable) in enumerate(twins, 1):
        assert step(optimizer, variable, float(factor)) == factor * mean


@case
def different_weights_are_told_unless_they_are_broadcast() -> None:
    """Also where a call is several steps, after which the callback broadcasts weights that were not built before."""
    several = {} if BACKEND == "torch" else {"steps_per_execution": 2}
    for callbacks, expected in (([], 1), ([hvd.callbacks.BroadcastGlobalVariablesCallback(0)], 0)):
        with logged() as said:
            keras.utils.set_random_seed(1 + hvd.rank())
            model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
            model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse", **several)
            for _ in range(2):
                model.fit(
                    own(X),
                    own(Y),
                    batch_size=BATCH // hvd.size(),
                    epochs=2,
                    shuffle=False,
                    verbose=0,
                    callbacks=callbacks,
                )
        told = [line for line in said if "same weights" in line]
        assert len(told) == (expected if hvd.rank() == 0 else 0), said
        if told:
            assert told[0].startswith("rank 1 ")
            assert "Pass hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit() on all ranks" in told[0] or (
                BACKEND == "tensorflow" and "hvd.broadcast_variables(model.variables, root_rank=0)" in told[0]
            )


@case
def different_weights_are_told_in_a_loop_of_one_s_own() -> None:
    if BACKEND == "jax":  # whose compiled steps could look at weights only in each of them
        return
    with logged() as said:
        model, variable = dense(), keras.Variable([1.0 + hvd.rank(), 2.0], name="own")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        alike = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        for _ in range(3):
            optimizer.apply([keras.ops.ones((2,))], [variable])
            alike.apply([keras.ops.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
    assert len([line for line in said if "same weights" in line]) == (hvd.rank() == 0), said


@case
@eagerly
def a_step_that_is_repeated_after_ctrl_c_reduces_once() -> None:
    """The first rank has it before some lines of the library; it repeats the whole step, or the optimizer's part."""
    if BACKEND == "jax":  # whose step is compiled, and does not end in the middle
        return
    rank, rate = hvd.rank(), 0.1
    interrupting = importlib.import_module("interrupting")  # beside this program
    no_grad = importlib.import_module("torch").no_grad if BACKEND == "torch" else contextlib.nullcontext

    def apply(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        with no_grad():
            optimizer.apply(gradients, variables)

    def train(line: Any, which: int, backwards: bool) -> np.ndarray:
        variables = [keras.Variable(np.ones(shape, np.float32), name=f"v{len(shape)}") for shape in ((3,), (2, 2))]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate))
        optimizer.build(variables)

        def backward(number: int) -> list[Any]:
            if BACKEND == "tensorflow":
                return [keras.ops.ones(v.shape) * (rank + number + 1.0) for v in variables]
            for variable in variables:
                variable.value.grad = None
            (sum(v.value.sum() for v in variables) * (rank + number + 1.0)).backward()
            return [variable.value.grad for variable in variables]

        for number in range(4):
            if line is None or number != which:
                apply(optimizer, backward(number), variables)
                continue
            gradients, before = backward(number), keras.ops.convert_to_numpy(variables[0]).copy()
            interrupted = interrupting.interrupted_at(line, functools.partial(apply, optimizer, gradients, variables))
            is_made = not optimizer._hvd.sync.arrived and (keras.ops.convert_to_numpy(variables[0]) != before).any()
            if interrupted and not is_made:  # or it came after the step
                apply(optimizer, backward(number) if backwards else gradients, variables)
        return np.concatenate([keras.ops.convert_to_numpy(v).reshape(-1) for v in variables])

    expected = 1.0 - rate * sum(number + 1 + (hvd.size() - 1) / 2 for number in range(4))
    for which in (0, 1, 3):
        lines, trials = iter(interrupting.lines(199)), 0
        while True:
            line = next(lines, None) if rank == 0 else None
            if not hvd.broadcast_object(line is not None, 0, "goes on"):
                break
            weights = train(line, which, trials % 2 == 1)
            np.testing.assert_allclose(weights, expected, rtol=1e-5, err_msg=f"step {which}, interrupted at {line}")
            trials += 1
        assert trials > 2


@case
def with_jit_compile_it_trains() -> None:
    if BACKEND == "torch":
        import torch

        torch.compiler.set_default_backend("aot_eager")  # the usual one needs a C++ compiler, and time
    with logged() as said:
        trained_as_one(lambda: keras.optimizers.SGD(0.05), jit_compile=True)
        # JAX compiles all the same: there the callback is a part of what XLA compiles. For torch's compiler, the
        # optimizer is a graph break.
        assert len(said) == (BACKEND == "tensorflow"), said
        assert all("trains without it (jit_compile=False)" in line for line in said)
    trained_as_one(lambda: keras.optimizers.SGD(0.05), jit_compile="auto")


@case
def a_model_with_synchronised_batch_normalization_is_saved_and_loaded() -> None:
    if BACKEND != "tensorflow":
        return
    layer = importlib.import_module("hvdgloo.tensorflow").SyncBatchNormalization
    model = keras.Sequential([keras.Input((4,)), layer(momentum=0.5), keras.layers.Dense(3)])
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss=loss)
    model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("model.keras", "model.h5"):
            model.save(f"{folder}/{name}")
            for load in (keras.models.load_model, hvd.load_model):
                loaded = load(f"{folder}/{name}")
                assert type(loaded.layers[0]) is layer, loaded.layers
                assert loaded.layers[0].momentum == 0.5
                np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)


@case
def a_trained_model_is_exported_for_inference() -> None:
    if BACKEND != "tensorflow":  # others export without a trace of the optimizer, too, and take 10 s for it
        return
    import tensorflow as tf

    model = trained_as_one(sgd_with_momentum, epochs=1)
    expected = model(X[:2])
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, verbose=False)
        loaded = tf.saved_model.load(folder)
        np.testing.assert_allclose(loaded.serve(X[:2]), expected, atol=1e-6)


LENGTH, LAYERS, WIDTH = 0.04, 6, 1024


def slow_layer() -> Any:
    """A layer whose backward pass takes a known time."""

    def wait(*_: Any) -> None:
        time.sleep(LENGTH)  # stands for the work of a layer

    if BACKEND == "torch":
        import torch

        class Identity(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, g: Any) -> Any:
                wait()
                return g

        identity = Identity.apply
    else:
        import tensorflow as tf

        @tf.custom_gradient
        def identity(x: Any) -> Any:
            def backward(g: Any) -> Any:
                return tf.ensure_shape(
                    tf.numpy_function(lambda g: (wait(), g)[1], [g], g.dtype, stateful=False), x.shape
                )

            return tf.identity(x), backward

    class Scale(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(WIDTH,), initializer="ones")

        def call(self, x: Any) -> Any:
            return identity(x * self.scale)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    return Scale()


@case
def communication_hides_behind_the_backward_pass() -> None:
    """Also under mixed precision. Layers of a known length each, and a data plane on which gradients take as long."""
    if BACKEND == "jax":  # whose compiled step has all gradients before it calls us
        return
    from hvdgloo._job import process

    (plane,) = process.current().engine._groups[0].backends
    names = [name for name in ("allreduce", "allreduce_several") if hasattr(plane, name)]

    def slow(plain: Any) -> Any:
        def call(buffers: Any, *args: Any, **kwargs: Any) -> Any:
            nbytes = sum(b.nbytes for b in (buffers if isinstance(buffers, (list, tuple)) else [buffers]))
            time.sleep(LENGTH * nbytes / (4 * WIDTH))  # stands for a transfer
            return plain(buffers, *args, **kwargs)

        return call

    def seconds(optimizer: Any) -> float:
        model = keras.Sequential([keras.Input((WIDTH,)), *(slow_layer() for _ in range(LAYERS))])
        model.compile(optimizer=optimizer, loss="mse")
        x = np.ones((1, WIDTH), np.float32)
        measured = []
        for _ in range(4):  # the first one compiles, and makes hooks
            hvd.allreduce(0.0)
            begin = time.perf_counter()
            model.train_on_batch(x, x)
            measured.append(time.perf_counter() - begin)
        return min(measured[1:])  # others use the machine, too

    def sgd(**options: Any) -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3, **options))

    for name in names:
        setattr(plane, name, slow(getattr(plane, name)))
    try:
        serial = 2 * LAYERS * LENGTH
        for optimizer in (sgd(), keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0)):
            assert LAYERS * LENGTH < (took := seconds(optimizer)) < 0.85 * serial, took
        if BACKEND == "torch":  # without hooks: the measure does tell
            assert (took := seconds(sgd(loss_scale_factor=2.0))) > serial, took
    finally:
        for name in names:
            delattr(plane, name)


@case
@eagerly
def what_is_saved_is_plain_and_is_loaded_distributed() -> None:
    model = trained_as_one(lambda: keras.optimizers.Adam(0.01), epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        # Files do not depend on the backend, and JAX compiles long.
        for name in ("model.keras", "model.h5") if BACKEND != "jax" else ("model.keras",):
            file = Path(folder) / name
            model.save(file)
            if name.endswith(".keras"):
                with zipfile.ZipFile(file) as archive:
                    config = archive.read("config.json").decode()
                assert "hvdgloo" not in config
                assert '"module": "keras.optimizers", "class_name": "Adam"' in config
            plain = keras.models.load_model(file)
            assert type(plain.optimizer) is type(keras.optimizers.Adam())
            with logged() as said:
                again = hvd.load_model(file)
            assert type(again.optimizer).__name__ == "Adam"
            assert type(again.optimizer) is type(model.optimizer)
            for got, expected in zip(again.get_weights(), model.get_weights(), strict=True):
                np.testing.assert_array_equal(got, expected)
            per = BATCH // hvd.size()
            if name.endswith(".h5"):  # of which Keras 3 does not read the optimizer's state
                assert len(plain.optimizer.variables) == 2  # the count of steps and the learning rate
                assert [line.partition(": ")[2] for line in said] == [
                    "Adam starts afresh; save as .keras to keep it"
                ], said
                again.train_on_batch(own(X)[:per], own(Y)[:per])
                same_everywhere(again)
                continue
            for got, expected in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
                np.testing.assert_allclose(keras.ops.convert_to_numpy(got), keras.ops.convert_to_numpy(expected))
            plain.train_on_batch(X[:BATCH], Y[:BATCH])
            again.train_on_batch(own(X)[:per], own(Y)[:per])
            for got, expected in zip(again.get_weights(), plain.get_weights(), strict=True):
                np.testing.assert_allclose(got, expected, atol=1e-5)


@keras.saving.register_keras_serializable(package="mine", name="Slow")
class Registered(keras.optimizers.SGD):  # type: ignore[misc]
    pass


class Adam(keras.optimizers.Adam):  # type: ignore[misc]
    """The program's own, under the name of Keras's."""


@case
@eagerly
def what_is_saved_is_what_the_plain_optimizer_would_have_saved() -> None:
    for kind in (Registered, Adam):
        saved = keras.saving.serialize_keras_object(kind(0.1, name="mine"))
        assert keras.saving.serialize_keras_object(hvd.DistributedOptimizer(kind(0.1, name="mine"))) == saved
        model = dense()
        model.compile(optimizer=hvd.DistributedOptimizer(kind(0.1)), loss=keras.losses.MeanSquaredError())
        with tempfile.TemporaryDirectory() as folder, keras.saving.custom_object_scope({"Adam": Adam}):
            # Of an .h5 file, Keras takes what has its own names for its own.
            for name in ("model.keras", "model.h5") if kind is Registered else ("model.keras",):
                model.save(Path(folder) / name)
                assert type(keras.models.load_model(Path(folder) / name).optimizer) is kind
    assert keras.saving.get_registered_object("mine>Slow") is Registered


@case
@eagerly
def copies_are_distributed() -> None:
    """Ranks train together with one optimizer and its copies: what a copy lacked would be an error or a difference."""
    options: list[dict[str, Any]] = [
        {"compression": hvd.Compression.fp16},
        {"backward_passes_per_step": 2, "groups": 2},
    ]
    for given in options if BACKEND != "jax" else []:  # copying does not depend on the backend, and JAX compiles long
        first = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), **given)
        models = [dense(), dense()]
        first.register_local_layer(models[1].layers[0])
        made = type(first).from_config(first.get_config())  # of which nothing is local
        again = type(made).from_config(made.get_config())
        copies = [copy.deepcopy(first), copy.copy(first)]
        assert {type(other) for other in (made, again, *copies)} == {type(first)}
        copy.copy(first).register_local_layer(models[1].layers[1])  # of that copy alone
        fresh = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), **given)
        place = hvd.rank() - hvd.size()  # the last ranks take the last ones
        for model, optimizers, shared in zip(
            models, ([fresh, made, again], [first, *copies]), ([True] * 4, [False] * 2 + [True] * 2), strict=True
        ):
            before = model.get_weights()
            model.compile(optimizer=optimizers[0 if hvd.rank() == 0 else place], loss="mse")
            for _ in range(2):
                model.train_on_batch(own(X)[:4], own(Y)[:4])
            assert all((new != old).any() for new, old in zip(model.get_weights(), before, strict=True))
            everyone = hvd.allgather_object(model.get_weights(), "weights")
            same = [all((other == of[0]).all() for other in of) for of in zip(*everyone, strict=True)]
            assert same == shared, same
    lists = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), groups=[dense().trainable_variables])
    made = type(lists).from_config(lists.get_config())  # whose groups are not another model's
    trained_as_one(lambda: keras.optimizers.SGD(0.05), lambda _: copy.deepcopy(made))


@case
@eagerly
def different_models_are_an_error_and_not_a_wait() -> None:
    def wide(units: int, layers: int = 1) -> Any:
        middle = [keras.layers.Dense(units, name=f"middle_{i}") for i in range(layers)]
        return keras.Sequential([keras.Input((4,)), *middle, keras.layers.Dense(3, name="end")], name="model")

    def fit(model: Any) -> None:
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), verbose=0, callbacks=callbacks)

    rank = hvd.rank()
    for model, said in (
        (wide(8 + (rank == 1)), "model/middle_0/kernel has the shape (4, 8) on rank 0 and (4, 9) on rank 1"),
        (
            wide(3, 1 + (rank == 1)),
            "4 weights on rank 0 and 6 on rank 1, which alone has model/end/kernel with the shape (3, 3)",
        ),
        (
            wide(3, 2 - (rank == 1)),
            "6 weights on rank 0 and 4 on rank 1, which lacks model/end/kernel with the shape (3, 3)",
        ),
    ):
        error = raised(MismatchError, lambda model=model: fit(model))
        assert said in str(error), error
        assert error.name.endswith("/kernel")
    # Only one rank's optimizer has state, as after loading a checkpoint.
    model = dense()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    if rank == 0:
        optimizer.build(model.trainable_variables)
    model.compile(optimizer=optimizer, loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()


@case
def metrics_that_are_no_numbers() -> None:
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    logs = {
        "array": np.array([[rank, 1]], np.int32),
        "number": keras.ops.convert_to_tensor(1.0 * rank),
        "text": f"rank {rank}",
        "only on some": None if rank else 1.0,
        "of many shapes": np.ones(1 + rank),
        "ragged": [[1], [1, 2]],
    }
    if not rank:
        logs["missing on others"] = 3.0
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs.get("missing on others") == (None if rank else 3.0)
    assert logs["array"].tolist() == [[mean, 1.0]]
    assert (logs["number"], type(logs["number"])) == (mean, float)
    assert (logs["text"], logs["only on some"]) == (f"rank {rank}", None if rank else 1.0)
    assert logs["of many shapes"].shape == (1 + rank,)
    assert logs["ragged"] == [[1], [1, 2]]


@case
@eagerly
def callbacks() -> None:
    class Seen(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.rates: list[float] = []
            self.first = [np.array(w) for w in self.model.get_weights()]

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    model = dense(seed=1 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.08, momentum=0.9))
    model.compile(optimizer=optimizer, loss="mse", metrics=[keras.metrics.F1Score()])
    seen = Seen()
    size = hvd.size()
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        best.filepath = str(Path(folder) / "best.keras")
        history = model.fit(
            own(X),
            own(Y),
            batch_size=BATCH // size,
            epochs=4,
            verbose=0,
            shuffle=False,
            callbacks=[
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2, verbose=1),
                hvd.callbacks.LearningRateScheduleCallback(0.08, 0.5, start_epoch=2),
                best,
                seen,
            ],
        ).history
        keras.models.load_model(best.filepath)
    root = dense(seed=1)
    for got, expected in zip(seen.first, root.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    same_everywhere(model)
    assert len({tuple(losses) for losses in hvd.allgather_object(history["loss"])}) == 1
    assert np.shape(history["f1_score"]) == (4, 3)
    assert len({np.asarray(scores).tobytes() for scores in hvd.allgather_object(history["f1_score"])}) == 1
    warm = [0.08 / size * ((i + 1) / BATCHES * (size - 1) / 2 + 1) for i in range(2 * BATCHES)]
    expected_rates = [*warm, *[0.08] * BATCHES, *[0.04] * BATCHES]
    np.testing.assert_allclose(seen.rates, expected_rates, rtol=1e-5)
    assert printed.getvalue().strip() == "Epoch 2: the warm-up has ended at a learning rate of 0.08"
    np.testing.assert_allclose(history["lr"], [warm[BATCHES - 1], 0.08, 0.08, 0.04], rtol=1e-5)


@case
def local_layers_are_left_to_their_rank() -> None:
    model = dense()
    local = model.layers[0]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=local)
    model.compile(optimizer=optimizer, loss="mse")
    per = BATCH // hvd.size()
    alone = dense()
    alone.compile(optimizer=keras.optimizers.SGD(0.05 / hvd.size()), loss="mse")
    alone.train_on_batch(own(X)[:per], own(Y)[:per])
    model.train_on_batch(own(X)[:per], own(Y)[:per])
    np.testing.assert_allclose(model.get_weights()[0], alone.get_weights()[0], atol=1e-6)
    everyone = hvd.allgather_object([w.tobytes() for w in model.get_weights()])
    assert everyone[0][0] != everyone[1][0]
    assert everyone[0][2] == everyone[1][2]


@case
def collectives_of_values() -> None:
    rank, size = hvd.rank(), hvd.size()
    mean = (size - 1) / 2
    assert float(hvd.allreduce(float(rank))) == mean
    assert hvd.allreduce(np.array([rank, 1]), average=False).tolist() == [mean * size, size]
    assert hvd.allreduce(keras.ops.convert_to_tensor([1.0 * rank]), op=hvd.Sum).tolist() == [mean * size]
    assert hvd.allreduce([1.0], compression=hvd.Compression.fp16).tolist() == [1.0]
    large = hvd.allreduce([1e30], compression=hvd.Compression.bf16, op=hvd.Max)  # too large for float16
    np.testing.assert_allclose(large, [1e30], rtol=1e-2)
    assert hvd.allgather([[rank]]).tolist() == [[r] for r in range(size)]
    assert hvd.broadcast(rank, 1).tolist() == 1
    assert hvd.reducescatter(np.arange(2.0 * size)).tolist() == [2.0 * rank, 2.0 * rank + 1]
    assert hvd.broadcast_object({"a": rank}, 1) == {"a": 1}
    raised(RuntimeError, lambda: hvd.broadcast_global_variables(0))  # it is for graphs


@case
def collectives_of_what_has_no_value() -> None:
    class InStep(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return hvd.allreduce(super().compute_loss(*args, **kwargs))

    model = InStep()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    for call in (lambda: model.train_on_batch(X[:2], Y[:2]), lambda: hvd.allgather(keras.Input((4,)))):
        assert "collectives take values" in str(raised(InvalidArgumentError, call))


@case
def wrong_arguments() -> None:
    for call in (
        lambda: hvd.DistributedOptimizer("adam"),
        lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD())),
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=77),
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0),
        lambda: hvd.DistributedOptimizer(
            keras.optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=2
        ),
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), gradient_predivide_factor=2.0, op=hvd.Sum),
    ):
        raised(ValueError, call)


@case
def a_custom_loop() -> None:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        model, alone = dense(), dense()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        plain = keras.optimizers.SGD(0.05)

        @tf.function
        def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        optimizer.build(model.trainable_variables)
        plain.build(alone.trainable_variables)
        per = BATCH // hvd.size()
        step(model, optimizer, own(X)[:per], own(Y)[:per])
        step(alone, plain, X[:BATCH], Y[:BATCH])
        for got, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)
    elif BACKEND == "torch":
        model = dense()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        optimizer.build(model.trainable_variables)
        for _ in range(2):
            model.zero_grad()
            loss = ((model(own(X)) - keras.ops.convert_to_tensor(own(Y))) ** 2).mean()
            loss.backward()
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        same_everywhere(model)


@case
def a_loss_scale_of_the_optimizer() -> None:
    trained_as_one(lambda: keras.optimizers.SGD(0.05, loss_scale_factor=4.0))


def backward(model: Any, batch: int = 0, x: np.ndarray | None = None) -> list[Any]:
    """The gradients that torch leaves in the parameters, of this rank's part of a batch (or of the whole of one)."""
    part = slice(batch * BATCH, (batch + 1) * BATCH)
    rows = slice(hvd.rank(), None, hvd.size()) if x is None else slice(None)
    model.zero_grad()
    ((model(X[part][rows]) - keras.ops.convert_to_tensor(Y[part][rows])) ** 2).mean().backward()
    return [v.value.grad for v in model.trainable_variables]


def step(model: Any, optimizer: Any, gradients: list[Any]) -> None:
    import torch

    with torch.no_grad():
        optimizer.apply(gradients, model.trainable_variables)


def equal(model: Any, alone: Any) -> None:
    for got, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@case
def gradients_that_the_program_changes_before_it_steps() -> None:
    if BACKEND != "torch":  # others see gradients only as they are given
        return

    def into_others(gradients: list[Any]) -> list[Any]:
        return [gradient * 0.5 for gradient in gradients]

    def where_they_are(gradients: list[Any]) -> list[Any]:
        return [gradient.mul_(0.5) for gradient in gradients]

    def on_one_rank(gradients: list[Any]) -> list[Any]:
        return into_others(gradients) if hvd.rank() == 1 else where_they_are(gradients)

    for change in (into_others, where_they_are, on_one_rank):
        model, alone = dense(), dense()
        optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
        for batch in range(3):
            step(model, optimizer, change(backward(model, batch)))
            step(alone, plain, backward(alone, batch, X))
        equal(model, alone)
        same_everywhere(model)


@case
def an_optimizer_that_one_rank_has_built_before_the_first_step() -> None:
    """From a checkpoint, say: its hooks have sent its gradients, and the other ranks' have not."""
    if BACKEND != "torch":
        return
    model, alone = dense(), dense()
    optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), keras.optimizers.SGD(0.05)
    if hvd.rank() == 1:
        optimizer.build(model.trainable_variables)
    for batch in range(3):
        step(model, optimizer, backward(model, batch))
        step(alone, plain, backward(alone, batch, X))
    equal(model, alone)


@case
def hooks_that_were_given_up_are_there_again_in_the_next_job() -> None:
    """As in an elastic job's next epoch, in which newcomers have hooks."""
    if BACKEND != "torch":
        return
    model, alone = dense(), dense()
    optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    for batch in range(2):  # given up: the program changes what the hooks have sent
        step(model, optimizer, [gradient * 1.0 for gradient in backward(model, batch)])
        step(alone, plain, backward(alone, batch, X))
    backward(model, 2)  # of a step that never comes to its end
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 1:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        optimizer.build(model.trainable_variables)
    for batch in range(2):
        step(model, optimizer, backward(model, batch))
        step(alone, plain, backward(alone, batch, X))
    equal(model, alone)
    same_everywhere(model)


@case
def a_backward_pass_without_a_step() -> None:
    if BACKEND != "torch":
        return
    model, alone = dense(), dense()
    optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    for batch in range(2):
        backward(model, batch + 1)
        step(model, optimizer, backward(model, batch))
        step(alone, plain, backward(alone, batch, X))
    equal(model, alone)


@case
@eagerly
def a_second_optimizer_for_the_same_model() -> None:
    """Transfer learning: the first one is still there, and may even step."""
    model, alone = dense(), dense()
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer=first, loss="mse")
    model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.02)), loss="mse")
    alone.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    alone.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    alone.compile(optimizer=keras.optimizers.SGD(0.02), loss="mse")
    alone.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)

    def train() -> None:
        model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)

    _, calls = counted(train)
    assert calls == 4 * BATCHES, calls
    equal(model, alone)
    if BACKEND == "torch":
        plain = keras.optimizers.SGD(0.05)
        for batch in range(2):
            step(model, first, backward(model, batch))
            step(alone, plain, backward(alone, batch, X))
        equal(model, alone)


@case
def a_gradient_that_one_rank_does_not_have() -> None:
    if BACKEND != "torch":  # where a compiled step is the same on all ranks
        return
    for scaled in (False, True):
        model = dense()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        for batch in range(3):
            before = model.get_weights()[0]
            if hvd.rank() == 1:  # whose batch leaves the first layer out
                model.zero_grad()
                model.layers[1](np.ones((2, 8), np.float32)).sum().backward()
                gradients = [v.value.grad for v in model.trainable_variables]
                assert gradients[0] is None
            else:
                gradients = backward(model, batch)
            step(model, optimizer, gradients)
            same_everywhere(model)
            assert np.abs(model.get_weights()[0] - before).max() > 1e-5


@case
def a_rank_with_nan_in_its_own_layer_skips_with_all_others() -> None:
    if BACKEND != "torch":
        return
    model = dense()
    partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=model.layers[0])
    optimizer = keras.optimizers.LossScaleOptimizer(partial, initial_scale=8.0)
    step(model, optimizer, backward(model))
    for batch in range(2):
        before = model.get_weights()
        gradients = backward(model, batch)
        if hvd.rank() == 1 and batch == 0:
            gradients[0].fill_(float("nan"))
        step(model, optimizer, gradients)
        moved = max(np.abs(a - b).max() for a, b in zip(model.get_weights(), before, strict=True))
        assert (moved == 0) == (batch == 0), moved


def lose_a_rank(outcome: dict[str, Any], died: Path) -> None:
    """The last rank is killed in the middle of fit; all that the others do must raise our error, soon."""

    class Dying(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == hvd.size() - 1 and batch >= 1:
                died.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which stops the others as soon as one fails
    seconds = outcome["seconds"] = {}
    model = dense()
    steps = {} if BACKEND == "torch" else {"steps_per_execution": 2}
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", **steps)

    def fit() -> None:
        model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), epochs=1000, verbose=0, callbacks=[Dying()])

    for name, function in (("fit", fit), ("custom loop", custom_step(model))):
        try:
            function()
        except Exception as error:
            outcome[f"{name} after the loss"] = lost(error)
        else:
            outcome[f"{name} after the loss"] = "went on without a rank"
        seconds[name] = time.time() - float(died.read_text())


def custom_step(model: Any) -> Callable[[], Any]:
    """A step outside of fit."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    optimizer.build(model.trainable_variables)
    if BACKEND == "torch":
        return lambda: step(model, optimizer, backward(model))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        gradients = [tf.ones(v.shape) for v in model.trainable_variables]
        return lambda: tf.function(optimizer.apply)(gradients)  # type: ignore[no-any-return]
    import jax

    # Copies: fit gives the variables' own arrays away.
    values, state = (
        [jax.numpy.array(v.value) for v in each] for each in (model.trainable_variables, optimizer.variables)
    )
    return lambda: jax.block_until_ready(jax.jit(optimizer.stateless_apply)(state, values, values))


def lost(error: Exception) -> str:
    """The name of our error: of its class, or, where only JAX's code is on the stack, in its text."""
    if isinstance(error, hvd.HorovodInternalError):
        return type(error).__name__
    return "PeerLostError" if BACKEND == "jax" and "PeerLostError: rank" in str(error) else traceback.format_exc()


def main() -> None:
    results, *chosen = sys.argv[1:]
    hvd.init()
    file = Path(f"{results}.{hvd.rank()}.json")
    outcome: dict[str, Any] = {}
    for name in chosen or CASES:
        try:
            CASES[name]()
        except Exception:
            outcome[name] = traceback.format_exc()
        else:
            outcome[name] = "ok"
        file.write_text(json.dumps(outcome))
        # The others go on only if all are this far: a rank that failed halfway would take part in other cases.
        if len(set(hvd.allgather_object(outcome[name] == "ok", name=f"after.{name}"))) > 1:
            break
    if chosen:
        return
    lose_a_rank(outcome, Path(f"{results}.died"))
    file.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
