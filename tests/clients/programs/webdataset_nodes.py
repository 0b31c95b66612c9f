"""webdataset's split_by_node, which asks torch.distributed, and its split_by_worker in the workers of a DataLoader."""

import torch.distributed as dist
import webdataset as wds

SHARDS, SAMPLES = 8, 5


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2
    if rank == 0:
        for shard in range(SHARDS):
            with wds.TarWriter(f"shard-{shard}.tar") as out:
                for sample in range(SAMPLES):
                    number = shard * SAMPLES + sample
                    out.write({"__key__": f"{number:03}", "cls": number})
    dist.barrier()
    urls = f"shard-{{0..{SHARDS - 1}}}.tar"
    data = wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=False).decode().to_tuple("cls")
    mine = sorted(int(number) for (number,) in wds.WebLoader(data, batch_size=None, num_workers=2))
    expected = [shard * SAMPLES + sample for shard in range(rank, SHARDS, 2) for sample in range(SAMPLES)]
    assert mine == expected, mine
    everywhere = [None, None]
    dist.all_gather_object(everywhere, mine)
    assert sorted(everywhere[0] + everywhere[1]) == list(range(SHARDS * SAMPLES))
    dist.destroy_process_group()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
