"""Lightning 2's Trainer with strategy="ddp" on the CPU: fit with metrics of all ranks, a checkpoint, test.

Without a launcher, Lightning starts the second rank itself.
"""

from __future__ import annotations

import os
import sys

import lightning as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import hvdgloo.torch.distributed as hvd
from hvdgloo._job import process
from hvdgloo.torch.lightning import LogCallback


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("rate", 0.1 - 0.01 * self.current_epoch)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> object:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(here: int, size: int, **limits: int) -> pl.Trainer:
    """Return a trainer for ``size`` ranks, of which ``here`` are on this host."""
    strategy = DDPStrategy(process_group_backend=sys.argv[1]) if sys.argv[1:] else "ddp"
    return pl.Trainer(
        accelerator="cpu", strategy=strategy, devices=here, num_nodes=size // here, logger=False,
        enable_progress_bar=False, default_root_dir="lightning", callbacks=[LogCallback()], **limits,
    )  # fmt: skip


def train_by_steps(trainer: pl.Trainer, model: Model, loader: DataLoader) -> None:
    """Train a number of steps: the progress then counts these, and not epochs."""
    counters = process.group_counters()
    counters.progress = None
    trainer.fit(model, loader)
    assert (counters.progress.step, counters.progress.steps) == (10, 11), counters.progress
    assert (counters.progress.epoch, counters.progress.epochs) == (None, None), counters.progress


def main() -> None:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    size = int(os.environ.get("WORLD_SIZE", 2))
    trainer = trainer_of(here, size, max_epochs=3)
    torch.manual_seed(7)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16)
    torch.manual_seed(trainer.global_rank)  # models differ until they are broadcast
    model = Model()
    trainer.fit(model, loader, loader)
    assert trainer.world_size == size
    logged = dict(hvd.metrics().logged)
    assert logged.keys() == {"loss_step", "loss_epoch", "rate", "val_loss"}, logged
    expected = {name: trainer.callback_metrics[name].item() for name in ("loss_epoch", "rate", "val_loss")}
    assert expected.items() <= logged.items(), (logged, expected)
    progress = process.group_counters().progress
    assert (progress.step, progress.epoch, progress.epochs) == (None, 2, 3), progress
    assert progress.steps == 256 // (16 * size), progress
    assert process.group_counters().saves["checkpoint"][0] == 3  # ModelCheckpoint's, one an epoch
    assert trainer.global_step == 3 * 256 // (16 * size)
    weights = trainer.strategy.all_gather(model.layer.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights), weights
    (tested,) = trainer.test(model, loader, verbose=False)
    assert tested["test_loss"] < 0.05, tested
    assert hvd.metrics().logged["test_loss"] == tested["test_loss"]
    train_by_steps(trainer_of(here, size, max_steps=11, accumulate_grad_batches=2), model, loader)
    if trainer.is_global_zero:
        print(f"result {tested['test_loss']}", flush=True)
    trainer.strategy.barrier()  # without a launcher both ranks write to one stdout
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
