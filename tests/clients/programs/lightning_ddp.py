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


class Shown(pl.Callback):
    """Shows metrics and progress, as in docs/recipes.md."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Model, outputs: object, batch: object, index: int
    ) -> None:
        values = trainer.logged_metrics if index % 10 == 0 else None
        steps = int(trainer.num_training_batches)
        hvd.log(values, step=index, steps=steps, epoch=trainer.current_epoch, epochs=trainer.max_epochs)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Model) -> None:
        hvd.log(trainer.callback_metrics, epoch=trainer.current_epoch)


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

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> object:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    size = int(os.environ.get("WORLD_SIZE", 2))
    strategy = DDPStrategy(process_group_backend=sys.argv[1]) if sys.argv[1:] else "ddp"
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, devices=here, num_nodes=size // here, max_epochs=3, logger=False,
        enable_progress_bar=False, default_root_dir="lightning", callbacks=[Shown()],
    )  # fmt: skip
    torch.manual_seed(7)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16)
    torch.manual_seed(trainer.global_rank)  # models differ until they are broadcast
    model = Model()
    trainer.fit(model, loader)
    assert trainer.world_size == size
    assert hvd.metrics().logged.keys() == {"loss", "loss_step", "loss_epoch"}
    assert trainer.global_step == 3 * 256 // (16 * size)
    weights = trainer.strategy.all_gather(model.layer.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights), weights
    (tested,) = trainer.test(model, loader, verbose=False)
    assert tested["test_loss"] < 0.05, tested
    if trainer.is_global_zero:
        print(f"result {tested['test_loss']}", flush=True)
    trainer.strategy.barrier()  # without a launcher both ranks write to one stdout
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
