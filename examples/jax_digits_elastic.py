"""Train on handwritten digits with JAX and optax, with processes that may join and leave.

    hvdgloo-run -np 4 --min-np 2 --failures-per-host 99 examples/jax_digits_elastic.py

The network and the data are the same as in jax_digits.py. Kill one of the processes while it trains: the others
continue from the last commit, without compiling their step again, and another one takes its place. The lines that make
this program elastic are marked (1) to (5); without hvdgloo-run it is a job of one process.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_digits import fingerprint, first_parameters, load_data, logits_of, loss_of

import hvdgloo.jax as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on digits, with processes that come and go.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument(
        "--lr", type=float, default=0.02, help="learning rate of one process; multiplied by the number of processes"
    )
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD")
    parser.add_argument("--commit-every", type=int, default=1, help="steps from one commit to the next")
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    hvd.init()
    (images, digits), (test_images, test_digits) = load_data()

    # (1) A learning rate that is part of the optimizer's state can change without compiling the step again.
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=args.lr, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(sgd)
    parameters = first_parameters(jax.random.key(args.seed))

    # (2) The whole state of the training. New processes receive it, and after a failure all return to the last commit.
    state: Any = hvd.elastic.JaxState(
        parameters=parameters, optimizer=optimizer.init(parameters), epoch=0, used=0, step=0, sizes=[]
    )

    def suit_size() -> None:
        state.optimizer = optax.tree_utils.tree_set(
            state.optimizer, learning_rate=jnp.asarray(args.lr * hvd.size(), jnp.float32)
        )

    @jax.jit  # type: ignore[untyped-decorator]
    def step(parameters: Any, optimizer_state: Any, images: Any, digits: Any) -> Any:
        gradients = jax.grad(loss_of)(parameters, images, digits)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state

    # (3) This starts from the top whenever processes were lost or joined, and continues from the state.
    @hvd.elastic.run
    def train(state: Any) -> None:  # a JaxState, with the attributes given above
        suit_size()
        while state.epoch < args.epochs:
            order = np.random.default_rng((args.seed, state.epoch)).permutation(len(images))
            # (4) The present processes divide what is left of the epoch. Batches are whole, since a step is compiled
            # for one size of batch.
            while len(order) - state.used >= (together := args.batch_size * hvd.size()):
                chosen = order[state.used : state.used + together][hvd.rank() :: hvd.size()]
                state.parameters, state.optimizer = step(
                    state.parameters, state.optimizer, images[chosen], digits[chosen]
                )
                state.used += together
                state.step += 1
                # (5) A commit is never lost, and the job's processes may change here.
                if state.step % args.commit_every == 0:
                    state.commit()
            state.epoch += 1
            state.used = 0
            state.sizes.append(hvd.size())
            if hvd.rank() == 0:
                ranks = "1 rank" if hvd.size() == 1 else f"{hvd.size()} ranks"
                print(f"epoch {state.epoch}/{args.epochs} on {ranks}, the first is process {os.getpid()}", flush=True)
            state.commit()

    train(state)

    # Afterwards the size of the job is fixed, as in any other program.
    own = slice(hvd.rank(), None, hvd.size())
    correct = jnp.sum(logits_of(state.parameters, test_images[own]).argmax(1) == test_digits[own])
    counted = hvd.allreduce({"correct": correct, "total": len(test_digits[own])}, name="counts", op=hvd.Sum)
    fingerprints = hvd.allgather_object(fingerprint(state.parameters), name="fingerprint")
    if len(set(fingerprints)) != 1:
        raise SystemExit(f"ranks hold different parameters: {fingerprints}")
    if hvd.rank() == 0:
        accuracy = counted["correct"] / counted["total"]
        print(f"test accuracy averaged over {hvd.size()} rank{'s' * (hvd.size() > 1)}: {accuracy:.2%}")
        sizes = [str(size) for size, before in zip(state.sizes, [0, *state.sizes], strict=False) if size != before]
        print(f"trained {state.step} steps, on {' -> '.join(sizes)} ranks")
        print(f"all ranks hold identical parameters ({fingerprints[0][:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
