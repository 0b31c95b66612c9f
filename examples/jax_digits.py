"""Train a small convolutional network on handwritten digits with JAX and optax, on as many processes as you like.

    hvdgloo-run -np 2 examples/jax_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. The whole step is one
compiled function, and the gradients are averaged inside it. The lines that make this program distributed are marked (1)
to (7); without them it is an ordinary program for JAX, and without hvdgloo-run it is a job of one process.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from sklearn.datasets import load_digits

import hvdgloo.jax as hvd

Arrays = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument(
        "--lr", type=float, default=0.02, help="learning rate of one process; multiplied by the number of processes"
    )
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    parser.add_argument("--checkpoint", type=Path, help="save here after every epoch, and resume from here if possible")
    return parser.parse_args()


def load_data() -> tuple[Arrays, Arrays]:
    """Return training and test images with digits, the same in every process: every fifth image is for the test."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    digits = labels.astype(np.int32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], digits[~is_test]), (images[is_test], digits[is_test])


def first_parameters(key: Any) -> dict[str, Any]:
    """Return the weights of two convolutions and two dense layers: 8 x 8 grey pixels to 10 digits."""
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "fc1": (32 * 4 * 4, 64), "fc2": (64, 10)}
    initialize = jax.nn.initializers.he_normal()
    return {
        name: {"kernel": initialize(each, shape), "bias": jnp.zeros(shape[-1])}
        for each, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    }


def logits_of(parameters: dict[str, Any], images: Any) -> Any:
    """Return the network's scores of each digit."""

    def convolved(name: str, x: Any) -> Any:
        layer = parameters[name]
        x = jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(x + layer["bias"])

    def dense(name: str, x: Any) -> Any:
        return x @ parameters[name]["kernel"] + parameters[name]["bias"]

    x = convolved("conv2", convolved("conv1", images))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return dense("fc2", jax.nn.relu(dense("fc1", x.reshape(len(x), -1))))


def loss_of(parameters: dict[str, Any], images: Any, digits: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(parameters, images), digits).mean()


def fingerprint(tree: Any) -> str:
    """Return a digest of all arrays of a tree, bit by bit."""
    digest = hashlib.sha256()
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def main() -> None:
    args = parse_arguments()

    # (1) Find the other processes and get a rank.
    hvd.init()
    is_first = hvd.rank() == 0

    # (2) Each rank trains and tests on its own part of the data. All have as many batches of the same size, so that the
    # step is compiled once, and no rank waits for a step that another does not take.
    (images, digits), (test_images, test_digits) = load_data()
    test_images, test_digits = test_images[hvd.rank() :: hvd.size()], test_digits[hvd.rank() :: hvd.size()]
    steps = len(images) // (args.batch_size * hvd.size())

    # (3) Gradients are averaged over all ranks. All ranks together take larger batches, so the learning rate grows.
    optimizer = hvd.DistributedOptimizer(
        optax.sgd(args.lr * hvd.size(), args.momentum),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    parameters = first_parameters(jax.random.key(args.seed))
    state = optimizer.init(parameters)

    # (4) Only rank 0 reads a checkpoint; the others get everything from rank 0, so that all start alike.
    first_epoch = 0
    if is_first and args.checkpoint is not None and args.checkpoint.exists():
        parameters, state, first_epoch = pickle.loads(args.checkpoint.read_bytes())  # noqa: S301 - this program wrote it
        print(f"resuming after epoch {first_epoch} from {args.checkpoint}")
    first_epoch = hvd.broadcast_object(first_epoch, name="first_epoch")
    parameters, state = hvd.broadcast_parameters((parameters, state))

    def train(parameters: Any, state: Any, images: Any, digits: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, images, digits)
        updates, state = optimizer.update(gradients, state, parameters)
        # (5) Any collective may be part of the compiled step.
        return optax.apply_updates(parameters, updates), state, hvd.allreduce(loss, name="loss")

    step = jax.jit(train)

    seen, started = 0, time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        order = np.random.default_rng((args.seed, epoch)).permutation(len(images))[hvd.rank() :: hvd.size()]
        for batch in range(steps):
            chosen = order[batch * args.batch_size : (batch + 1) * args.batch_size]
            parameters, state, loss = step(parameters, state, images[chosen], digits[chosen])
            seen += len(chosen)
        if is_first:
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, {time.perf_counter() - started:.1f} s", flush=True
            )
        if is_first and args.checkpoint is not None:
            unfinished = args.checkpoint.with_suffix(".tmp")
            unfinished.write_bytes(pickle.dumps((*jax.tree.map(np.asarray, (parameters, state)), epoch + 1)))
            unfinished.replace(args.checkpoint)  # atomic: a job that dies while saving leaves the previous one
    seconds = time.perf_counter() - started

    # (6) Sum over the ranks. Counts are summed, not percentages: shards need not be of one size.
    correct = jnp.sum(logits_of(parameters, test_images).argmax(1) == test_digits)
    counted = hvd.allreduce({"correct": correct, "total": len(test_digits), "seen": seen}, name="counts", op=hvd.Sum)
    # (7) Identical start and identical averaged gradients: the ranks must have identical parameters.
    fingerprints = hvd.allgather_object(fingerprint(parameters), name="fingerprint")
    if len(set(fingerprints)) != 1:
        raise SystemExit(f"ranks hold different parameters: {fingerprints}")
    if is_first:
        ranks = "1 rank" if hvd.size() == 1 else f"{hvd.size()} ranks"
        print(f"test accuracy averaged over {ranks}: {counted['correct'] / counted['total']:.2%}")
        print(f"trained on {counted['seen'] / seconds:.0f} images per second")
        print(f"all ranks hold identical parameters ({fingerprints[0][:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
