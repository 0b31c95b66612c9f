"""The choice of a transport for each host: this machine's agent is a child process, all others are reached in one way.

That way is the user's template if there is one, srun for nodes of the Slurm allocation, else ssh.
"""

from __future__ import annotations

import getpass
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.transport.base import AgentStream, Spawner
from hvdgloo.runner.transport.failures import Diagnosis, Ending
from hvdgloo.runner.transport.local import LocalSpawner
from hvdgloo.runner.transport.srun import SrunSpawner
from hvdgloo.runner.transport.ssh import SshSpawner
from hvdgloo.runner.transport.template import TemplateSpawner


class PerHostSpawner:
    """A Spawner that delegates each host to one of several others."""

    def __init__(self, spawners: Mapping[HostEntry, Spawner]) -> None:
        self._spawners = {host.name: spawner for host, spawner in spawners.items()}

    def start(self, host: HostEntry) -> AgentStream:
        return self._spawners[host.name].start(host)

    def is_local(self, host: HostEntry) -> bool:
        return self._spawners[host.name].is_local(host)

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        return self._spawners[host.name].diagnose(host, ending)


def choose_spawner(hosts: Sequence[HostEntry], reach: Reach, *, fork: bool = False) -> Spawner:
    """Return the Spawner that starts agents on these hosts.

    Args:
        fork: this process is a launcher and nothing else, and may be forked.

    Raises:
        ConfigError: this machine is listed twice.
    """
    here = hosts_here(hosts, reach)
    if len(here) > 1:
        names = ", ".join(host.name for host in here)
        raise ConfigError(
            f"{names} are all this machine; give it once, with all its slots "
            f"(-H localhost:{sum(host.slots or 1 for host in here)})"
        )
    local = LocalSpawner(fork=fork)
    if len(here) == len(hosts):
        return local
    return PerHostSpawner(
        {**_elsewhere([host for host in hosts if host not in here], reach), **dict.fromkeys(here, local)}
    )


def _elsewhere(hosts: Sequence[HostEntry], reach: Reach) -> Mapping[HostEntry, Spawner]:
    """Return what leads to other hosts than this machine. Raise ConfigError for a template that does not fit one."""
    ways: dict[bool, Spawner] = {False: TemplateSpawner(reach, hosts) if reach.agent_command else SshSpawner(reach)}
    if reach.slurm_job and not reach.agent_command:
        ways[True] = SrunSpawner(reach, reach.slurm_job, os.environ)
    return {host: ways.get(host.name in reach.slurm_nodes, ways[False]) for host in hosts}


class AnyHostSpawner:
    """A Spawner for hosts that become known while a job runs. Several may be this machine.

    Args:
        fork: this process is a launcher and nothing else, and may be forked.
    """

    def __init__(self, reach: Reach, *, fork: bool = False) -> None:
        self._reach = reach
        self._local = LocalSpawner(fork=fork)
        self._here: Mapping[str, bool] = {}  # replaced as a whole: two threads look at it
        self._others: dict[HostEntry, Spawner] = {}

    def learn(self, hosts: Sequence[HostEntry]) -> None:
        """Find out which of these are this machine, before any of them is started. Names are looked up for that."""
        known = self._here
        new = [host for host in hosts if host.name not in known]
        here = {host.name for host in hosts_here(new, self._reach)}
        self._here = {**known, **{host.name: host.name in here for host in new}}

    def start(self, host: HostEntry) -> AgentStream:
        """Start the command.

        Raises:
            LaunchError: it cannot be executed.
            ConfigError: the user's template uses a field that this host does not have.
        """
        return self._way(host).start(host)

    def is_local(self, host: HostEntry) -> bool:
        return self._here.get(host.name, False)

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        return self._way(host).diagnose(host, ending)

    def _way(self, host: HostEntry) -> Spawner:
        if self.is_local(host):
            return self._local
        if host not in self._others:
            self._others |= _elsewhere([host], self._reach)
        return self._others[host]


def hosts_here(hosts: Sequence[HostEntry], reach: Reach, lookup_timeout: float = 3.0) -> list[HostEntry]:
    """Return the hosts that are this machine: localhost, its own name, or one of its addresses.

    Args:
        lookup_timeout: seconds to look up names; a name that takes longer counts as another machine's.
    """
    own_user = _own_user()
    candidates = [host for host in hosts if host.user in ("", own_user)]
    names = {host.name for host in candidates}
    own = {name for name in names if _is_own_name(name) or _is_own_address(name)}
    if not reach.agent_command:
        # A template's hosts may be pods and containers, whose names mean something else to DNS, or nothing at all.
        own |= _leading_here(names - own - reach.slurm_nodes, lookup_timeout)
    return [host for host in candidates if host.name in own]


def _is_own_name(name: str) -> bool:
    own = socket.gethostname().lower()
    return name.lower() in {"localhost", own, own.partition(".")[0]}


_LOOKUPS = 256
"""Names that are looked up at once: DNS may be slow to say no. A thread for each of 10,000 names takes seconds."""


def _leading_here(names: Collection[str], timeout: float) -> set[str]:
    """Return the names that resolve to an address of this machine."""
    found: set[str] = set()
    left = deque(names)
    deadline = time.monotonic() + timeout

    def look_up() -> None:
        while time.monotonic() < deadline:
            try:
                name = left.popleft()
            except IndexError:
                return
            if _leads_here(name):
                found.add(name)

    # Daemons: getaddrinfo cannot be interrupted, and must not keep the launcher from ending.
    threads = [
        threading.Thread(target=look_up, name="hvdgloo-lookup", daemon=True) for _ in range(min(len(names), _LOOKUPS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return set(found)


def _leads_here(name: str) -> bool:
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)}
    except (OSError, UnicodeError):
        return False
    return any(_is_own_address(address) for address in addresses)


def _is_own_address(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(family, address.partition("%")[0])
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _own_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""  # a container's user may have no name
