"""Whole programs on ranks that are processes: the examples, and one that Horovod's users might have written."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.examples import check_elastic_demo, check_learned
from tests.support.launching import Launcher

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PROGRAM = """
import os, sys, threading

# Either order of imports works.
if os.environ["HOROVOD_RANK"] == "0":
    import torch
import tensorflow as tf
import torch

# One thread for operators of each kind: none may wait for another that has not begun.
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import horovod.keras
import horovod.torch
from horovod.tensorflow.mpi_ops import size_op, rank_op
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.keras.callbacks import MetricAverageCallback

hvd.init()
rank = hvd.rank()
assert hvd.size() == horovod.torch.size() == hvd_keras.size() == 2
assert hvd.HorovodInternalError is horovod.keras.HorovodInternalError
assert horovod.torch.allreduce(torch.ones(2), op=horovod.torch.Sum).tolist() == [2.0, 2.0]

# All functions of the module, eagerly.
x = tf.constant([1.0, 2.0]) * (rank + 1)
assert hvd.allreduce(x).numpy().tolist() == [1.5, 3.0]
assert hvd.allreduce([1.0 * rank], op=hvd.Sum, name="list").numpy().tolist() == [1.0]
slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([2, 2]))
assert tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum)).numpy().tolist() == [[1.0, 1.0]] * 2
dense, sparse = hvd.grouped_allreduce([x, slices], op=hvd.Sum)
assert dense.numpy().tolist() == [3.0, 6.0] and isinstance(sparse, tf.IndexedSlices)
assert hvd.grouped_allreduce([]) == []
assert hvd.allgather(x).shape == (4,)
assert [t.shape[0] for t in hvd.grouped_allgather([x, x[:1]])] == [4, 2]
assert hvd.broadcast(x, 1).numpy().tolist() == [2.0, 4.0]
received, counts = hvd.alltoall(x, [1, 1])
assert counts.numpy().tolist() == [1, 1]
assert hvd.alltoall(x).shape == (2,)
assert hvd.reducescatter(x, op=hvd.Sum).numpy().tolist() == [[3.0], [6.0]][rank]
assert hvd.grouped_reducescatter([x])[0].shape == (1,)
variable = tf.Variable([1.0 * rank])
assert hvd.broadcast_([variable], 1)[0] is variable and variable.numpy() == [1.0]
assert (int(rank_op()), int(size_op()), int(hvd.local_rank_op()), int(hvd.local_size_op())) == (rank, 2, rank, 2)
for result in (hvd_keras.allreduce(x), hvd_keras.allgather(x), hvd_keras.broadcast(x, 0), hvd_keras.reducescatter(x)):
    assert isinstance(result, tf.Tensor), type(result)
only = hvd.add_process_set([1])
assert int(hvd.process_set_included_op(only.process_set_id)) == rank
assert int(hvd.size_op(only.process_set_id)) == 1
if rank == 1:
    assert hvd.allreduce(x, process_set=only).numpy().tolist() == [2.0, 4.0]
assert broadcast_object({"rank": rank}, 1) == {"rank": 1} == hvd.broadcast_object_fn(1)({"rank": rank})
assert hvd.allgather_object(rank) == [0, 1]
try:
    hvd.broadcast_global_variables(0)
except RuntimeError as error:
    assert "broadcast_variables" in str(error)

# Some gradients are this rank's own.
layers = [tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
for layer in layers:
    layer.build((None, 2))
with tf.GradientTape() as tape:
    loss = sum(tf.reduce_sum(layer(x[None])) for layer in layers)
tape = hvd.PartialDistributedGradientTape(tape, local_layers=layers[:1], scale_local_gradients=False)
(own,), (shared,) = tape.get_local_and_global_gradients(loss, [layer.kernel for layer in layers])
assert own.numpy().tolist() == [[1.0 + rank], [2.0 + 2 * rank]] and shared.numpy().tolist() == [[1.5], [3.0]]

# Two models, whose functions ranks trace in different order.
models = [tf.Variable(tf.ones([3])), tf.Variable(tf.ones([3]))]
def training(variable, factor):
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * x) * factor + tf.reduce_sum(hvd.allreduce(variable * x, op=hvd.Sum))
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0]
    return step
steps = [training(variable, factor) for variable, factor in zip(models, (1.0, 10.0))]
for step in steps if rank else reversed(steps):
    step.get_concrete_function(tf.TensorSpec([3]))
for _ in range(3):
    for step, expected in zip(steps, (1.5 + 3.0, 15.0 + 3.0)):
        gradient = step(tf.ones([3]) * (rank + 1))
        assert gradient.numpy().tolist() == [expected] * 3, gradient

# Twin critics: nested functions of equal shapes, which only their collectives put in order.
critics = [training(tf.Variable(tf.ones([4])), factor) for factor in (1.0, 10.0)]
@tf.function
def both(x):
    return [critic(x) for critic in critics]
for _ in range(3):
    gradients = both(tf.ones([4]) * (rank + 1))
    assert [g.numpy().tolist() for g in gradients] == [[4.5] * 4, [18.0] * 4], gradients

# TensorFlow 1: ranks begin with different variables, and end with the same.
with tf.Graph().as_default():
    v = tf.compat.v1.get_variable("v", initializer=[10.0 * rank, 1.0])
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
    step = tf.compat.v1.train.get_or_create_global_step()
    train = optimizer.minimize(tf.reduce_sum(v * (rank + 1.0)), global_step=step)
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    hooks = [hvd.BroadcastGlobalVariablesHook(1), tf.compat.v1.train.StopAtStepHook(last_step=2)]
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
        while not session.should_stop():
            session.run(train)
    received = hvd.broadcast_([v], 1)
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
        assert [each.tolist() for each in session.run(received)] == [[0.0, 1.0]]
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(1)]) as session:
        assert session.run(v).tolist() == [10.0, 1.0]
        session.run(train)
        assert session.run(v).tolist() == [8.5, -0.5]

@tf.function
def together(x):
    return hvd.allreduce(x, name="together")
together(x)

# Two kinds of training are under way when rank 1 is killed: in a function, and in a session.
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
killed, rounds = "killed", {"tape loop": 0, "monitored session": 0}
def until_lost(kind, once):
    try:
        while True:
            once()
            rounds[kind] += 1
    except hvd.HorovodInternalError as error:
        took = time.time() - float(open(killed).read())
        when = "soon" if took < 10 else f"after {took:.1f} s"
        sys.stdout.write(f"{kind}: {type(error).__name__} {when}\\n")  # at once: two threads do
        sys.stdout.flush()
def in_session():
    with tf.Graph().as_default():
        v = tf.compat.v1.get_variable("v", initializer=[10.0] * 5)
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        train = optimizer.minimize(tf.reduce_sum(v), global_step=tf.compat.v1.train.get_or_create_global_step())
        own = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
        with tf.compat.v1.train.MonitoredTrainingSession(config=own) as session:
            until_lost("monitored session", lambda: session.run(train))
loops = [
    threading.Thread(target=until_lost, args=("tape loop", lambda: steps[0](tf.ones([3])))),
    threading.Thread(target=in_session),
]
for loop in loops:
    loop.start()
if rank == 1:
    while min(rounds.values()) < 3:
        time.sleep(0.001)  # polls, until both are under way; the launcher has the deadline
    with open(killed, "w") as file:
        file.write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
for loop in loops:
    loop.join()

# And it is our error in any later call.
try:
    together(x)
except hvd.HorovodInternalError as error:
    print("function:", type(error).__name__, isinstance(error, tf.errors.UnknownError), flush=True)
with tf.Graph().as_default():
    reduced = hvd.allreduce(tf.constant([1.0]), name="session")
    with tf.compat.v1.Session() as session:
        try:
            session.run(reduced)
        except hvd.HorovodInternalError as error:
            print("session:", type(error).__name__, flush=True)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(models[0])
try:
    hvd.DistributedGradientTape(tape).gradient(loss, models[:1])
except hvd.HorovodInternalError as error:
    print("tape:", type(error).__name__, flush=True)
"""

LEGACY = """
import copy, sys, threading
import numpy as np
import tensorflow as tf
import hvdgloo.tensorflow as hvd
import hvdgloo.tensorflow.keras as hvd_keras

# tf.keras is Keras 2 here.
hvd.init()
assert tf.keras.__name__.startswith("tf_keras") or tf.keras.__version__.startswith("2."), tf.keras
x = np.random.default_rng(1).normal(size=(24, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)

def make():
    return tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1, kernel_initializer="ones")])

for plain in (lambda: tf.keras.optimizers.Adam(0.1), lambda: tf.keras.optimizers.legacy.SGD(0.1)):
    alone, model = make(), make()
    alone.compile(optimizer=plain(), loss="mse")
    alone.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    model.compile(optimizer=hvd_keras.DistributedOptimizer(plain()), loss="mse")
    batches = x.reshape(3, 8, 4)[:, hvd.rank() :: 2].reshape(-1, 4)
    model.fit(batches, batches.sum(axis=1, keepdims=True), batch_size=4, epochs=2, shuffle=False, verbose=0)
    for got, expected in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(got, expected, atol=1e-5)
assert type(model.optimizer).__name__ == "SGD"

# Two passes per step, which are one of twice the batch.
for plain in (lambda: tf.keras.optimizers.Adam(0.1), lambda: tf.keras.optimizers.legacy.SGD(0.1)):
    alone, model = make(), make()
    alone.compile(optimizer=plain(), loss="mse")
    alone.fit(x[:16], y[:16], batch_size=16, epochs=2, shuffle=False, verbose=0)
    optimizer = hvd_keras.DistributedOptimizer(plain(), backward_passes_per_step=2, average_aggregated_gradients=True)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(batches[:8], batches[:8].sum(axis=1, keepdims=True), batch_size=4, epochs=2, shuffle=False, verbose=0)
    for got, expected in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(got, expected, atol=1e-5)

# Where one rank's gradients are not finite, all skip the step; also of what is local, and of maxima.
scaled = tf.keras.mixed_precision.LossScaleOptimizer
for plain in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
    for options in ({}, {"local": True}, {"op": hvd.Max}):
        weights = [tf.Variable([1.0, 1.0]), tf.Variable([5.0])]
        local = options.pop("local", False)
        inside = hvd_keras.DistributedOptimizer(plain(1.0), **options)
        if local:
            inside.register_local_var(weights[1])
        # Either may be put into the other.
        optimizer = hvd_keras.DistributedOptimizer(scaled(plain(1.0)), **options) if options else scaled(inside)
        assert isinstance(optimizer, scaled)
        @tf.function
        def step(first, second):
            optimizer.apply_gradients([(first, weights[0]), (second, weights[1])])
        ours = tf.constant([1.0 + hvd.rank()])
        not_finite = ours * (np.inf if hvd.rank() == 0 else 1.0)
        before = float(optimizer.loss_scale)
        step(tf.ones([2]), not_finite - not_finite if local or options else not_finite)
        assert [w.numpy().tolist() for w in weights] == [[1.0, 1.0], [5.0]], (plain, options, local, weights)
        assert float(optimizer.loss_scale) == before / 2
        step(tf.ones([2]), ours)
        share = ours.numpy()[0] / 2 if local else 2.0 if options else 1.5
        assert [w.numpy().tolist() for w in weights] == [[0.0, 0.0], [5.0 - share]], (plain, options, local, weights)

# XLA cannot compile collectives: it trains without.
alone, model = make(), make()
alone.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mse")
alone.fit(x, y, batch_size=8, shuffle=False, verbose=0)
model.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), loss="mse", jit_compile=True)
model.fit(batches, batches.sum(axis=1, keepdims=True), batch_size=4, shuffle=False, verbose=0)
assert not model.jit_compile
for got, expected in zip(model.get_weights(), alone.get_weights()):
    np.testing.assert_allclose(got, expected, atol=1e-5)

# From here on it makes no difference whether steps are graphs, and to trace them takes longest.
tf.config.run_functions_eagerly(True)

# A model that is built by its first batch.
tf.keras.utils.set_random_seed(hvd.rank())
late = tf.keras.Sequential([tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)])
late.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), loss="mse")
sums = batches.sum(axis=1, keepdims=True)
late.fit(batches, sums, batch_size=4, verbose=0, callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
everyone = hvd.allgather_object([w.tolist() for w in late.get_weights()])
assert everyone[0] == everyone[1], everyone

# What was saved is plain, and can be distributed again.
model.save("saved.h5" if hvd.rank() == 0 else "other.h5")
hvd.barrier()
loaded = tf.keras.models.load_model("saved.h5")
assert type(loaded.optimizer).__module__.startswith("tf_keras") and not hasattr(loaded.optimizer, "_hvd")
for got, expected in zip(loaded.get_weights(), model.get_weights()):
    np.testing.assert_array_equal(got, expected)
loaded.compile(optimizer=hvd_keras.DistributedOptimizer(loaded.optimizer), loss="mse")
loaded.fit(batches, batches.sum(axis=1, keepdims=True), batch_size=4, verbose=0)
everyone = hvd.allgather_object([w.tolist() for w in loaded.get_weights()])
assert everyone[0] == everyone[1], everyone

# Copies are distributed, and what is saved is what the plain optimizer would have saved.
class Mine(tf.keras.optimizers.SGD):
    pass
class MineToo(tf.keras.optimizers.legacy.SGD):
    pass
for kind in (Mine, MineToo):
    tf.keras.saving.register_keras_serializable(package="mine")(kind)
    optimizer = hvd_keras.DistributedOptimizer(kind(0.1), compression=hvd.Compression.fp16)
    serialize = tf.keras.saving.serialize_keras_object
    assert serialize(optimizer) == serialize(kind(0.1)), serialize(optimizer)
    shared, local = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer.register_local_var(local)
    copies = [(type(optimizer).from_config(optimizer.get_config()), False)]
    if kind is MineToo:  # tf_keras itself cannot copy the others
        copies.append((copy.deepcopy(optimizer), True))
        copy.deepcopy(optimizer).register_local_var(shared)  # of that copy alone
    for again, keeps in [(optimizer, True), *copies]:
        assert type(again) is type(optimizer)
        for variable in (shared, local):
            variable.assign([0.0])
        thirds = [np.float32(r + 1) / 3 for r in range(2)]
        again.apply_gradients([(tf.constant([thirds[hvd.rank()]]), variable) for variable in (shared, local)])
        sent = sum(np.float16(third) for third in thirds)  # what the sum loses is seen
        np.testing.assert_allclose(shared.numpy(), [-0.1 * np.float32(sent) / 2], rtol=1e-5)
        own = thirds[hvd.rank()] if keeps else np.float32(sent)
        np.testing.assert_allclose(local.numpy(), [-0.1 * own / 2], rtol=1e-5)
    model = make()
    model.compile(optimizer=hvd_keras.DistributedOptimizer(kind(0.1)), loss="mse")
    model.fit(batches, sums, batch_size=4, verbose=0)
    for name in ("mine.keras", "mine.h5", "mine"):
        name = f"{hvd.rank()}.{name}"
        model.save(name)
        plain, loaded = tf.keras.models.load_model(name), hvd_keras.load_model(name)
        assert type(plain.optimizer) is kind and type(loaded.optimizer) is type(model.optimizer), name
        assert int(loaded.optimizer.iterations) == int(plain.optimizer.iterations)
        loaded.fit(batches, sums, batch_size=4, verbose=0)
        everyone = hvd.allgather_object([w.tolist() for w in loaded.get_weights()])
        assert everyone[0] == everyone[1], everyone

# All callbacks, whose momentum is corrected while the learning rate changes.
class Seen(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.momenta = []
    def on_train_batch_begin(self, batch, logs=None):
        self.momenta.append(round(float(self.model.optimizer.momentum), 3))

model, seen = make(), Seen()
model.set_weights([w + hvd.rank() for w in model.get_weights()])
with_momentum = tf.keras.optimizers.legacy.SGD(0.1, momentum=0.8)
model.compile(optimizer=hvd_keras.DistributedOptimizer(with_momentum), loss="mse")
callbacks = [
    hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd_keras.callbacks.MetricAverageCallback(),
    hvd_keras.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1),
    hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1),
    seen,
]
losses = model.fit(batches, batches.sum(axis=1, keepdims=True), batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
assert seen.momenta[-3:] == [0.4, 0.8, 0.8], seen.momenta
everyone = hvd.allgather_object((losses.history["loss"], [w.tolist() for w in model.get_weights()]))
assert everyone[0] == everyone[1], everyone
try:
    hvd.SyncBatchNormalization()
except ImportError as error:
    assert "needs Keras 3" in str(error), error
else:
    raise AssertionError("SyncBatchNormalization of tf_keras")
try:
    hvd_keras.DistributedOptimizer(model.optimizer)
except ValueError:
    print("trained", hvd.rank(), flush=True)

# A function that waits for a rank which never comes.
tf.config.run_functions_eagerly(False)
started = threading.Event()
if hvd.rank() == 0:
    @tf.function
    def never(x):
        tf.numpy_function(lambda: started.set(), [], [])
        return hvd.allreduce(x, name="never")
    threading.Thread(target=lambda: never(tf.ones(2)), daemon=True).start()
    started.wait()
hvd.broadcast_object("so far", name="so far")
assert "torch" not in sys.modules  # it is not needed
print("end", hvd.rank(), flush=True)
"""


SUPERVISED = """
import numpy as np
import tensorflow.compat.v1 as tf

import horovod.tensorflow as hvd

tf.disable_v2_behavior()
hvd.init()
assert hvd.size() == 2
with tf.Graph().as_default():
    x = tf.random.normal([32, 8], seed=hvd.rank())
    with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
        first = tf.constant_initializer(float(hvd.rank()))  # models differ until they are broadcast
        weight = tf.get_variable("weight", [8, 1], initializer=first)
        bias = tf.get_variable("bias", [1], initializer=first)
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) + bias - tf.reduce_sum(x, axis=1, keepdims=True)))
    gradients = tf.gradients(loss, [weight, bias])
    places = zip(gradients, ("", "/cpu:0"))
    gradients = [hvd.allreduce(each, average=False, device_dense=place) for each, place in places]
    step = tf.train.GradientDescentOptimizer(0.05).apply_gradients(zip(gradients, [weight, bias]))
    global_step = tf.train.get_or_create_global_step()
    counted = tf.group(step, global_step.assign_add(1))
    broadcast = hvd.broadcast_global_variables(0)
    # All ranks are chiefs, so that each initialises its session; only rank 0 has a folder.
    supervisor = tf.train.Supervisor(
        is_chief=True, logdir="run" if hvd.rank() == 0 else None, global_step=global_step, summary_op=None
    )
    config = tf.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    with supervisor.managed_session(config=config, start_standard_services=False) as session:
        session.run(broadcast)
        for _ in range(100):
            session.run(counted)
        found = np.concatenate([each.ravel() for each in session.run([weight, bias])])
        steps = session.run(global_step)
    supervisor.stop()
assert steps == 100
assert np.allclose(found, [1.0] * 8 + [0.0], atol=0.01), found
assert len(set(map(tuple, hvd.allgather_object(found.tolist())))) == 1, "all have the same model"
print("trained", hvd.rank(), flush=True)
"""


@pytest.mark.parametrize("example", ["tensorflow2_digits", "tensorflow1_session_digits", "keras_digits"])
def test_examples_learn_to_read(launcher: Launcher, example: str) -> None:
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    program = str(EXAMPLES / f"{example}.py")
    done = launcher.run("-np", "2", "--", warm.python(*warm.TENSORFLOW, **env), program, env=env, timeout=58)
    check_learned(done)


@pytest.mark.timeout(90)  # on a busy machine TensorFlow alone takes 20 s to be imported
def test_the_elastic_example_loses_a_worker_and_gains_others() -> None:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    check_elastic_demo("keras_digits_elastic.py", warm.python(*warm.TENSORFLOW, **quiet), quiet)


def test_a_program_of_horovods_runs_without_an_edit(launcher: Launcher) -> None:
    arguments = ("-np", "2", "--as-horovod", "--grace-period", "30", launcher.script(PROGRAM))
    done = launcher.run(*arguments, env={"TF_CPP_MIN_LOG_LEVEL": "3"}, timeout=58)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    # Rank 0 ended by itself: the launcher would have killed it after 30 s.
    assert time.time() - float((launcher.folder / "killed").read_text()) < 20
    said = [line.partition(">:")[2] for line in done.stdout.splitlines()]
    assert sorted(said[:2]) == ["monitored session: PeerLostError soon", "tape loop: PeerLostError soon"]
    assert said[2:] == ["function: PeerLostError True", "session: PeerLostError", "tape: PeerLostError"]


def test_keras_2_trains_and_a_function_that_still_waits_lets_the_program_end(launcher: Launcher) -> None:
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1"}
    done = launcher.run("-np", "2", warm.python(*warm.TENSORFLOW, **env), launcher.script(LEGACY), env=env, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(line.partition(">:")[2] for line in done.stdout.splitlines())
    assert said == ["end 0", "end 1", "trained 0", "trained 1"]


def test_a_supervisor_runs_gradients_that_are_summed_one_by_one(launcher: Launcher) -> None:
    """As tf_cnn_benchmarks does with ``--variable_update=horovod``; it has no release that could be installed."""
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1"}
    python = warm.python(*warm.TENSORFLOW, **env)
    done = launcher.run("-np", "2", "--as-horovod", python, launcher.script(SUPERVISED), env=env, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.partition(">:")[2] for line in done.stdout.splitlines()) == ["trained 0", "trained 1"]
