"""Train on handwritten digits with Keras and ``fit``, with processes that may join and leave.

    hvdgloo-run -np 4 --min-np 2 --failures-per-host 99 examples/keras_digits_elastic.py

The network and the data are the same as in keras_digits.py. Kill one of the processes while it trains: the others
continue from the last commit, and another one takes its place. The lines that make this program elastic are marked (1)
to (5); they are the same on each of Keras's backends. Without hvdgloo-run it is a job of one process.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import keras
import numpy as np
from keras_digits import build_model, load_data

import hvdgloo.keras as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on digits, with processes that come and go.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--commit-every", type=int, default=1, help="steps from one commit to the next")
    parser.add_argument("--seed", type=int, default=42, help="of initial weights and order of images")
    return parser.parse_args()


class Report(keras.callbacks.Callback):  # type: ignore[misc] # has no types
    """Notes in the state how many processes trained each epoch, and prints a line for it."""

    def __init__(self, state: Any, epochs: int) -> None:
        super().__init__()
        self.state = state
        self.epochs = epochs

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.sizes.append(hvd.size())
        if hvd.rank() == 0:
            ranks = "1 rank" if hvd.size() == 1 else f"{hvd.size()} ranks"
            print(f"epoch {epoch + 1}/{self.epochs} on {ranks}, the first is process {os.getpid()}", flush=True)


def main() -> None:
    args = parse_arguments()
    hvd.init()
    keras.utils.set_random_seed(args.seed)
    (images, digits), test = load_data()
    model = build_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])

    # (1) The whole state of the training. New processes receive it, and after a failure all return to the last commit.
    state: Any = hvd.elastic.KerasState(model, epoch=0, batch=0, sizes=[])

    # (2) This is called again whenever processes were lost or joined, and continues from the state.
    @hvd.elastic.run
    def train(state: Any) -> None:  # a KerasState, with the attributes given above
        # (3) So everything that depends on the number of processes is here: the part of the data, the learning rate.
        steps = len(images) // hvd.size() // args.batch_size
        mine = slice(hvd.rank(), hvd.size() * steps * args.batch_size, hvd.size())
        rate = args.lr * hvd.size()
        last = max(args.epochs - 3, 3)
        callbacks = [
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3, steps_per_epoch=steps),
            hvd.callbacks.LearningRateScheduleCallback(rate, 1.0, start_epoch=3, end_epoch=last),
            hvd.callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.2, start_epoch=last),
            Report(state, args.epochs),
            # (4) A commit is never lost, and the job's processes may change there. It comes last, since callbacks
            # after it are skipped when they change.
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, args.commit_every),
        ]
        # (5) The interrupted epoch starts again; the ones before it are done.
        model.fit(
            images[mine],
            digits[mine],
            batch_size=args.batch_size,
            initial_epoch=state.epoch,
            epochs=args.epochs,
            callbacks=callbacks,
            verbose=0,
        )

    train(state)

    own = slice(hvd.rank(), None, hvd.size())
    hits = np.argmax(model.predict(test[0][own], verbose=0), axis=1) == test[1][own]
    correct, total = hvd.allreduce(np.array([hits.sum(), len(hits)], np.float64), name="accuracy")
    weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()
    if len(set(hvd.allgather_object(weights))) != 1:
        raise SystemExit("ranks hold different parameters")
    if hvd.rank() == 0:
        print(f"test accuracy averaged over {hvd.size()} rank{'s' * (hvd.size() > 1)}: {correct / total:.2%}")
        sizes = [str(size) for size, before in zip(state.sizes, [0, *state.sizes], strict=False) if size != before]
        print(f"trained {int(optimizer.iterations)} steps, on {' -> '.join(sizes)} ranks")
        print(f"all ranks hold identical parameters ({weights[:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
