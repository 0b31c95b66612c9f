"""DeepSpeed's init_distributed and its communication, on the CPU with Gloo."""

import deepspeed
import deepspeed.comm
import torch


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    rank = deepspeed.comm.get_rank()
    assert deepspeed.comm.get_world_size() == 2
    assert deepspeed.comm.get_local_rank() == rank
    total = torch.tensor([rank + 1.0])
    deepspeed.comm.all_reduce(total)
    assert total == 3.0
    sent = torch.tensor([float(rank)])
    deepspeed.comm.broadcast(sent, src=1)
    assert sent == 1.0
    parts = [torch.empty(1) for _ in range(2)]
    deepspeed.comm.all_gather(parts, torch.tensor([float(rank)]))
    assert [float(part) for part in parts] == [0.0, 1.0]
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
