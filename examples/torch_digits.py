"""Train a small convolutional network on handwritten digits, on as many processes as you like.

    hvdgloo-run -np 2 examples/torch_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. The lines that make
this program distributed are marked (1) to (8); without them it is an ordinary PyTorch program, and without hvdgloo-run
it is a job of one process.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdgloo.torch as hvd

try:
    from tqdm import tqdm
except ImportError:  # then print one line per epoch instead
    tqdm = None


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
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=None,
        help="save here after every epoch, and resume from here if possible",
    )
    parser.add_argument("--no-progress", action="store_true", help="print a line per epoch instead of a progress bar")
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


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images with digits, the same in every process: every fifth image is for the test."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy((pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8))
    digits = torch.from_numpy(labels.astype(np.int64))
    is_test = torch.arange(len(images)) % 5 == 0
    return TensorDataset(images[~is_test], digits[~is_test]), TensorDataset(images[is_test], digits[is_test])


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> int:
    """Train on this process's images once, and return their number."""
    model.train()
    seen = 0
    for images, digits in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), digits)
        # Every gradient is on its way to the other ranks as soon as it is computed ...
        loss.backward()  # type: ignore[no-untyped-call]
        # ... and step() waits until all of them have arrived.
        optimizer.step()
        seen += len(images)
    return seen


@torch.no_grad()
def test_accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the share of all ranks' test images that are recognised."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    for images, digits in loader:
        counts += torch.tensor([(model(images).argmax(1) == digits).sum().item(), len(digits)])
    # (7) Average over the ranks. Counts are averaged, not percentages: shards need not be of one size.
    correct, total = hvd.allreduce(counts, name="accuracy", op=hvd.Average).tolist()
    return float(correct / total)


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all parameters, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    args = parse_arguments()

    # (1) Find the other processes and get a rank.
    hvd.init()
    is_first = hvd.rank() == 0
    torch.manual_seed(args.seed)

    # (2) Each rank trains and tests on its own part of the data.
    train_set, test_set = load_data()
    train_sampler: DistributedSampler[Any] = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(TensorDataset(*test_set[hvd.rank() :: hvd.size()]), batch_size=256)

    # (3) All ranks together take larger batches, so the learning rate grows with them.
    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum
    )

    # (4) Gradients are averaged over all ranks.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )

    # (5) Only rank 0 reads a checkpoint; the others get everything from rank 0, so that all start alike.
    first_epoch = 0
    checkpoint = None if args.checkpoint_dir is None else args.checkpoint_dir / "checkpoint.pt"
    if is_first and checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        # The saved rate is for the number of ranks at that time.
        hvd.scale_learning_rate(optimizer, hvd.size() / saved["ranks"])
        first_epoch = saved["epoch"]
        print(f"resuming after epoch {first_epoch} from {checkpoint}")
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0, name="first_epoch")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    seen, started = 0, time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        # (6) One progress bar and one checkpoint, not one per rank.
        show_bar = is_first and tqdm is not None and not args.no_progress
        batches = tqdm(train_loader, f"epoch {epoch + 1}/{args.epochs}", ncols=80) if show_bar else train_loader
        seen += train_epoch(model, optimizer, batches)
        if is_first and not show_bar:
            print(f"epoch {epoch + 1}/{args.epochs}: {time.perf_counter() - started:.1f} s", flush=True)
        if is_first and checkpoint is not None:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            unfinished = checkpoint.with_suffix(".tmp")
            # The optimizer's state is a plain torch.optim.SGD's, which can load it without hvdgloo.
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1, "ranks": hvd.size()}, unfinished)
            unfinished.replace(checkpoint)  # atomic: a job that dies while saving leaves the previous one
    seconds = time.perf_counter() - started

    accuracy = test_accuracy(model, test_loader)
    images = int(hvd.allreduce(torch.tensor(seen), name="images", op=hvd.Sum))
    # (8) Identical start and identical averaged gradients: the ranks must have identical parameters.
    fingerprints = hvd.allgather_object(fingerprint(model), name="fingerprint")
    if len(set(fingerprints)) != 1:
        raise SystemExit(f"ranks hold different parameters: {fingerprints}")
    if is_first:
        ranks = "1 rank" if hvd.size() == 1 else f"{hvd.size()} ranks"
        print(f"test accuracy averaged over {ranks}: {accuracy:.2%}")
        print(f"trained on {images / seconds:.0f} images per second")
        print(f"all ranks hold identical parameters ({fingerprints[0][:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
