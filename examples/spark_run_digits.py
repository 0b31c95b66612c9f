"""Train a small convolutional network on handwritten digits, in processes next to Spark's tasks.

    python examples/spark_run_digits.py --num-proc 2

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. Here Spark runs in this
process (``local[2]``); on a cluster the same program is started with ``spark-submit``. ``hvdgloo.spark.run`` calls
``train`` once on each rank and returns the ranks' results. To train on a DataFrame, use an estimator
(spark_torch_digits.py).
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np
import torch
import torch.nn as nn
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch.nn import functional

import hvdgloo.spark


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on scikit-learn's handwritten digits, beside Spark's tasks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--master", default=None, help="URL of the cluster; by default spark-submit's, or local[2]")
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    return parser.parse_args()


def train(epochs: int, batch_size: int, lr: float) -> tuple[float, list[float]]:
    """Train as one rank, and return the accuracy on all test images and the loss of each epoch."""
    import hvdgloo.torch as hvd

    hvd.init()
    torch.manual_seed(42)
    devices = hvdgloo.spark.task.get_available_devices()
    device = torch.device("cuda", int(devices[0])) if devices and torch.cuda.is_available() else torch.device("cpu")

    # Each rank trains on its own part of the images; every fifth image is for the test.
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy((pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)).to(device)
    digits = torch.from_numpy(labels.astype(np.int64)).to(device)
    is_test = torch.arange(len(images)) % 5 == 0
    own = torch.arange(len(images))[~is_test][hvd.rank() :: hvd.size()]
    own = own[: len(images[~is_test]) // hvd.size()]  # the same number of steps on all ranks

    model = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    losses = []
    for epoch in range(epochs):
        total = torch.zeros(())
        batches = own[torch.randperm(len(own))].split(batch_size)  # type: ignore[no-untyped-call]
        for batch in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), digits[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach().cpu()
        losses.append(float(hvd.allreduce(total / len(batches), name="loss")))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{epochs}: loss {losses[-1]:.4f}", flush=True)  # appears in the driver

    with torch.no_grad():
        right = (model(images[is_test]).argmax(1) == digits[is_test]).double().mean()
    return float(hvd.allreduce(right, name="accuracy")), losses


def main() -> None:
    args = parse_arguments()
    builder = SparkSession.builder.appName("digits")
    if args.master or "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit names the cluster itself
        builder = builder.master(args.master or "local[2]")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = builder.getOrCreate()
    try:
        results = hvdgloo.spark.run(train, (args.epochs, args.batch_size, args.lr), num_proc=args.num_proc)
    finally:
        spark.stop()
    accuracy, losses = results[0]
    if any(result != results[0] for result in results):
        raise SystemExit(f"ranks have different results: {results}")
    print(f"loss {losses[0]:.4f} after the first epoch, {losses[-1]:.4f} after the last")
    print(f"test accuracy on {len(results)} ranks: {accuracy:.2%}")


if __name__ == "__main__":
    main()
