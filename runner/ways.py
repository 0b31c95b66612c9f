"""Which way leads to which host: this machine's agent is a child process, all others are reached in one chosen way."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence

from hvdgloo.errors import LaunchError
from hvdgloo.runner.reasons import Diagnosis, Ending
from hvdgloo.runner.spawners import AgentStream, LocalSpawner, Spawner, is_this_host
from hvdgloo.runner.spec import Host, Reach
from hvdgloo.runner.ssh import SshSpawner


class Ways:
    """A Spawner that leaves each host to another one."""

    def __init__(self, spawners: Mapping[Host, Spawner]) -> None:
        self._spawners = spawners

    def start(self, host: Host) -> AgentStream:
        return self._spawners[host].start(host)

    def diagnose(self, host: Host, ending: Ending) -> Diagnosis:
        return self._spawners[host].diagnose(host, ending)

    def sweep(self, host: Host, job_id: str) -> None:
        self._spawners[host].sweep(host, job_id)

    def address(self, host: Host) -> str:
        return self._spawners[host].address(host)


def choose_spawner(hosts: Sequence[Host], reach: Reach) -> Spawner:
    """The way to start agents on these hosts.

    Raises:
        LaunchError: this machine comes twice.
    """
    here = [host for host in hosts if _is_here(host)]
    if len(here) > 1:
        names = ", ".join(host.name for host in here)
        raise LaunchError(
            f"{names} are all this machine; give it once, with all its slots "
            f"(-H localhost:{sum(host.slots for host in here)})"
        )
    if len(here) == len(hosts):
        return LocalSpawner()
    local, other = LocalSpawner(), SshSpawner(reach)
    return Ways({host: local if host in here else other for host in hosts})


def _is_here(host: Host) -> bool:
    return host.user in ("", _own_user()) and is_this_host(host.name)


def _own_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""  # a container's user that has no name
