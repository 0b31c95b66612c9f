"""Train a network on handwritten digits in a Spark DataFrame, on as many processes as you like.

    python examples/spark_torch_digits.py --num-proc 2

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. Here Spark runs in this
process (``local[2]``); on a cluster the same program is started with ``spark-submit``, and ``--work-dir`` is a
directory that all machines see, such as ``hdfs:///tmp/digits``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack

import torch
import torch.nn as nn
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from sklearn.datasets import load_digits
from torch.nn import functional

from hvdgloo.spark.common.backend import Backend, LocalBackend, SparkBackend
from hvdgloo.spark.common.store import Store
from hvdgloo.spark.torch import TorchEstimator


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a network on scikit-learn's handwritten digits, from a Spark DataFrame.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--master", default=None, help="URL of the cluster; by default spark-submit's, or local[2]")
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument("--local", action="store_true", help="train on the driver's host, not in Spark's tasks")
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    parser.add_argument(
        "--work-dir", default=None, help="where data and checkpoints go; by default a temporary directory"
    )
    return parser.parse_args()


class Net(nn.Module):
    """Two convolutions and two dense layers: 8 x 8 grey pixels to 10 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        logits: torch.Tensor = self.fc2(x)
        return logits


def load_data(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Return images as vectors of 64 pixels, with their digits: every fifth image is for the test."""
    pixels, digits = load_digits(return_X_y=True)
    rows = [
        (index, Vectors.dense(image / 16), int(digit))
        for index, (image, digit) in enumerate(zip(pixels, digits, strict=True))
    ]
    images = spark.createDataFrame(rows, ["index", "image", "digit"])
    return images.where("index % 5 != 0"), images.where("index % 5 = 0")


def loss(output: torch.Tensor, digit: torch.Tensor) -> torch.Tensor:
    # Labels arrive as float32.
    return functional.cross_entropy(output, digit.long())


def accuracy(output: torch.Tensor, digit: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == digit).float().mean()


def main() -> None:
    args = parse_arguments()
    # Otherwise Spark starts its Python workers as "python3", which may be another interpreter than this.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("digits")
    if args.master is not None or "spark.master" not in dict(builder._options):
        builder = builder.master(args.master or "local[2]")
    with ExitStack() as stack:
        spark = stack.enter_context(builder.getOrCreate())
        work_dir = args.work_dir or stack.enter_context(tempfile.TemporaryDirectory())
        train, test = load_data(spark)

        torch.manual_seed(42)
        model = Net()
        backend: Backend = (LocalBackend if args.local else SparkBackend)(args.num_proc)
        estimator = TorchEstimator(
            backend=backend,
            store=Store.create(work_dir),
            model=model,
            # The learning rate of one rank, which is multiplied by the number of ranks during training.
            optimizer=torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
            loss=loss,
            metrics=[accuracy],
            feature_cols=["image"],
            label_cols=["digit"],
            input_shapes=[[-1, 1, 8, 8]],
            validation=0.1,
            batch_size=args.batch_size,
            epochs=args.epochs,
            random_seed=42,
        )
        trained = estimator.fit(train).setOutputCols(["scores"])

        # A Transformer like any other, which adds a column of the model's ten outputs; the largest one wins.
        largest = F.udf(lambda scores: int(scores.argmax()), "int")
        predicted = trained.transform(test).withColumn("predicted", largest("scores"))
        right = predicted.where("predicted = digit").count()
        print(f"test accuracy with {args.num_proc} ranks: {right / test.count():.2%}")


if __name__ == "__main__":
    main()
