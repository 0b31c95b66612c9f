"""A program of the shape of Horovod's example of this name: it imports horovod, and knows nothing of this library."""

import argparse
import os
import subprocess
import sys

import numpy as np
import pyspark
import pyspark.sql.types as T
from pyspark import SparkConf
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from tensorflow import keras
from tensorflow.keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from tensorflow.keras.models import Sequential

import horovod.spark.keras as hvd
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--master", help="spark master to connect to")
parser.add_argument("--num-proc", type=int, help="number of worker processes; by default spark's parallelism")
parser.add_argument("--batch-size", type=int, default=128, help="input batch size for training")
parser.add_argument("--epochs", type=int, default=12, help="number of epochs to train")
parser.add_argument("--work-dir", default="/tmp", help="where files are kept while training")
parser.add_argument("--data-dir", default="/tmp", help="where the data set is")

if __name__ == "__main__":
    args = parser.parse_args()

    conf = SparkConf().setAppName("keras_spark_mnist").set("spark.sql.shuffle.partitions", "16")
    if args.master:
        conf.setMaster(args.master)
    elif args.num_proc:
        conf.setMaster(f"local[{args.num_proc}]")
    spark = SparkSession.builder.config(conf=conf).getOrCreate()

    store = Store.create(args.work_dir)

    libsvm_path = os.path.join(args.data_dir, "mnist.bz2")
    if not os.path.exists(libsvm_path):
        subprocess.check_output(["wget", "https://www.csie.ntu.edu.tw/~cjlin/mnist.bz2", "-O", libsvm_path])

    df = spark.read.format("libsvm").option("numFeatures", "784").load(libsvm_path)

    encoder = OneHotEncoder(inputCols=["label"], outputCols=["label_vec"], dropLast=False)
    model = encoder.fit(df)
    train_df = model.transform(df)
    train_df, test_df = train_df.randomSplit([0.9, 0.1])

    model = Sequential()
    model.add(Conv2D(32, kernel_size=(3, 3), activation="relu", input_shape=(28, 28, 1)))
    model.add(Conv2D(64, (3, 3), activation="relu"))
    model.add(MaxPooling2D(pool_size=(2, 2)))
    model.add(Dropout(0.25))
    model.add(Flatten())
    model.add(Dense(128, activation="relu"))
    model.add(Dropout(0.5))
    model.add(Dense(10, activation="softmax"))

    optimizer = keras.optimizers.Adadelta(1.0)
    loss = keras.losses.categorical_crossentropy

    backend = SparkBackend(
        num_proc=args.num_proc, stdout=sys.stdout, stderr=sys.stderr, prefix_output_with_timestamp=True
    )
    callbacks = [keras.callbacks.TensorBoard(profile_batch=5)]
    keras_estimator = hvd.KerasEstimator(
        backend=backend,
        store=store,
        model=model,
        optimizer=optimizer,
        loss=loss,
        metrics=["accuracy"],
        feature_cols=["features"],
        label_cols=["label_vec"],
        batch_size=args.batch_size,
        epochs=args.epochs,
        inmemory_cache_all=True,
        verbose=1,
        callbacks=callbacks,
        random_seed=42,
    )

    keras_model = keras_estimator.fit(train_df).setOutputCols(["label_prob"])
    pred_df = keras_model.transform(test_df)

    argmax = udf(lambda v: float(np.argmax(v)), returnType=T.DoubleType())
    pred_df = pred_df.withColumn("label_pred", argmax(pred_df.label_prob))
    evaluator = MulticlassClassificationEvaluator(predictionCol="label_pred", labelCol="label", metricName="accuracy")
    print("Spark", pyspark.__version__, "Test accuracy:", evaluator.evaluate(pred_df))

    spark.stop()
