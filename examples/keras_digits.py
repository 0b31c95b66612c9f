"""Train a small network on handwritten digits with Keras and ``fit``, on as many processes as you like.

    hvdgloo-run -np 2 examples/keras_digits.py
    KERAS_BACKEND=torch hvdgloo-run -np 2 examples/keras_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. What makes this program
distributed is marked (1) to (6); it is the same on each of Keras's backends: TensorFlow, torch and JAX.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvdgloo.keras as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    parser.add_argument("--save", type=Path, default=None, help="where rank 0 saves the best model (.keras)")
    return parser.parse_args()


def load_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return training and test images with digits, the same in every process: every fifth image is for the test."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def build_model() -> Any:
    """Two convolutions and two dense layers: 8 x 8 grey pixels to 10 digits."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = parse_arguments()

    # (1) Find the other processes and get a rank.
    hvd.init()
    keras.utils.set_random_seed(args.seed + hvd.rank())  # dropout and shuffling differ; weights are broadcast, see (5)

    # (2) Each rank trains on its own part of the data; all take the same number of steps.
    (images, digits), test = load_data()
    steps = len(images) // hvd.size() // args.batch_size
    mine = slice(hvd.rank(), hvd.size() * steps * args.batch_size, hvd.size())

    # (3) All ranks together take larger batches, so the learning rate grows with them (and warms up, below).
    rate = args.lr * hvd.size()
    # (4) Gradients are averaged over all ranks.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    model = build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])

    # (5) All start with rank 0's weights, report the ranks' mean, and change the learning rate alike.
    last = max(args.epochs - 3, 3)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3, steps_per_epoch=steps),
        hvd.callbacks.LearningRateScheduleCallback(rate, 1.0, start_epoch=3, end_epoch=last),
        hvd.callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.2, start_epoch=last),
    ]
    # (6) One progress report and one file, not one per rank.
    if hvd.rank() == 0 and args.save is not None:
        best = hvd.callbacks.BestModelCheckpoint(monitor="val_accuracy")
        best.filepath = str(args.save)
        callbacks.append(best)
    model.fit(
        images[mine],
        digits[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=test,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )

    own = slice(hvd.rank(), None, hvd.size())
    hits = np.argmax(model.predict(test[0][own], verbose=0), axis=1) == test[1][own]
    correct, total = hvd.allreduce(np.array([hits.sum(), len(hits)], np.float64), name="accuracy")
    weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()
    if len(set(hvd.allgather_object(weights))) != 1:
        raise SystemExit("ranks hold different parameters")
    if hvd.rank() == 0:
        print(f"test accuracy averaged over {hvd.size()} ranks: {correct / total:.2%}")
        print(f"all ranks hold identical parameters ({weights[:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
