"""torchmetrics' synchronisation over torch.distributed: sums, lists of unequal lengths, and reset."""

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2
    torch.manual_seed(7)
    scores, labels = torch.randn(100, 4).softmax(dim=1), torch.randint(4, (100,))
    mine = slice(0, 30) if rank == 0 else slice(30, 100)
    metric = MulticlassAccuracy(num_classes=4, average="micro")
    for _ in range(2):
        metric.update(scores[mine], labels[mine])
        assert torch.isclose(metric.compute(), (scores.argmax(dim=1) == labels).float().mean())
        metric.reset()
    area, whole = BinaryAUROC(), BinaryAUROC(sync_on_compute=False)
    area.update(scores[mine, 0], labels[mine] == 0)
    whole.update(scores[:, 0], labels == 0)
    assert torch.isclose(area.compute(), whole.compute())
    mean = MeanMetric()
    mean.update(torch.tensor(float(rank)), weight=rank + 1)
    assert torch.isclose(mean.compute(), torch.tensor(2 / 3))
    dist.destroy_process_group()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
