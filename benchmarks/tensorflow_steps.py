"""Training steps per second in TensorFlow: hvdgloo's tape, tf.distribute's MultiWorkerMirroredStrategy, and neither.

    python benchmarks/tensorflow_steps.py [--np 2] [--rounds 20] [--only mlp,conv] [--json FILE]

Two networks of Keras on made-up data, in a tf.function, one thread within operators and two across them per rank. All
ways train copies of the same network in the same processes; a round is one step of each in turn, after a barrier. The
strategy's collectives are its gRPC ring. The time of a step is the slowest rank's; medians are printed, and how many
times as fast as the strategy hvdgloo is. "alone" does not communicate: nothing can be faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import hvdgloo.run

WAYS = ("hvdgloo", "strategy", "alone")


def worker(rounds: int, chosen: list[str]) -> dict[str, dict[str, Any]]:
    """One rank's seconds per step, by network and way."""
    import socket

    import hvdgloo.numpy

    hvdgloo.numpy.init()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    cluster = {"worker": hvdgloo.numpy.allgather_object(address)}
    task = {"type": "worker", "index": hvdgloo.numpy.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

    import tensorflow as tf

    import hvdgloo.tensorflow as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    layers = tf.keras.layers

    def mlp() -> tuple[Any, Any]:
        hidden = [layers.Dense(width, activation="relu") for width in (1536, 1536, 1024)]
        return tf.keras.Sequential([tf.keras.Input((784,)), *hidden, layers.Dense(10)]), (32, 784)

    def conv() -> tuple[Any, Any]:
        made: list[Any] = [tf.keras.Input((32, 32, 3))]
        for width, stride in ((32, 1), (64, 2), (128, 2), (256, 2)):
            made += [layers.Conv2D(width, 3, stride, "same", use_bias=False), layers.ReLU()]
        made += [layers.Flatten(), layers.Dense(512, activation="relu"), layers.Dense(10)]
        return tf.keras.Sequential(made), (8, 32, 32, 3)

    results: dict[str, dict[str, Any]] = {}
    for name in chosen:
        steps: dict[str, Any] = {}
        count = 0
        for way in WAYS:
            with strategy.scope() if way == "strategy" else contextlib.nullcontext():
                tf.keras.utils.set_random_seed(1)
                network, shape = {"mlp": mlp, "conv": conv}[name]()
                optimizer = tf.keras.optimizers.SGD(1e-3, momentum=0.9)
                optimizer.build(network.trainable_variables)
            inputs, targets = tf.random.normal(shape), tf.random.uniform(shape[:1], 0, 10, tf.int32)
            count = network.count_params()

            def train(
                inputs: Any, targets: Any, network: Any = network, optimizer: Any = optimizer, way: str = way
            ) -> Any:
                with tf.GradientTape() as tape:
                    made = network(inputs, training=True)
                    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, made))
                shared = hvd.DistributedGradientTape(tape) if way == "hvdgloo" else tape
                gradients = shared.gradient(loss, network.trainable_variables)
                optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
                return loss

            def run(inputs: Any = inputs, targets: Any = targets, train: Any = train, way: str = way) -> Any:
                return strategy.run(train, (inputs, targets)) if way == "strategy" else train(inputs, targets)

            steps[way] = tf.function(run, autograph=False)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds + 3):  # the first three are not counted
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                hvd.barrier()
                begin = time.perf_counter()
                result = steps[way]()
                if way == "strategy":
                    result = strategy.experimental_local_results(result)[0]
                float(result)
                if turn >= 3:
                    seconds[way].append(time.perf_counter() - begin)
        results[name] = {"parameters": count, **seconds}
    hvd.barrier()
    hvd.shutdown()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="mlp,conv")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    chosen = given.only.split(",")
    if unknown := set(chosen) - {"mlp", "conv"}:
        parser.error(f"--only {','.join(sorted(unknown))}: there are mlp and conv")
    ranks = hvdgloo.run.run(worker, args=(given.rounds, chosen), np=given.np)
    for name in chosen:
        times = {way: [max(both) for both in zip(*(rank[name][way] for rank in ranks), strict=True)] for way in WAYS}
        middle = {way: statistics.median(each) for way, each in times.items()}
        shown = [f"{way} {1 / seconds:.2f} steps/s ({seconds * 1e3:.1f} ms)" for way, seconds in middle.items()]
        print(
            f"{name} ({ranks[0][name]['parameters'] / 1e6:.1f} M parameters): {', '.join(shown)}; "
            f"hvdgloo {middle['strategy'] / middle['hvdgloo']:.2f} x the strategy"
        )
    if given.json:
        Path(given.json).write_text(json.dumps(ranks, indent=1))


if __name__ == "__main__":
    main()
