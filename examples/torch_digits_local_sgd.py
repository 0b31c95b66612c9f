"""Train a small convolutional network on handwritten digits over a slow network: between most steps nothing is sent.

    hvdgloo-run -np 2 examples/torch_digits_local_sgd.py --sync-every 8

Each rank makes as many steps as --sync-every says on its own, and then all ranks average what they have changed. The
lines that differ from examples/torch_digits.py are marked (1) to (4).
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn import functional

import hvdgloo.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on scikit-learn's handwritten digits, with few meetings of the ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=320, help="steps of each process")
    parser.add_argument("--batch-size", type=int, default=16, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate, whatever the number of processes")
    parser.add_argument("--sync-every", type=int, default=8, help="steps from one outer step to the next")
    parser.add_argument("--start", type=int, default=0, help="steps at the beginning that are each averaged")
    parser.add_argument(
        "--inner",
        choices=["rank", "host"],
        default="rank",
        help="who steps alone in between: a rank, or a host's ranks",
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    return parser.parse_args()


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of 8 x 8 grey pixels and their digits, in an order that is the same in every process."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(labels))
    images = (pixels[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return torch.from_numpy(images), torch.from_numpy(labels[order].astype(np.int64))


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers, bit by bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    images, digits = load_data()
    first_test = len(digits) * 4 // 5
    mine = torch.arange(hvd.rank(), first_test, hvd.size())
    order = torch.Generator().manual_seed(args.seed + hvd.rank())

    model = make_model()
    # (1) Each rank steps on its own batches, so the learning rate does not grow with the number of ranks.
    plain = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    # (2) Instead of hvd.DistributedOptimizer; the model tells which buffers to average.
    optimizer = hvd.LocalSGD(plain, model, args.sync_every, start=args.start, inner=args.inner)
    # (3) A schedule counts the steps of one rank.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(args.steps):
        batch = mine[torch.randint(len(mine), (args.batch_size,), generator=order)]
        optimizer.zero_grad()
        functional.cross_entropy(model(images[batch]), digits[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()

    # (4) Before evaluating or saving, all ranks meet once more: until then each has a model of its own.
    optimizer.finish()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[first_test:]).argmax(1) == digits[first_test:]).float().mean().item()
    fingerprints = hvd.allgather_object(fingerprint(model), name="fingerprint")
    if len(set(fingerprints)) != 1:
        raise SystemExit(f"ranks hold different parameters: {fingerprints}")
    if hvd.rank() == 0:
        meetings = optimizer.outer_state_dict()["steps"]
        print(
            f"test accuracy: {accuracy:.2%}, after {args.steps} steps and {meetings} outer steps of {hvd.size()} ranks"
        )
        print(f"all ranks hold identical parameters ({fingerprints[0][:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
