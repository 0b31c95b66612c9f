"""pytorch-lightning 1.9's horovod strategy: fit with logged metrics, a checkpoint, and test."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


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
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


def main() -> None:
    import horovod.torch as hvd

    from hvdgloo.torch.lightning import LogCallback

    torch.manual_seed(7)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16)
    trainer = pl.Trainer(
        strategy="horovod", accelerator="cpu", max_epochs=3, enable_progress_bar=False, logger=False,
        callbacks=[LogCallback()],
    )  # fmt: skip
    torch.manual_seed(hvd.rank())  # models differ until they are broadcast
    model = Model()
    trainer.fit(model, loader)
    weights = hvd.allgather(model.layer.weight.detach())
    assert hvd.size() == trainer.world_size == 2
    assert torch.equal(weights[0], weights[1]), weights
    (tested,) = trainer.test(model, loader, verbose=False)
    assert tested["test_loss"] < 0.05, tested
    assert hvd.metrics().logged.keys() == {"loss_step", "loss_epoch", "test_loss"}, hvd.metrics().logged
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
