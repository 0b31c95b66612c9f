"""The user's settings, sizes and resources, checked before anything is started."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

from hvdgloo.config import Config
from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import Output, Times


@dataclass
class Settings:
    """Settings of a ``RayExecutor``; see ``RayExecutor.create_settings``.

    Attributes:
        timeout_s: seconds in which actors and workers have to start once their resources are available; None for
            ``HVDGLOO_START_TIMEOUT``.
        placement_group_timeout_s: seconds to wait for the cluster to have room.
        nics: the addresses that nodes use for each other: names, networks and ``^`` exceptions.
        verbose: report progress.
        grace_period: seconds that workers have, after a failure or Ctrl-C, before they are killed.
        output_filename: a directory on the driver's machine that also receives each rank's output.
        prefix_output_with_timestamp: begin every line of output with the time.
    """

    timeout_s: float | None = None
    placement_group_timeout_s: float = 100.0
    nics: Collection[str] = ()
    verbose: bool = False
    grace_period: float | None = None
    output_filename: str | None = None
    prefix_output_with_timestamp: bool = False

    @property
    def start_timeout(self) -> float:
        """Seconds in which actors and workers have to start."""
        return Config.from_env().start_timeout if self.timeout_s is None else self.timeout_s

    @property
    def times(self) -> Times:
        """Time limits of the job."""
        return Times(self.start_timeout, self.grace_period)

    @property
    def output(self) -> Output:
        """Treatment of the workers' output."""
        return Output(self.output_filename, self.prefix_output_with_timestamp, verbose=self.verbose)

    def check(self) -> None:
        """Refuse values that cannot be used, since attributes may have been assigned after construction.

        Raises:
            ConfigError: a value cannot be used; the text names the setting.
        """
        for name in ("timeout_s", "placement_group_timeout_s", "grace_period"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, SupportsFloat) and 0 <= float(value) < math.inf):
                raise ConfigError(f"create_settings({name}={value!r}): give a time in seconds")
        if isinstance(self.nics, str) or not all(isinstance(nic, str) for nic in self.nics):
            raise ConfigError(f"create_settings(nics={self.nics!r}): give a list of names, for example ['eth0']")


def create_settings(
    timeout_s: float | None = None,
    ssh_identity_file: str | None = None,
    ssh_str: str | None = None,
    placement_group_timeout_s: float = 100.0,
    nics: Collection[str] | None = None,
    *,
    verbose: bool | int = False,
    grace_period: float | None = None,
    output_filename: str | None = None,
    prefix_output_with_timestamp: bool = False,
) -> Settings:
    """Create settings for a ``RayExecutor``.

    Args:
        timeout_s: seconds in which actors and workers have to start once their resources are available; by default
            ``HVDGLOO_START_TIMEOUT`` (120).
        placement_group_timeout_s: seconds to wait for the cluster to have room for all workers.
        nics: the addresses that nodes use for each other: names (``eth0``), networks and ``^`` exceptions.
        verbose: report progress.
        grace_period: seconds that workers have, after a failure or Ctrl-C, before they are killed; by default 3.
        output_filename: a directory on the driver's machine that also receives each rank's output.
        prefix_output_with_timestamp: begin every line of output with the time.
        ssh_identity_file, ssh_str: without effect: Ray starts everything, and ssh is not used.

    Raises:
        ConfigError: a value cannot be used.
    """
    for name, value in (("ssh_identity_file", ssh_identity_file), ("ssh_str", ssh_str)):
        if value is not None:
            warnings.warn(f"create_settings({name}=...) has no effect: ssh is not used on Ray", stacklevel=3)
    settings = Settings(
        timeout_s,
        placement_group_timeout_s,
        () if nics is None else nics,
        bool(verbose),
        grace_period,
        output_filename,
        prefix_output_with_timestamp,
    )
    settings.check()
    return settings


@dataclass(frozen=True)
class Demand:
    """The number and distribution of the workers, and the resources that each one needs.

    Attributes:
        workers: number of workers in all.
        hosts: number of nodes, with equally many workers on each; None for any nodes with room, few if possible.
        cpus, gpus: resources of each worker.
    """

    workers: int
    hosts: int | None
    cpus: int
    gpus: int

    @property
    def workers_per_host(self) -> int:
        """Number of workers on each of ``hosts`` nodes."""
        assert self.hosts is not None
        return self.workers // self.hosts

    @property
    def each(self) -> dict[str, int]:
        """Resources of one worker, by Ray's names."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}

    @property
    def bundles(self) -> list[dict[str, int]]:
        """Resources that the placement group reserves: a bundle for each worker, or for each node."""
        if self.hosts is None:
            return [self.each] * self.workers
        return [{name: amount * self.workers_per_host for name, amount in self.each.items()}] * self.hosts

    @property
    def strategy(self) -> str:
        """Ray's name for the distribution of the bundles."""
        return "PACK" if self.hosts is None else "STRICT_SPREAD"

    def __str__(self) -> str:
        needs = " and ".join(counted(amount, name) for name, amount in self.each.items())
        where = "" if self.hosts is None else f" on {counted(self.hosts, 'node')}"
        return f"{counted(self.workers, 'worker')}{where} with {needs}{' each' if self.workers > 1 else ''}"


def counted(amount: float, name: str) -> str:
    """Return ``1 CPU``, ``2 CPUs``."""
    return f"{amount:g} {name}{'' if amount == 1 else 's'}"


def demand(
    num_workers: int | None,
    num_hosts: int | None,
    num_workers_per_host: int,
    cpus_per_worker: int,
    gpus_per_worker: int | None,
    use_gpu: bool,
) -> Demand:
    """Make a Demand of the arguments of a ``RayExecutor``.

    Raises:
        ConfigError: an argument cannot be used, or contradicts another one.
    """
    if num_workers is not None and num_hosts is not None:
        raise ConfigError(
            f"RayExecutor(num_workers={num_workers!r}, num_hosts={num_hosts!r}): give only one: num_workers= for "
            "workers on any nodes with room, num_hosts= (with num_workers_per_host=) for equally many on each node"
        )
    if num_workers is None and num_hosts is None:
        raise ConfigError("RayExecutor(): how many workers? Give num_workers=, or num_hosts= and num_workers_per_host=")
    cpus = whole("cpus_per_worker", cpus_per_worker)
    gpus = gpus_of(use_gpu, gpus_per_worker, "gpus_per_worker")
    if num_workers is not None:
        return Demand(whole("num_workers", num_workers), None, cpus, gpus)
    hosts = whole("num_hosts", num_hosts)
    return Demand(hosts * whole("num_workers_per_host", num_workers_per_host), hosts, cpus, gpus)


def gpus_of(use_gpu: bool, number: int | None, name: str) -> int:
    """Return the number of GPUs of each worker.

    Raises:
        ConfigError: the number cannot be used, or is given without ``use_gpu``.
    """
    if number is None:
        return 1 if use_gpu else 0
    if not use_gpu and number:
        raise ConfigError(f"RayExecutor({name}={number!r}): GPUs are used only with use_gpu=True")
    return whole(name, number) if use_gpu else 0


def whole(name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` if it is a whole number of at least ``least``.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"RayExecutor({name}={value!r}): it is not a whole number")
    number = int(value)
    if number < least:
        raise ConfigError(f"RayExecutor({name}={number}): it must be at least {least}")
    return number


def variables(given: Mapping[str, str] | None, argument: str) -> dict[str, str]:
    """Return the given environment variables after checking them.

    Raises:
        ConfigError: a name or value is not text.
    """
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"{argument}: {name!r}: {value!r}: names and values of variables must be strings")
    return dict(given or {})
