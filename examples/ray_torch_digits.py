"""Train a small network on handwritten digits on a Ray cluster, with workers that stay between calls.

    python examples/ray_torch_digits.py                          # a cluster of its own, on this machine
    python examples/ray_torch_digits.py --address auto           # a running cluster

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships. Each worker keeps a ``Training``: the driver has
them all train an epoch, looks at the accuracy, and continues until it is good enough.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn import functional

import hvdgloo.torch as hvd
from hvdgloo.ray import RayExecutor


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on scikit-learn's handwritten digits, on a Ray cluster.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--address", help="address of the cluster; without it, one is started for this program")
    parser.add_argument("--workers", type=int, default=2, help="number of workers")
    parser.add_argument("--use-gpu", action="store_true", help="reserve a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=30, help="the most epochs")
    parser.add_argument("--accuracy", type=float, default=0.96, help="accuracy on test images that ends the training")
    return parser.parse_args()


class Training:
    """Each worker's state between calls: its part of the data, the network and the optimizer."""

    def __init__(self, lr: float, batch_size: int = 32) -> None:
        hvd.init()
        torch.manual_seed(42)
        self.device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        self.batch_size = batch_size
        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy((pixels / 16).astype(np.float32)).to(self.device)
        digits = torch.from_numpy(labels.astype(np.int64)).to(self.device)
        is_test = torch.arange(len(images)) % 5 == 0
        own = slice(hvd.rank(), None, hvd.size())
        self.train_set = images[~is_test][own], digits[~is_test][own]
        self.test_set = images[is_test][own], digits[is_test][own]
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(self.device)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=lr * hvd.size(), momentum=0.9),
            named_parameters=self.model.named_parameters(),
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def train_epoch(self) -> float:
        """One pass over the images; returns the accuracy on all ranks' test images, between 0 and 1."""
        images, digits = self.train_set
        # Ranks' parts may differ by one image; all take as many steps as the smallest.
        steps = int(hvd.allreduce(torch.tensor(len(images) // self.batch_size), name="steps", op=hvd.Min))
        for batch in torch.randperm(len(images))[: steps * self.batch_size].view(steps, self.batch_size):
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(images[batch]), digits[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return self.accuracy()

    @torch.no_grad()
    def accuracy(self) -> float:
        images, digits = self.test_set
        counts = torch.tensor([(self.model(images).argmax(1) == digits).sum().item(), len(digits)], dtype=torch.float64)
        right, total = hvd.allreduce(counts, name="accuracy", op=hvd.Sum).tolist()
        return float(right / total)

    def parameters(self) -> dict[str, Any]:
        return {name: tensor.cpu().numpy() for name, tensor in self.model.state_dict().items()}


def main() -> None:
    args = parse_arguments()
    if args.address is None:
        ray.init(num_cpus=args.workers, include_dashboard=False)
    else:
        ray.init(address=args.address)
    with RayExecutor(RayExecutor.create_settings(), num_workers=args.workers, use_gpu=args.use_gpu) as executor:
        executor.start(executable_cls=Training, executable_kwargs={"lr": 0.02})
        for epoch in range(args.epochs):
            accuracy = executor.execute(lambda training: training.train_epoch())[0]
            print(f"epoch {epoch + 1}: {accuracy:.2%} of the test images", flush=True)
            if accuracy >= args.accuracy:
                break
        copies = executor.execute(lambda training: training.parameters())
    same = all(np.array_equal(copies[0][name], copy[name]) for copy in copies for name in copies[0])
    print(f"test accuracy averaged over {args.workers} ranks: {accuracy:.2%}")
    if not same:
        raise SystemExit("ranks hold different parameters")
    print("all ranks hold identical parameters")
    ray.shutdown()


if __name__ == "__main__":
    main()
