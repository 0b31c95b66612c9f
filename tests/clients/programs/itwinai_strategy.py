"""itwinai's HorovodStrategy: init, distributed, a data loader, gathering and broadcasting, clean_up."""

import torch
from itwinai.torch.distributed import HorovodStrategy
from torch.utils.data import TensorDataset


def main() -> None:
    import horovod.torch as hvd

    strategy = HorovodStrategy()
    strategy.init()
    rank = strategy.global_rank()
    assert strategy.global_world_size() == strategy.local_world_size() == 2
    torch.manual_seed(7)
    x = torch.randn(256, 8)
    loader = strategy.create_dataloader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    torch.manual_seed(rank)  # models differ until they are broadcast
    plain = torch.nn.Linear(8, 1)
    made = torch.optim.SGD(plain.parameters(), lr=0.05)
    model, optimizer, _ = strategy.distributed(plain, made, op=hvd.Average)
    assert optimizer.param_groups[0]["lr"] == 0.1, "itwinai multiplies it by the number of workers"
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        assert len(loader) == 8
        for batch, wanted in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            loss.backward()
            optimizer.step()
    assert loss < 0.05, loss
    weights = strategy.gather(model.weight.detach(), dst_rank=0)
    assert (weights is None) == (rank == 1)
    assert weights is None or torch.equal(*weights), weights
    assert strategy.allgather_obj({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert strategy.gather_obj(rank, dst_rank=1) == (None if rank == 0 else [0, 1])
    assert strategy.broadcast_obj(f"from {rank}", src_rank=1) == "from 1"
    strategy.barrier()
    strategy.clean_up()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
