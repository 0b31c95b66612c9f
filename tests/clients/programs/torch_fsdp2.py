"""torch's FSDP2 (fully_shard) on the CPU, with a distributed checkpoint, beside hvdgloo's own collectives."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hvdgloo.torch as hvd


def make() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group(sys.argv[1] if sys.argv[1:] else "gloo")
    hvd.init()
    assert hvd.size() == dist.get_world_size() == 2
    assert hvd.rank() == dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))

    def sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = make()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    mine = x[hvd.rank() * 16 :][:16]
    model, optimizer = sharded()
    train(model, optimizer, mine, 5)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")
    train(model, optimizer, mine, 5)

    resumed, its = sharded()
    weights, state = get_state_dict(resumed, its)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id="checkpoint")
    set_state_dict(resumed, its, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(resumed, its, mine, 5)

    alone = make()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), x, 10)
    for one, other, plain in zip(model.parameters(), resumed.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
        assert torch.allclose(one.full_tensor(), plain, atol=1e-5)
    results = [parameter.full_tensor().sum().item() for parameter in model.parameters()]
    if hvd.rank() == 0:
        print("result", *results)
    # The shards themselves are ordinary tensors, which hvdgloo gathers.
    shard = next(model.parameters()).to_local().detach()
    assert torch.equal(hvd.allgather(shard), next(model.parameters()).full_tensor().detach())
    dist.destroy_process_group()
    hvd.shutdown()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
