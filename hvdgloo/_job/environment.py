"""A process's environment in an elastic job, which follows its place as it changes from epoch to epoch."""

from __future__ import annotations

import os

from hvdgloo._job.context import Context
from hvdgloo.config import place_variables


def publish(context: Context, master: tuple[str, int] | None) -> None:
    """Set the variables of this process's place as a launcher sets them at the start.

    Args:
        master: where the program's own torch.distributed may meet in this epoch; None to leave what is said there.
    """
    topology, alone = context.topology, context.plan is not None
    os.environ.update(
        place_variables(
            rank=context.rank,
            size=context.size,
            local_rank=context.local_rank,
            local_size=context.local_size,
            cross_rank=context.cross_rank,
            cross_size=context.cross_size,
            # The plan of a newcomer does not say it, and once it is in an epoch this is set again.
            node=context.cross_rank if alone else topology.workers[context.rank].host,
            nodes=context.cross_size if alone else len(topology.hosts),
        )
    )
    if not alone:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(topology.epoch)
    if master is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master[0], str(master[1])
