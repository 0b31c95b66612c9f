"""Train with torch's fully_shard (FSDP2) over hvdgloo: each process keeps a part of the parameters, on the CPU.

    torchrun --nproc-per-node 2 examples/fsdp_digits.py
    hvdgloo-run -np 2 examples/fsdp_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. Needs torch 2.6.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on scikit-learn's handwritten digits with FSDP.")
    parser.add_argument("--epochs", type=int, default=10, help="how often each image is seen (default: %(default)s)")
    parser.add_argument("--backend", default="hvdgloo", help="of torch.distributed (default: %(default)s)")
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    test = torch.arange(len(images)) % 5 == 0  # every fifth image

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    inputs, targets = images[~test], digits[~test]
    for epoch in range(arguments.epochs):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        order = order[: len(order) // (32 * size) * (32 * size)]
        for batch in order.view(-1, size, 32)[:, rank]:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    with torch.no_grad():
        correct = (model(images[test]).argmax(1) == digits[test]).float().mean()
    dist.all_reduce(correct, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"{size} ranks: {100 * correct.item():.1f} % of the test images are read correctly")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
