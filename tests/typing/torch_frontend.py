"""A training program as users write it; mypy must accept it, and see the types that it says."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import hvdgloo.torch as hvd
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer


def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    hvd.init()
    assert_type(hvd.rank(), int)
    assert_type(hvd.size(), int)
    assert_type(hvd.is_homogeneous(), bool)
    plain = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
        backward_passes_per_step=1,
        op=hvd.Average,
        groups=[list(model.parameters())],
    )
    assert_type(optimizer, DistributedTorchOptimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)

    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    torch.autograd.backward(loss)
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
    return hvd.allreduce(loss.detach(), name="loss").item()


def collectives(tensor: torch.Tensor) -> None:
    assert_type(hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.none), torch.Tensor)
    assert_type(hvd.allreduce_(tensor, prescale_factor=0.5, process_set=hvd.global_process_set), torch.Tensor)
    assert_type(hvd.grouped_allreduce([tensor, tensor], op=hvd.Max), list[torch.Tensor])
    assert_type(hvd.allgather(tensor), torch.Tensor)
    assert_type(hvd.broadcast(tensor, root_rank=0), torch.Tensor)
    handle = hvd.allreduce_async_(tensor)
    assert_type(handle, int)
    while not hvd.poll(handle):
        pass
    hvd.synchronize(handle)
    hvd.barrier()
    assert_type(hvd.broadcast_object({"epoch": 1}, root_rank=0), dict[str, int])
    assert_type(hvd.allgather_object(3.5), list[float])
    try:
        hvd.allreduce(tensor, op=hvd.Product)
    except hvd.HorovodInternalError as error:
        assert_type(error, hvd.HorovodInternalError)
