"""Write each rank's counters of a training job to TensorBoard, next to the loss.

    pip install tensorboard
    hvdgloo-run -np 2 examples/torch_tensorboard.py
    tensorboard --logdir runs

Every few steps a rank asks ``hvd.metrics()`` for its totals, and writes the difference since the last time: how long a
step took, and how much of it was waiting for other ranks, communicating and computing; bytes per second by data plane;
processor and memory. Each rank has a run of its own, so that TensorBoard shows their curves on top of each other: the
rank that waits least is the one for which the others wait.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import hvdgloo.torch as hvd


class MetricsWriter:
    """Writer of a rank's metrics to TensorBoard.

    Args:
        folder: directory of all runs; this rank's is ``folder/rank<n>``.
        every: number of steps between two points of a curve.
    """

    def __init__(self, folder: Path, every: int = 10) -> None:
        self._writer = SummaryWriter(str(folder / f"rank{hvd.rank()}"))
        self._every = every
        self._before, self._at = hvd.metrics(), time.monotonic()

    def step(self, number: int, loss: float) -> None:
        """Write metrics every few steps; to be called after each ``optimizer.step()``."""
        if (number + 1) % self._every:
            return
        now, at = hvd.metrics(), time.monotonic()
        since, seconds = now - self._before, at - self._at
        self._before, self._at = now, at
        write = self._writer.add_scalar
        write("loss", loss, number)
        if since.steps:
            computing = since.step_seconds - since.step_waiting - since.step_communicating
            write("step/seconds", since.step_seconds / since.steps, number)
            write("step/computing", computing / since.steps, number)
            write("step/waiting for other ranks", since.step_waiting / since.steps, number)
            write("step/communicating", since.step_communicating / since.steps, number)
            write("step/before the first gradient", since.step_before_first / since.steps, number)
        for name, plane in since.planes.items():
            write(f"bytes per second/{name}", plane.bytes / seconds, number)
        write("process/cores in use", since.cpu_seconds / seconds, number)
        write("process/memory", now.memory, number)

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on made-up data, and write metrics to TensorBoard.")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument("--log-dir", type=Path, default=Path("runs"), help="directory of the runs (default runs)")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    torch.manual_seed(1 + hvd.rank())  # each rank has its own data
    metrics = MetricsWriter(options.log_dir)
    for number in range(options.steps):
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        metrics.step(number, loss.item())
    metrics.close()
    if hvd.rank() == 0:
        print(f"metrics of {hvd.size()} rank{'s' if hvd.size() > 1 else ''} are in {options.log_dir}")


if __name__ == "__main__":
    main()
