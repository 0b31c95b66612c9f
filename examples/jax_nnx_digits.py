"""Train a convolutional network of flax NNX on handwritten digits, with checkpoints of orbax.

    pip install flax
    hvdgloo-run -np 2 examples/jax_nnx_digits.py

The data are the same as in jax_digits.py. The lines that make this program distributed are marked (1) to (7); without
them it is an ordinary program for flax, and without hvdgloo-run it is a job of one process.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from flax import nnx
from jax_digits import fingerprint, load_data

import hvdgloo.jax as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network of flax NNX on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument(
        "--lr", type=float, default=0.001, help="learning rate of one process; multiplied by the number of processes"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    parser.add_argument("--checkpoints", type=Path, help="save here after every epoch, and resume from the newest")
    return parser.parse_args()


class Net(nnx.Module):  # type: ignore[misc] # has no types
    """Two convolutions and two dense layers: 8 x 8 grey pixels to 10 digits."""

    def __init__(self, rngs: Any) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.fc1 = nnx.Linear(32 * 4 * 4, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.fc2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = nnx.relu(self.conv1(images))
        x = nnx.max_pool(nnx.relu(self.norm(self.conv2(x))), (2, 2), (2, 2))
        return self.fc2(self.dropout(nnx.relu(self.fc1(x.reshape(len(x), -1)))))


def loss_of(model: Net, images: Any, digits: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), digits).mean()


@nnx.jit  # type: ignore[untyped-decorator]
def step(model: Net, optimizer: Any, images: Any, digits: Any) -> Any:
    loss, gradients = nnx.value_and_grad(loss_of)(model, images, digits)
    optimizer.update(model, gradients)
    # (5) Any collective may be part of the compiled step.
    return hvd.allreduce(loss, name="loss")


def main() -> None:
    args = parse_arguments()

    # (1) Find the other processes and get a rank.
    hvd.init()
    is_first = hvd.rank() == 0

    # (2) Each rank trains and tests on its own part of the data, and draws its own numbers for Dropout.
    (images, digits), (test_images, test_digits) = load_data()
    test_images, test_digits = test_images[hvd.rank() :: hvd.size()], test_digits[hvd.rank() :: hvd.size()]
    steps = len(images) // (args.batch_size * hvd.size())
    model = Net(nnx.Rngs(args.seed, dropout=args.seed + hvd.rank()))

    # (3) Gradients are averaged over all ranks. All ranks together take larger batches, so the learning rate grows.
    distributed = hvd.DistributedOptimizer(optax.adam(args.lr * hvd.size()))
    optimizer = nnx.Optimizer(model, distributed, wrt=nnx.Param)

    def progress() -> Any:
        """Return everything that all ranks have in common and a checkpoint holds."""
        return nnx.state(model, (nnx.Param, nnx.BatchStat)), nnx.state(optimizer)

    def resume(state: Any) -> None:
        nnx.update(model, state[0])
        nnx.update(optimizer, state[1])

    # (4) Rank 0 alone uses orbax; the others get everything from rank 0, so that all start alike.
    manager, first_epoch = None, 0
    if is_first and args.checkpoints is not None:
        options = orbax.checkpoint.CheckpointManagerOptions(max_to_keep=2)
        manager = orbax.checkpoint.CheckpointManager(args.checkpoints.absolute(), options=options)
        if newest := manager.latest_step():
            resume(manager.restore(newest, args=orbax.checkpoint.args.StandardRestore(progress())))
            first_epoch = newest
            print(f"resuming after epoch {first_epoch} from {args.checkpoints}")
    first_epoch = hvd.broadcast_object(first_epoch, name="first_epoch")
    resume(hvd.broadcast_parameters(progress()))

    seen, started = 0, time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        model.train()
        order = np.random.default_rng((args.seed, epoch)).permutation(len(images))[hvd.rank() :: hvd.size()]
        for batch in range(steps):
            chosen = order[batch * args.batch_size : (batch + 1) * args.batch_size]
            loss = step(model, optimizer, images[chosen], digits[chosen])
            seen += len(chosen)
        # (6) Each rank has normalized its own batches: average the statistics before they are used or saved.
        nnx.update(model, hvd.allreduce(nnx.state(model, nnx.BatchStat), name="statistics"))
        if is_first:
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, {time.perf_counter() - started:.1f} s", flush=True
            )
        if manager is not None:
            manager.save(epoch + 1, args=orbax.checkpoint.args.StandardSave(progress()))  # written in the background
    seconds = time.perf_counter() - started
    if manager is not None:
        manager.close()  # waits for the last checkpoint

    # (7) Sum over the ranks. Counts are summed, not percentages: shards need not be of one size.
    model.eval()
    correct = jnp.sum(model(test_images).argmax(1) == test_digits)
    counted = hvd.allreduce({"correct": correct, "total": len(test_digits), "seen": seen}, name="counts", op=hvd.Sum)
    fingerprints = hvd.allgather_object(fingerprint(progress()), name="fingerprint")
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
