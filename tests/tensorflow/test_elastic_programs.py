"""Elastic programs of TensorFlow and Keras: one process is killed, and another one comes while the rest train."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from tests.support import warm
from tests.support.job import Job

BEGIN = """
    import os, signal, sys
    import numpy as np

    folder = os.environ["JOB_FOLDER"]

    def changes(sizes):
        return [size for size, before in zip(sizes, [0, *sizes]) if size != before]

    def after_batch(state):
        # One of two dies in the middle, who is left alone says so, and the end comes when they have been two again.
        state.sizes.append(hvd.size())
        state.reached += 1.0 if hvd.size() == 1 else 1.5  # the mean of what the ranks bring
        so_far = changes(state.sizes)
        if so_far == [2] and len(state.sizes) == 6 and hvd.rank() == 1 - int(os.environ["SURVIVOR"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if so_far == [2, 1] and not os.path.exists(folder + "/alone"):
            open(folder + "/alone.part", "w").close()
            os.rename(folder + "/alone.part", folder + "/alone")
        return so_far == [2, 1, 2] and state.sizes[-5:] == [2] * 5

    def ended(state, weight):
        np.testing.assert_allclose(weight, np.full((3, 1), -state.reached), rtol=1e-6)
        print(changes(state.sizes), resets, flush=True)

    resets = []
"""

LOOP = """
    import tensorflow as tf
    import hvdgloo.tensorflow as hvd

    hvd.init()
    linear = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = tf.keras.Sequential([tf.keras.Input((3,)), linear])
    optimizer = tf.keras.optimizers.SGD(1.0)

    @tf.function
    def step(x, reduces=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        if reduces:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    # As Horovod's example does. What reduces is traced next, when no variable may be made any more.
    step(tf.zeros([2, 3]), reduces=False)
    # A newcomer runs this before it is in elastic.run, alone (#2652, #2285, #2248).
    assert float(hvd.allreduce(tf.ones([]), op=hvd.Sum)) == (2.0 if os.environ.get("FIRST") else 1.0)
    step(tf.zeros([2, 3]))

    @hvd.elastic.run
    def train(state):
        while True:
            step(tf.fill([2, 3], hvd.rank() + 1.0))
            enough = after_batch(state)
            state.commit()
            if enough:
                return

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, sizes=[], reached=0.0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    ended(state, model.get_weights()[0])
"""

FIT = """
    if os.environ.get("TF_USE_LEGACY_KERAS"):
        from tensorflow import keras
        import hvdgloo.tensorflow.keras as hvd
    else:
        import keras
        import hvdgloo.keras as hvd

    hvd.init()
    linear = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.layers.Input((3,)), linear])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss=lambda wanted, made: made)

    class AfterBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if after_batch(state):
                self.model.stop_training = True

    @hvd.elastic.run
    def train(state):
        callbacks = [
            AfterBatch(),
            hvd.elastic.CommitStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        x = np.full((20, 3), hvd.rank() + 1.0, np.float32)
        epochs = 100_000 - state.epoch
        model.fit(x, np.zeros((20, 1), np.float32), batch_size=2, epochs=epochs, callbacks=callbacks, verbose=0)

    state = hvd.elastic.KerasState(model, batch=0, epoch=0, sizes=[], reached=0.0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    ended(state, np.asarray(model.get_weights()[0]))
"""
pytestmark = pytest.mark.timeout(240)  # seconds; mostly a tenth of it. Programs import TensorFlow one after the other
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def run(folder: Path, program: str, python: str, *, survivor: int, **environ: str) -> None:
    """A job of two, of which one goes and another comes; the two that are left must say what they saw."""
    epochs = ElasticEpochs(Rules(size=2, smallest=1, launched=False, failures_per_host=99))
    environ |= {**QUIET, "SURVIVOR": str(survivor)}
    with Job(0, BEGIN + program, folder, python=python, elastic=epochs, **environ) as job:
        job.add(FIRST="1")
        job.add(FIRST="1")
        job.wait_for_file("alone", timeout=50)
        job.add()
        ended = job.wait(60)
    assert sorted(end.returncode for end in ended)[1:] == [0, 0], ended
    assert ended[2].stdout == "[2, 1, 2] [2]\n", ended
    assert sorted(end.stdout for end in ended[:2]) == ["", "[2, 1, 2] [1, 2]\n"], ended


def test_a_loop_of_tensorflow(tmp_path: Path) -> None:
    run(tmp_path, LOOP, warm.python(*warm.TENSORFLOW, **QUIET), survivor=1)


@pytest.mark.parametrize("keras_on", ["tensorflow", "torch", "jax", "tf_keras"])
def test_fit(tmp_path: Path, keras_on: str) -> None:
    if importlib.util.find_spec(keras_on) is None:
        pytest.fail(f"{keras_on} is not installed; these tests have an environment of their own: make test-tensorflow")
    python, environ = sys.executable, {"KERAS_BACKEND": keras_on}  # with torch, a fork would not come to its end
    if keras_on == "tensorflow":
        python = warm.python(*warm.TENSORFLOW, **QUIET)
    elif keras_on == "jax":
        python = warm.python("hvdgloo.keras", KERAS_BACKEND="jax", **QUIET)
    elif keras_on == "tf_keras":
        environ = {"TF_USE_LEGACY_KERAS": "1"}
        python = warm.python("hvdgloo.tensorflow.keras", **environ, **QUIET)
    run(tmp_path, FIT, python, survivor=0, **environ)
