"""Train with torch's DistributedDataParallel over hvdgloo's shared memory: no line of Horovod's API.

    torchrun --nproc-per-node 2 examples/ddp_digits.py
    hvdgloo-run -np 2 examples/ddp_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on scikit-learn's handwritten digits with DDP.")
    parser.add_argument("--epochs", type=int, default=10, help="how often each image is seen (default: %(default)s)")
    parser.add_argument("--backend", default="hvdgloo", help="of torch.distributed (default: %(default)s)")
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    torch.manual_seed(1)
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    test = torch.arange(len(images)) % 5 == 0  # every fifth image
    train = TensorDataset(images[~test], digits[~test])

    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train)
    batches = DataLoader(train, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    with torch.no_grad():
        correct = (model(images[test]).argmax(1) == digits[test]).float().mean()
    dist.all_reduce(correct, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: {100 * correct.item():.1f} % of the test images are read correctly")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
