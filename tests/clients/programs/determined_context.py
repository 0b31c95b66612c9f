"""determined's DistributedContext.from_horovod: ranks from Horovod, messages of its own between them."""

from determined.core import DistributedContext


def main() -> None:
    import horovod.torch as hvd

    hvd.init()
    context = DistributedContext.from_horovod(hvd)
    assert (context.rank, context.size, context.cross_rank, context.cross_size) == (hvd.rank(), 2, 0, 1)
    assert (context.local_rank, context.local_size) == (hvd.local_rank(), 2)
    assert context.allgather(context.rank) == [0, 1]
    assert context.gather(context.rank) == ([0, 1] if context.rank == 0 else None)
    assert context.broadcast(f"from {context.rank}") == "from 0"
    assert context.allgather_local(context.local_rank) == [0, 1]
    assert context.broadcast_local(context.local_rank) == 0
    context.close()
    hvd.shutdown()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
