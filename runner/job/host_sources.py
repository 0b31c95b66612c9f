"""The hosts of a job, from options, a file, a Slurm allocation, or none of these.

Inside a Slurm allocation, its nodes are the hosts if none are given, and they are reached by srun: processes started by
ssh would escape the job's limits and survive its end. Given hosts take precedence; those that are nodes of the
allocation are still reached by srun. ``--no-slurm`` turns all of this off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hvdgloo._platform.machine import visible_gpus
from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.hostlist import parse_hosts, read_hostfile
from hvdgloo.runner.job.slurm import Allocation, find_allocation
from hvdgloo.runner.job.spec import HostEntry, Reach


@dataclass(frozen=True)
class Inventory:
    """The hosts and the number of workers of a job.

    Attributes:
        hosts: in order.
        np: number of workers; None for all slots.
        notices: lines for the user about the choice.
        allocation: the Slurm allocation around the launcher; None if there is none, or it is not to be used.
    """

    hosts: tuple[HostEntry, ...]
    np: int | None
    notices: tuple[str, ...] = ()
    allocation: Allocation | None = None

    def completed(self, reach: Reach) -> Reach:
        """Return ``reach`` with the hosts that srun reaches."""
        if self.allocation is None:
            return reach
        nodes = frozenset(host.name for host in self.allocation.hosts)
        return replace(reach, slurm_job=self.allocation.job_id, slurm_nodes=nodes)


def take_inventory(
    environ: Mapping[str, str],
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    np: int | None = None,
    slurm: bool = True,
    discovered: bool = False,
) -> Inventory:
    """Return the hosts and the number of workers, with defaults for what was not given.

    Args:
        environ: the launcher's environment.
        slurm: look for an allocation.
        discovered: a script or an object will list the hosts; none are known yet.

    Raises:
        ConfigError: hosts, file or Slurm's variables cannot be used.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigError("give either hosts or a hostfile, not both")
    if discovered and (hosts is not None or hostfile is not None):
        raise ConfigError(
            f"give either {'hosts' if hosts is not None else 'a hostfile'} or what discovers the hosts, not both"
        )
    if discovered:
        return Inventory((), np, allocation=_allocation_or_none(environ) if slurm else None)
    if hosts is not None or hostfile is not None:
        found = parse_hosts(hosts) if hosts is not None else read_hostfile(hostfile or "")
        return _given(found, np, _allocation_or_none(environ) if slurm else None)
    allocation = find_allocation(environ) if slurm else None
    return _allocated(allocation, np) if allocation is not None else _this_machine(environ, np)


def _allocation_or_none(environ: Mapping[str, str]) -> Allocation | None:
    try:
        return find_allocation(environ)
    except ConfigError:
        return None  # its text tells users to name hosts, which they have done


def _given(hosts: tuple[HostEntry, ...], np: int | None, allocation: Allocation | None) -> Inventory:
    if allocation is None:
        return Inventory(hosts, np)
    nodes = {host.name for host in allocation.hosts}
    if not any(host.name in nodes for host in hosts):
        return Inventory(hosts, np)
    outside = [host.name for host in hosts if host.name not in nodes and host.name != "localhost"]
    notices = (
        (f"{', '.join(outside)} is not part of Slurm job {allocation.job_id}: srun cannot reach it",) if outside else ()
    )
    return Inventory(hosts, np, notices, allocation)


def _allocated(allocation: Allocation, np: int | None) -> Inventory:
    if allocation.launchers > 1:
        raise ConfigError(
            f"hvdgloo-run was started {allocation.launchers} times, by srun; start it once, in the batch script, "
            "and it starts the workers; or have srun start the workers, with hvdgloo-rendezvous for a launcher"
        )
    shown = ", ".join(map(str, allocation.hosts[:8]))
    shown += f" and {len(allocation.hosts) - 8} more" if len(allocation.hosts) > 8 else ""
    slots = f", slots by {allocation.source}" if allocation.source else ""
    return Inventory(allocation.hosts, np, (f"hosts of Slurm job {allocation.job_id}: {shown}{slots}",), allocation)


def _this_machine(environ: Mapping[str, str], np: int | None) -> Inventory:
    if np is not None:
        return Inventory((HostEntry("localhost", np),), np)
    gpus = visible_gpus(environ)
    np = max(1, gpus)
    found = f"one for each of {gpus} GPUs" if gpus else "there is no GPU"
    notice = f"starting {np} process{'es' if np > 1 else ''} ({found}); -np chooses another number"
    return Inventory((HostEntry("localhost", np),), np, (notice,))
