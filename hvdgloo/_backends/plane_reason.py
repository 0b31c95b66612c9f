"""The reason for a process set's data plane, for people."""

from __future__ import annotations

from collections.abc import Sequence

from hvdgloo.topology import Topology

_HOSTS_NAMED = 3


def why(name: str, topology: Topology, members: Sequence[int], device: str = "cpu") -> str:
    """Return the reason in a few words.

    Args:
        name: the backend's.
        topology: of the job.
        members: the set's ranks.
        device: whose tensors travel on it: "cpu" or "cuda".
    """
    hosts = [*dict.fromkeys(topology.workers[rank].host for rank in members)]
    if len(members) == 1:
        return "a single rank"
    if name == "nccl":
        return "every rank has a GPU of its own"
    if device != "cpu":
        return f"CUDA tensors go through host memory; {_where(topology, hosts)}"
    if name == "shm":
        return f"all ranks are on host {topology.hosts[hosts[0]].name}"
    if name == "hierarchical":
        return f"{_where(topology, hosts)}, with several ranks each"
    if len(hosts) == 1:
        return f"memory is not shared on host {topology.hosts[hosts[0]].name}"
    return _where(topology, hosts)


def _where(topology: Topology, hosts: Sequence[int]) -> str:
    names = [topology.hosts[host].name for host in hosts]
    if len(names) == 1:
        return f"host {names[0]}"
    if len(names) > _HOSTS_NAMED + 1:
        names[_HOSTS_NAMED:] = [f"{len(names) - _HOSTS_NAMED} more"]
    return f"hosts {', '.join(names[:-1])} and {names[-1]}"
