"""Conversion of a user's elastic options to an ``ElasticSpec``, shared by the command line and ``hvdgloo.run.run``.
Contradictions are refused here, before anything is started.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hvdgloo.config import Config
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._elastic.events import Join, Rules
from hvdgloo.runner.elastic.discovery import FixedHosts, HostDiscoveryScript, address, script_command
from hvdgloo.runner.elastic.slurm_nodes import SLURM, SlurmNodes
from hvdgloo.runner.job.host_sources import Inventory
from hvdgloo.runner.job.hostlist import MOST_WORKERS, shortlist
from hvdgloo.runner.job.slurm import Allocation
from hvdgloo.runner.job.spec import Discovery, ElasticSpec, HostEntry

FAILURES_ON_ONE_HOST = 3
"""Number of failures that exclude a host from a job that has no other."""

INTERVAL, TIMEOUT = 1.0, 10.0
"""Seconds between two calls of a discovery, and for a script to answer."""


@dataclass(frozen=True)
class ElasticOptions:
    """The user's options; None where the user gave none. Times are in seconds.

    Attributes:
        min_np, max_np: the minimum and the maximum number of workers.
        script: a discovery script, or ``slurm``.
        discovery: an object that lists hosts.
        slots_per_host: slots of hosts that are listed without a number.
        reset_limit: how often workers may form again.
        cooldown: the shortest and the longest time for which a host is left out.
        failures_per_host: the number of workers' failures that exclude their host.
        interval: time between two calls of a discovery.
        timeout: time for a script to answer.
        elastic_timeout: time to wait for workers; None for the setting.
    """

    min_np: int | None = None
    max_np: int | None = None
    script: str | None = None
    discovery: Discovery | None = None
    slots_per_host: int | None = None
    reset_limit: int | None = None
    cooldown: tuple[float, float] | None = None
    failures_per_host: int | None = None
    interval: float | None = None
    timeout: float | None = None
    elastic_timeout: float | None = None

    @property
    def discovered(self) -> bool:
        """True if hosts come from a script or an object."""
        return self.script is not None or self.discovery is not None

    @property
    def elastic(self) -> bool:
        """True if the options make the job elastic."""
        return self.discovered or self.min_np is not None

    def size(self, np: int | None) -> int | None:
        """Return the slots that a start waits for: as many as requested, otherwise the minimum."""
        return self.min_np if np is None else np

    def spec(self, inventory: Inventory, environ: Mapping[str, str]) -> ElasticSpec | None:
        """Convert the options; return None for a job of a fixed size.

        Args:
            inventory: the number of workers, from ``size``, and the hosts that were given or found, without the hosts
                of a discovery.
            environ: the workers' environment; its settings apply to the launcher, too.

        Raises:
            ConfigError: the options contradict each other, or other options; the text names the flag.
        """
        if not self.elastic:
            self._refuse_alone()
            return None
        size = inventory.np
        if size is None:
            raise ConfigError(
                f"{FLAGS['script']} needs -np N, the number of slots that must be available before the job starts; it "
                "may use more, up to --max-np"
            )
        if size > MOST_WORKERS:
            raise ConfigError(f"-np {size}: a job has at most {MOST_WORKERS} processes")
        hosts = [host if host.slots else replace(host, slots=self.slots_per_host) for host in inventory.hosts]
        rules = self._rules(size, alone=len(hosts) == 1, config=Config.from_env(environ))
        if not self.discovered:
            self._refuse_without_discovery()
            shortlist(hosts, size)  # or the start would wait for slots that cannot come
        interval = INTERVAL if self.interval is None else self.interval
        return ElasticSpec(rules, self._discovery(hosts, inventory.allocation), interval)

    def _rules(self, size: int, *, alone: bool, config: Config) -> Rules:
        failures = FAILURES_ON_ONE_HOST if alone else 1
        return Rules(
            size=size,
            smallest=size if self.min_np is None else self.min_np,
            largest=self.max_np,
            elastic_timeout=config.elastic_timeout if self.elastic_timeout is None else self.elastic_timeout,
            connect_timeout=config.connect_timeout,
            reset_limit=self.reset_limit,
            failures_per_host=failures if self.failures_per_host is None else self.failures_per_host,
            cooldown=self.cooldown,
            join=Join(config.elastic_join),
            hosts_may_come=self.discovered,
        )

    def _discovery(self, hosts: Sequence[HostEntry], allocation: Allocation | None) -> Discovery:
        timeout = TIMEOUT if self.timeout is None else self.timeout
        if self.discovery is not None:
            if self.script is not None:
                raise ConfigError("give either a discovery script or an object that lists hosts, not both")
            return self.discovery
        if self.script is None:
            return FixedHosts({address(host): host.slots for host in hosts})
        if self.script != SLURM:
            return HostDiscoveryScript(_checked(self.script), self.slots_per_host, timeout=timeout)
        if allocation is None:
            raise ConfigError(
                f"{FLAGS['script']} {SLURM} lists the nodes of a Slurm job, but there is no Slurm job here; for a "
                f"script of that name, write ./{SLURM}"
            )
        return SlurmNodes(allocation.hosts, self.slots_per_host, timeout=timeout)

    def _refuse_alone(self) -> None:
        """Refuse options that have no meaning for a job of a fixed size."""
        for field in fields(self):
            if getattr(self, field.name) is not None:
                raise ConfigError(
                    f"{FLAGS[field.name]} is for elastic jobs: add --min-np N or a discovery script, or leave it out"
                )

    def _refuse_without_discovery(self) -> None:
        """Refuse options that have no meaning if the user has named the hosts."""
        for name in ("interval", "timeout"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{FLAGS[name]} is for {FLAGS['script']}; leave it out")


FLAGS = {
    "min_np": "--min-np",
    "max_np": "--max-np",
    "script": "--host-discovery-script",
    "slots_per_host": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "cooldown": "--blacklist-cooldown-range",
    "failures_per_host": "--failures-per-host",
    "interval": "--discovery-interval",
    "timeout": "--discovery-timeout",
    "elastic_timeout": "--elastic-timeout",
}
"""Fields of ``ElasticOptions``, with their flags."""


def _checked(script: str) -> str:
    """Check a discovery script, and return it unchanged. Of a shell's command line, only a file at its beginning is
    checked.

    Raises:
        ConfigError: there is no such file, or it cannot be executed.
    """
    flag = f"{FLAGS['script']} {script}"
    command = script_command(script)
    if len(command) > 1:
        word = (script.split() or [""])[0]
        if os.path.isfile(word) and os.sep not in word and shutil.which(word) is None:
            raise ConfigError(f"{flag}: there is no program {word} in the search path; did you mean ./{script}?")
        command = script_command(word)
        if os.sep not in word or len(command) > 1:
            return script
    path = command[0]
    if os.path.isdir(path):
        raise ConfigError(f"{flag}: is a directory")
    if not os.path.exists(path):
        raise ConfigError(f"{flag}: there is no such file")
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{flag}: it is not executable; chmod +x it")
    return script
