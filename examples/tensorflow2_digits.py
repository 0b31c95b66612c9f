"""Train a small network on handwritten digits with TensorFlow 2 and its tape, on as many processes as you like.

    hvdgloo-run -np 2 examples/tensorflow2_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. What makes this program
distributed is marked (1) to (6); without those lines it is an ordinary TensorFlow program, and run without hvdgloo-run
it is a job of one process.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdgloo.tensorflow as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    return parser.parse_args()


def load_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return training and test images with digits, the same in every process: every fifth image is for the test."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def build_model() -> Any:
    """Two convolutions and two dense layers: 8 x 8 grey pixels to 10 digits."""
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = parse_arguments()

    # (1) Find the other processes and get a rank.
    hvd.init()
    tf.random.set_seed(args.seed)

    # (2) Each rank trains and tests on its own part of the data; all take the same number of steps.
    (images, digits), (test_images, test_digits) = load_data()
    data = tf.data.Dataset.from_tensor_slices((images, digits)).shuffle(len(images), seed=args.seed)
    data = data.shard(hvd.size(), hvd.rank()).batch(args.batch_size, drop_remainder=True)

    # (3) All ranks together take larger batches, so the learning rate grows with them.
    model = build_model()
    optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: Any, wanted: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(wanted, model(batch, training=True))
        # (4) Gradients are averaged over all ranks, while the rest of them is still computed.
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    # (5) All start with rank 0's weights.
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    for epoch in range(args.epochs):
        loss = tf.constant(0.0)
        for batch, wanted in data:
            loss = step(batch, wanted)
        mean = hvd.allreduce(loss, name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: loss {float(mean):.4f}", flush=True)

    # (6) Counts are averaged, not percentages: shards need not be of one size.
    mine = slice(hvd.rank(), None, hvd.size())
    hits = np.argmax(model(test_images[mine]), axis=1) == test_digits[mine]
    correct, total = hvd.allreduce(tf.constant([hits.sum(), len(hits)], tf.float64), name="accuracy").numpy()
    weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()
    if len(set(hvd.allgather_object(weights))) != 1:
        raise SystemExit("ranks hold different parameters")
    if hvd.rank() == 0:
        print(f"test accuracy averaged over {hvd.size()} ranks: {correct / total:.2%}")
        print(f"all ranks hold identical parameters ({weights[:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
