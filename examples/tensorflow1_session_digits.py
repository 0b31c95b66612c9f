"""Train a small network on handwritten digits with TensorFlow 1's sessions, on as many processes as you like.

    hvdgloo-run -np 2 examples/tensorflow1_session_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. What makes this program
distributed is marked (1) to (6); the rest is how programs were written before TensorFlow 2.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdgloo.tensorflow as hvd

v1 = tf.compat.v1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=30, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    parser.add_argument("--checkpoint-dir", default=None, help="where rank 0 saves, and from where it resumes")
    return parser.parse_args()


def load_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return training and test images with digits, the same in every process: every fifth image is for the test."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def batches(images: Any, digits: Any, size: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield batches of this process's images without end, in a new order after each pass."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(len(images))
        for start in range(0, len(images) - size + 1, size):
            chosen = order[start : start + size]
            yield images[chosen], digits[chosen]


def dense(name: str, inputs: Any, width: int) -> Any:
    """Add a dense layer without an activation."""
    scale = (2.0 / int(inputs.shape[1])) ** 0.5
    with v1.variable_scope(name):
        shape = [int(inputs.shape[1]), width]
        weights = v1.get_variable("weights", shape, initializer=v1.random_normal_initializer(stddev=scale))
        biases = v1.get_variable("biases", [width], initializer=v1.zeros_initializer())
    return inputs @ weights + biases


def main() -> None:
    args = parse_arguments()
    v1.disable_eager_execution()

    # (1) Find the other processes and get a rank.
    hvd.init()
    v1.set_random_seed(args.seed)

    # (2) Each rank trains and tests on its own part of the data.
    (images, digits), (test_images, test_digits) = load_data()
    mine = slice(hvd.rank(), None, hvd.size())
    source = batches(images[mine], digits[mine], args.batch_size, args.seed)

    image = v1.placeholder(tf.float32, [None, 64])
    digit = v1.placeholder(tf.int64, [None])
    logits = dense("output", tf.nn.relu(dense("second", tf.nn.relu(dense("first", image, 128)), 64)), 10)
    loss = v1.losses.sparse_softmax_cross_entropy(digit, logits)
    hits = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, 1), digit), tf.float64))
    counts = tf.stack([hits, tf.cast(tf.size(digit), tf.float64)])
    everyones_counts = hvd.allreduce(counts, name="accuracy")

    # (3) All ranks together take larger batches, so the learning rate grows with them.
    optimizer = v1.train.MomentumOptimizer(args.lr * hvd.size(), momentum=0.9)
    # (4) Gradients are averaged over all ranks.
    optimizer = hvd.DistributedOptimizer(optimizer)
    step = v1.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)
    variables = v1.trainable_variables()

    # (5) All start with rank 0's variables, new or from its checkpoint.
    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    # (6) One checkpoint and one report, not one per rank.
    is_first = hvd.rank() == 0
    steps = args.epochs * (len(images) // hvd.size() // args.batch_size)
    if is_first:
        hooks.append(v1.train.LoggingTensorHook({"step": step, "loss": loss}, every_n_iter=max(steps // 5, 1)))
    checkpoints = args.checkpoint_dir if is_first else None
    with v1.train.MonitoredTrainingSession(checkpoint_dir=checkpoints, hooks=hooks) as session:
        done = 0
        while done < steps:
            chosen_images, chosen_digits = next(source)
            _, done = session.run([train, step], {image: chosen_images, digit: chosen_digits})
        test = {image: test_images[mine], digit: test_digits[mine]}
        (correct, total), values = session.run([everyones_counts, variables], test)

    weights = hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in values)).hexdigest()
    if len(set(hvd.allgather_object(weights))) != 1:
        raise SystemExit("ranks hold different parameters")
    if is_first:
        print(f"test accuracy averaged over {hvd.size()} ranks: {correct / total:.2%}")
        print(f"all ranks hold identical parameters ({weights[:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
