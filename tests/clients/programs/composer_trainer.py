"""Composer's Trainer on the CPU under hvdgloo-run, which gives its workers the environment that composer gives."""

import torch

# PyPI's torchvision is built for CUDA and loads no operators beside a torch for the CPU. Composer imports it, no more.
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, operator):
        OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import composer  # noqa: E402
from composer.models import ComposerModel  # noqa: E402
from composer.utils import dist  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


def main() -> None:
    dist.initialize_dist("cpu")
    assert dist.get_world_size() == 2
    torch.manual_seed(7)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=16, sampler=dist.get_sampler(data, shuffle=True))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = composer.Trainer(
        model=model, train_dataloader=loader, max_duration="4ep", optimizers=optimizer, device="cpu", progress_bar=False
    )
    trainer.fit()
    weights = dist.all_gather_object(model.layer.weight.detach())
    assert torch.equal(*weights), weights
    assert torch.allclose(weights[0], torch.ones(1, 8), atol=0.1), weights
    trainer.close()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
