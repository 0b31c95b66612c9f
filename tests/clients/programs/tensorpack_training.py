"""tensorpack's HorovodTrainer, with TensorFlow 1's interface as its tensorflow, for which it was written."""

import sys

import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
sys.modules["tensorflow"] = tf  # tensorpack imports it by this name

import numpy as np  # noqa: E402
from tensorpack import ModelDesc, TrainConfig, launch_train_with_config, logger  # noqa: E402
from tensorpack.callbacks import Callback  # noqa: E402
from tensorpack.dataflow import DataFromList  # noqa: E402
from tensorpack.input_source import QueueInput  # noqa: E402
from tensorpack.train import HorovodTrainer  # noqa: E402

SEEN = []


class Model(ModelDesc):
    def inputs(self) -> list[object]:
        return [tf.TensorSpec((None, 8), tf.float32, "x"), tf.TensorSpec((None, 1), tf.float32, "y")]

    def build_graph(self, x: object, y: object) -> object:
        first = tf.constant_initializer(float(hvd.rank() + 1))  # models differ until they are broadcast
        weight = tf.get_variable("weight", [8, 1], initializer=first)
        return tf.reduce_mean(tf.square(tf.matmul(x, weight) - y), name="cost")

    def optimizer(self) -> object:
        return tf.train.GradientDescentOptimizer(0.1)


class Look(Callback):
    _chief_only = False

    def _trigger_epoch(self) -> None:
        weight = next(variable for variable in tf.global_variables() if variable.op.name == "weight")
        SEEN.append(self.trainer.sess.run(weight))


def main() -> None:
    trainer = HorovodTrainer(average=True)
    assert hvd.size() == 2
    logger.set_logger_dir(f"log-{hvd.rank()}", action="d")
    x = np.random.default_rng(hvd.rank()).normal(size=(64, 16, 8)).astype(np.float32)  # each rank has its own data
    data = DataFromList([[batch, batch.sum(axis=1, keepdims=True)] for batch in x], shuffle=True)
    config = TrainConfig(
        model=Model(),
        data=QueueInput(data),
        callbacks=[Look()],
        extra_callbacks=[],
        monitors=[],
        steps_per_epoch=40,
        max_epoch=2,
    )
    launch_train_with_config(config, trainer)
    assert len(SEEN) == 2
    assert np.allclose(SEEN[-1], 1.0, atol=1e-2), SEEN
    everywhere = hvd.allgather_object(SEEN[-1].tolist())
    assert everywhere[0] == everywhere[1], everywhere
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
