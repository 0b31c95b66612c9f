"""Train a small network on handwritten digits with MXNet's Gluon, on as many processes as you like.

    hvdgloo-run -np 2 examples/mxnet_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded; use version 1.3.2
of scikit-learn, the last one for MXNet's old numpy. What makes this program distributed is marked (1) to (6); without
those lines it is an ordinary Gluon program, and run without hvdgloo-run it is a job of one process.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

import hvdgloo.mxnet as hvd


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
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    digits = labels.astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], digits[~is_test]), (images[is_test], digits[is_test])


def build_network() -> Any:
    """Two convolutions and two dense layers: 8 x 8 grey pixels to 10 digits."""
    network = gluon.nn.HybridSequential()
    network.add(
        gluon.nn.Conv2D(16, kernel_size=3, padding=1, activation="relu"),
        gluon.nn.Conv2D(32, kernel_size=3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Flatten(),
        gluon.nn.Dense(64, activation="relu"),
        gluon.nn.Dense(10),
    )
    network.hybridize()
    return network


def main() -> None:
    args = parse_arguments()

    # (1) Find the other processes and get a rank.
    hvd.init()
    mx.random.seed(args.seed + hvd.rank())

    # (2) Each rank trains and tests on its own part of the data; all take the same number of steps.
    (images, digits), (test_images, test_digits) = load_data()
    order = np.random.default_rng(args.seed)
    steps = len(images) // (args.batch_size * hvd.size())

    # (3) All start with rank 0's weights. Gluon learns the layers' shapes when the first images pass, and initialises
    # the weights then; so they are broadcast then.
    network = build_network()
    network.initialize(mx.init.Xavier())
    hvd.broadcast_parameters(network.collect_params(), root_rank=0)

    # (4) Gradients are averaged over all ranks. These together take larger batches, so the learning rate grows.
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    trainer = hvd.DistributedTrainer(
        network.collect_params(),
        "sgd",
        {"learning_rate": args.lr * hvd.size(), "momentum": 0.9},
        compression=compression,
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    for epoch in range(args.epochs):
        mine = order.permutation(len(images))[hvd.rank() :: hvd.size()]
        for step in range(steps):
            batch = mine[step * args.batch_size : (step + 1) * args.batch_size]
            with autograd.record():
                loss = loss_of(network(mx.nd.array(images[batch])), mx.nd.array(digits[batch]))
            loss.backward()
            trainer.step(args.batch_size)  # this rank's batch size
        mean = hvd.allreduce(loss.mean(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: loss {mean.asscalar():.4f}", flush=True)

    # (5) Counts are averaged, not percentages: shards need not be of one size.
    share = slice(hvd.rank(), None, hvd.size())
    hits = network(mx.nd.array(test_images[share])).asnumpy().argmax(axis=1) == test_digits[share]
    correct, total = hvd.allreduce(mx.nd.array([hits.sum(), len(hits)]), name="accuracy").asnumpy()

    # (6) Only one rank reports.
    arrays = [parameter.data().asnumpy() for _, parameter in sorted(network.collect_params().items())]
    weights = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    if len(set(hvd.allgather_object(weights))) != 1:
        raise SystemExit("ranks hold different parameters")
    if hvd.rank() == 0:
        print(f"test accuracy averaged over {hvd.size()} ranks: {correct / total:.2%}")
        print(f"all ranks hold identical parameters ({weights[:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
