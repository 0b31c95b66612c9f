"""Train a network on handwritten digits in a Spark DataFrame with Keras, on as many processes as you like.

    python examples/spark_keras_digits.py --num-proc 2
    KERAS_BACKEND=torch python examples/spark_keras_digits.py --num-proc 2

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
from typing import Any

import keras
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from sklearn.datasets import load_digits

from hvdgloo.spark.common.backend import Backend, LocalBackend, SparkBackend
from hvdgloo.spark.common.store import Store
from hvdgloo.spark.keras import KerasEstimator


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a Keras model on scikit-learn's handwritten digits, from a Spark DataFrame.",
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


def load_data(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Images as vectors of 64 pixels, with their digits: every fifth image is for the test."""
    pixels, digits = load_digits(return_X_y=True)
    rows = [
        (index, Vectors.dense(image / 16), int(digit))
        for index, (image, digit) in enumerate(zip(pixels, digits, strict=True))
    ]
    images = spark.createDataFrame(rows, ["index", "image", "digit"])
    return images.where("index % 5 != 0"), images.where("index % 5 = 0")


def build_model() -> Any:
    """Two convolutions and two dense layers: 8 x 8 grey pixels, in vectors of 64, to 10 digits."""
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
    # Spark starts its Python workers as "python3" otherwise, which may be another one than this.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("digits")
    if args.master is not None or "spark.master" not in dict(builder._options):
        builder = builder.master(args.master or "local[2]")
    with ExitStack() as stack:
        spark = stack.enter_context(builder.getOrCreate())
        work_dir = args.work_dir or stack.enter_context(tempfile.TemporaryDirectory())
        train, test = load_data(spark)

        keras.utils.set_random_seed(42)
        backend: Backend = (LocalBackend if args.local else SparkBackend)(args.num_proc)
        estimator = KerasEstimator(
            backend=backend,
            store=Store.create(work_dir),
            model=build_model(),
            # The learning rate of one rank: it is multiplied by their number while they train.
            optimizer=keras.optimizers.SGD(args.lr, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            feature_cols=["image"],
            label_cols=["digit"],
            validation=0.1,
            batch_size=args.batch_size,
            epochs=args.epochs,
            random_seed=42,
        )
        trained = estimator.fit(train).setOutputCols(["scores"])

        # A Transformer like all others: a column of the model's ten outputs, from which the largest is taken.
        largest = F.udf(lambda scores: int(scores.argmax()), "int")
        predicted = trained.transform(test).withColumn("predicted", largest("scores"))
        right = predicted.where("predicted = digit").count()
        print(f"test accuracy with {args.num_proc} ranks: {right / test.count():.2%}")


if __name__ == "__main__":
    main()
