"""Elastic programs for TensorFlow 2 and its Keras: in the shape that Horovod's documentation and examples teach, and
our page's own."""

from __future__ import annotations

import pytest

from tests.support import warm
from tests.support.elastic_examples import follow_three_sizes, lose_one_and_get_another
from tests.support.elastic_launch import Job
from tests.support.launching import Launcher
from tests.support.pages import program

pytestmark = pytest.mark.timeout(240)  # seconds; mostly a tenth of it
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

DATA = """
import numpy as np
import tensorflow as tf

images = np.random.default_rng(0).normal(size=(64, 8, 8, 1)).astype(np.float32)
labels = (images.mean(axis=(1, 2, 3)) > 0).astype(np.int64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.repeat().shuffle(64).batch(8)
"""

LOOP = (
    DATA
    + """
import horovod.tensorflow as hvd

hvd.init()
model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(2, activation="softmax"),
])
loss = tf.losses.SparseCategoricalCrossentropy()
lr = 0.001
opt = tf.optimizers.Adam(lr * hvd.size())


@tf.function
def training_step(images, labels, allreduce=True):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss_value


for _, (images, labels) in enumerate(dataset.take(1)):
    training_step(images, labels, allreduce=False)  # so that there is something to synchronize


@hvd.elastic.run
def train(state):
    say("epoch", state.batch)
    start_batch = state.batch
    for batch_idx, (images, labels) in enumerate(dataset.skip(start_batch)):
        state.batch = start_batch + batch_idx
        training_step(images, labels)
        if state.batch % 5 == 0:
            state.commit()
        if hvd.allreduce(tf.constant(float(os.path.exists("over"))), name="over") and batch_idx > 10:
            return


def on_state_reset():
    opt.learning_rate.assign(lr * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
np.testing.assert_allclose(float(opt.learning_rate), lr * 2)
checksum = tf.reshape(sum(tf.reduce_sum(each) for each in model.trainable_variables), [1])
assert len(set(hvd.allgather(checksum, name="checksum").numpy().tolist())) == 1, "all have the same model"
say("over", state.batch)
"""
)

FIT = (
    DATA
    + """
import horovod.tensorflow.keras as hvd

hvd.init()
mnist_model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(2, activation="softmax"),
])
opt = tf.optimizers.Adam(0.001 * hvd.size())
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
mnist_model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

# So that there is something to synchronize. A newcomer does this alone.
mnist_model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)

state = hvd.elastic.KerasState(mnist_model, batch=0, epoch=0, trained=0)


def on_state_reset():
    state.model.optimizer.learning_rate.assign(0.001 * hvd.size())
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)


state.register_reset_callbacks([on_state_reset])


class EndOfTheTest(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        state.trained += 1

    def on_epoch_end(self, epoch, logs=None):
        if hvd.allreduce(np.array([float(os.path.exists("over"))]), name="over")[0]:
            self.model.stop_training = True


callbacks = [
    EndOfTheTest(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]


@hvd.elastic.run
def train(state):
    say("epoch", state.trained)
    fit = {"steps_per_epoch": 8 // hvd.size(), "epochs": 100_000 - state.epoch, "verbose": 0}
    state.model.fit(dataset, callbacks=callbacks, **fit)


train(state)
np.testing.assert_allclose(float(mnist_model.optimizer.learning_rate), 0.001 * 2)
checksum = np.array([sum(float(each.sum()) for each in mnist_model.get_weights())])
assert len(set(np.asarray(hvd.allgather(checksum, name="checksum")).tolist())) == 1, "all have the same model"
say("over", state.trained)
"""
)


@pytest.fixture
def job(launcher: Launcher) -> Job:
    return Job(launcher)


def test_tensorflow2_mnist_elastic(job: Job) -> None:
    lose_one_and_get_another(job, 0, LOOP, warm.python(*warm.TENSORFLOW, **QUIET), **QUIET)


def test_tensorflow2_keras_mnist_elastic(job: Job) -> None:
    lose_one_and_get_another(job, 1, FIT, warm.python("hvdgloo.tensorflow.keras", **QUIET), **QUIET)


def test_the_pages_loop_trains_at_the_rate_for_the_workers_who_are_there(job: Job) -> None:
    text = program("docs/elastic.md", "TensorFlowKerasState").replace("state.step < 60", 'not os.path.exists("over")')
    python = warm.python(*warm.TENSORFLOW, **QUIET)
    follow_three_sizes(job, text, "optimizer.learning_rate", 0.05, python, **QUIET)


STOP = """
class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = os.path.exists("over")


callbacks.insert(0, Stop())
EPOCHS = 100_000
"""


def test_the_pages_fit_trains_at_the_rate_for_the_workers_who_are_there(job: Job) -> None:
    text = program("docs/elastic.md", "KerasState(model, batch=0")
    text = text.replace("@hvd.elastic.run", f"{STOP}@hvd.elastic.run")
    python = warm.python(*warm.TENSORFLOW, **QUIET)
    follow_three_sizes(job, text, "model.optimizer.learning_rate", 0.05, python, **QUIET)
