"""Ways to train with Keras, each on all ranks of a job; the test starts the job once for each of Keras's backends.

    hvdgloo-run -np 2 --grace-period 30 tests/support/keras_cases.py RESULTS

Every rank runs every case and writes, for each, "ok" or what it raised, to RESULTS.<rank>.json. Ranks compare what they
have with training in one process on the concatenated batches, which each of them does for itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import hvdgloo.keras as hvd

BACKEND = keras.backend.backend()
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


def own(values: np.ndarray) -> np.ndarray:
    """This rank's part of each batch."""
    batches = values.reshape(BATCHES, BATCH, *values.shape[1:])
    return batches[:, hvd.rank() :: hvd.size()].reshape(-1, *values.shape[1:])


def dense(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((4,)), *layers])


def embedding(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Embedding(6, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((2,), dtype="int32"), *layers])


def same_everywhere(model: Any) -> None:
    everyone = hvd.allgather_object([np.asarray(w).tobytes() for w in model.get_weights()])
    assert all(other == everyone[0] for other in everyone), "ranks hold different weights"


def trained_as_one(
    make: Callable[[], Any],
    wrap: Callable[[Any], Any] = hvd.DistributedOptimizer,
    build: Callable[[], Any] = dense,
    x: np.ndarray = X,
    epochs: int = 2,
    tolerance: float = 1e-5,
    **compiling: Any,
) -> Any:
    """Train on all ranks and in this process alone; the weights must agree. Returns the distributed model."""
    # How a step is compiled makes no difference to it, so few have to be trained.
    key = f"{build.__name__} {epochs} {make().get_config()}"
    if key not in ALONE:
        alone = build()
        alone.compile(optimizer=make(), loss=keras.losses.MeanSquaredError())
        alone.fit(x, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
        ALONE[key] = alone.get_weights()
    model = build()
    before = model.get_weights()
    model.compile(optimizer=wrap(make()), loss=keras.losses.MeanSquaredError(), **compiling)
    model.fit(own(x), own(Y), batch_size=BATCH // hvd.size(), epochs=epochs, shuffle=False, verbose=0)
    for got, expected, start in zip(model.get_weights(), ALONE[key], before, strict=True):
        np.testing.assert_allclose(got, expected, atol=tolerance)
        assert np.abs(expected - start).max() > 4 * tolerance, "nothing was learnt"
    same_everywhere(model)
    return model


def counted(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many allreduces this rank submitted meanwhile."""
    from hvdgloo.engine.engine import Engine

    plain, calls = Engine.submit, []

    def submit(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.name.startswith("allreduce.gradients"):
            calls.append(request.name)
        return plain(self, request, *args, **kwargs)

    Engine.submit = submit  # type: ignore[method-assign]
    try:
        return function(), len(calls)
    finally:
        Engine.submit = plain  # type: ignore[method-assign]


@case
def sgd_is_equal_to_one_process() -> None:
    trained_as_one(lambda: keras.optimizers.SGD(0.05, momentum=0.9))


@case
def adam_is_equal_to_one_process() -> None:
    _, calls = counted(lambda: trained_as_one(lambda: keras.optimizers.Adam(0.01)))
    assert calls == 4 * 2 * BATCHES, calls  # one for each gradient in each step: nothing is reduced twice


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
def several_steps_per_execution() -> None:
    if BACKEND != "torch":  # where Keras has only one
        trained_as_one(lambda: keras.optimizers.SGD(0.05), steps_per_execution=2)


@case
def clipping_comes_after_reduction() -> None:
    trained_as_one(lambda: keras.optimizers.SGD(0.05, clipnorm=0.1))
    trained_as_one(lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1))


@case
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
def groups_and_compression() -> None:
    def make() -> Any:
        return keras.optimizers.SGD(0.05)

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
    model.train_on_batch(x[:per], own(Y)[:per])
    for got, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, start)
    assert float(keras.ops.convert_to_numpy(scaled.dynamic_scale)) == 4.0
    model.train_on_batch(x[per : 2 * per], own(Y)[per : 2 * per])
    assert max(np.abs(a - b).max() for a, b in zip(model.get_weights(), before, strict=True)) > 1e-4
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


@case
def with_jit_compile_it_trains() -> None:
    if BACKEND != "torch":  # whose compiler is another matter
        trained_as_one(lambda: keras.optimizers.SGD(0.05), jit_compile=True)
    trained_as_one(lambda: keras.optimizers.SGD(0.05), jit_compile="auto")


@case
def what_is_saved_is_plain_and_is_loaded_distributed() -> None:
    model = trained_as_one(lambda: keras.optimizers.Adam(0.01), epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("model.keras", "model.h5"):
            file = Path(folder) / name
            model.save(file)
            if name.endswith(".keras"):
                with zipfile.ZipFile(file) as archive:
                    config = archive.read("config.json").decode()
                assert "hvdgloo" not in config
                assert '"module": "keras.optimizers", "class_name": "Adam"' in config
            plain = keras.models.load_model(file)
            assert type(plain.optimizer) is type(keras.optimizers.Adam())
            again = hvd.load_model(file)
            assert type(again.optimizer).__name__ == "Adam"
            assert type(again.optimizer) is type(model.optimizer)
            for got, expected in zip(again.get_weights(), model.get_weights(), strict=True):
                np.testing.assert_array_equal(got, expected)
            per = BATCH // hvd.size()
            if name.endswith(".h5"):  # of which Keras 3 does not read the optimizer's state
                again.train_on_batch(own(X)[:per], own(Y)[:per])
                same_everywhere(again)
                continue
            for got, expected in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
                np.testing.assert_allclose(keras.ops.convert_to_numpy(got), keras.ops.convert_to_numpy(expected))
            plain.train_on_batch(X[:BATCH], Y[:BATCH])
            again.train_on_batch(own(X)[:per], own(Y)[:per])
            for got, expected in zip(again.get_weights(), plain.get_weights(), strict=True):
                np.testing.assert_allclose(got, expected, atol=1e-5)
    again = type(model.optimizer).from_config(model.optimizer.get_config())
    assert type(again) is type(keras.optimizers.Adam())


@case
def callbacks() -> None:
    class Seen(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.rates: list[float] = []
            self.first = [np.array(w) for w in self.model.get_weights()]

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    model = dense(seed=1 + hvd.rank())
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.08, momentum=0.9)), loss="mse")
    seen = Seen()
    size = hvd.size()
    with tempfile.TemporaryDirectory() as folder:
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
                hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2),
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
    warm = [0.08 / size * ((i + 1) / BATCHES * (size - 1) / 2 + 1) for i in range(2 * BATCHES)]
    expected_rates = [*warm, *[0.08] * BATCHES, *[0.04] * BATCHES]
    np.testing.assert_allclose(seen.rates, expected_rates, rtol=1e-5)
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
    try:
        hvd.broadcast_global_variables(0)
    except RuntimeError:
        pass
    else:
        raise AssertionError("broadcast_global_variables() is for graphs")


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
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("no error")


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

    def anew(gradients: list[Any]) -> list[Any]:
        return [gradient * 0.5 for gradient in gradients]

    def where_they_are(gradients: list[Any]) -> list[Any]:
        return [gradient.mul_(0.5) for gradient in gradients]

    def on_one_rank(gradients: list[Any]) -> list[Any]:
        return anew(gradients) if hvd.rank() == 1 else where_they_are(gradients)

    for change in (anew, where_they_are, on_one_rank):
        model, alone = dense(), dense()
        optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
        for batch in range(3):
            step(model, optimizer, change(backward(model, batch)))
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


def lose_a_rank(outcome: dict[str, str]) -> None:
    """The last rank dies in the middle of fit; the others' fit must raise our error, soon."""

    class Dying(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == hvd.size() - 1 and batch == 1:
                os._exit(3)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which stops the others as soon as one fails
    model = dense()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    try:
        model.fit(own(X), own(Y), batch_size=BATCH // hvd.size(), epochs=1000, verbose=0, callbacks=[Dying()])
    except hvd.HorovodInternalError as error:
        outcome["lose_a_rank"] = type(error).__name__
    else:
        outcome["lose_a_rank"] = "fit went on without a rank"


def main() -> None:
    (results,) = sys.argv[1:]
    hvd.init()
    file = Path(f"{results}.{hvd.rank()}.json")
    outcome: dict[str, str] = {}
    for name, function in CASES.items():
        try:
            function()
        except Exception:
            outcome[name] = traceback.format_exc()
        else:
            outcome[name] = "ok"
        file.write_text(json.dumps(outcome))
        # The others go on only if all have come so far: a rank that failed halfway would take part in other cases.
        if len(set(hvd.allgather_object(outcome[name] == "ok", name=f"after.{name}"))) > 1:
            break
    lose_a_rank(outcome)
    file.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
