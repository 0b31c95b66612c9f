"""accelerate's Accelerator under hvdgloo-run, which gives its workers the environment that torchrun gives."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    if sys.argv[1:]:  # on the CPU, InitProcessGroupKwargs(backend=...) accepts only "gloo"
        dist.init_process_group(sys.argv[1])
    accelerator = Accelerator()
    assert accelerator.num_processes == 2
    assert accelerator.device.type == "cpu"
    torch.manual_seed(7)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    torch.manual_seed(accelerator.process_index)  # models differ until they are broadcast
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) == 8
    for _ in range(4):
        for batch, wanted in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            accelerator.backward(loss)
            optimizer.step()
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    assert mean < 0.05
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    assert torch.equal(weights[0], weights[1]), weights
    seen = sum(len(accelerator.gather_for_metrics(batch[0])) for batch in loader)
    assert seen == 256, seen
    if accelerator.is_main_process:
        print("result", mean.item())
    accelerator.end_training()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
