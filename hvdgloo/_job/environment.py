"""A process's environment in an elastic job, which follows its place as it changes from epoch to epoch."""

from __future__ import annotations

import os

from hvdgloo._job.context import Context


def publish(context: Context, master: tuple[str, int] | None) -> None:
    """Set the variables of this process's place as a launcher sets them at the start.

    Args:
        master: where the program's own torch.distributed may meet in this epoch; None to leave what is said there.
    """
    places = {
        "RANK": context.rank,
        "SIZE": context.size,
        "LOCAL_RANK": context.local_rank,
        "LOCAL_SIZE": context.local_size,
        "CROSS_RANK": context.cross_rank,
        "CROSS_SIZE": context.cross_size,
    }
    environ = os.environ
    for name, value in places.items():
        for family in ("HVDGLOO", "HOROVOD"):
            environ[f"{family}_{name}"] = str(value)
    environ["RANK"], environ["WORLD_SIZE"] = str(context.rank), str(context.size)
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(context.local_rank), str(context.local_size)
    if master is not None:
        environ["MASTER_ADDR"], environ["MASTER_PORT"] = master[0], str(master[1])
