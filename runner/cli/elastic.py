"""The flags of elastic jobs, and the options and hosts that they yield."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdgloo.config import settings
from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli.setting_flags import AddArgument, is_given
from hvdgloo.runner.cli.values import positive, seconds, some_seconds, whole
from hvdgloo.runner.job.host_sources import Inventory
from hvdgloo.runner.job.spec import ElasticSpec

if TYPE_CHECKING:
    from hvdgloo.runner.elastic.options import ElasticOptions

_DESTS = {
    "min_np": "min_np",
    "max_np": "max_np",
    "script": "host_discovery_script",
    "slots_per_host": "slots_per_host",
    "reset_limit": "reset_limit",
    "cooldown": "cooldown",
    "failures_per_host": "failures_per_host",
    "interval": "discovery_interval",
    "timeout": "discovery_timeout",
}
"""Fields of ``ElasticOptions``, with the ``dest`` of their flags."""

_SETTINGS = ("elastic_timeout", "elastic_join")
"""Settings whose flags are for elastic jobs only."""


def add_elastic_flags(add: AddArgument) -> None:
    """Add the flags of elastic jobs, except for those that set variables of the workers."""
    add(
        "--min-np",
        "--min-num-proc",
        dest="min_np",
        type=positive,
        metavar="N",
        yaml="elastic.min_np",
        help="continue while there are at least N workers, and wait for more otherwise (default: -np). This option or "
        "a discovery script makes a job elastic",
    )
    add(
        "--max-np",
        "--max-num-proc",
        dest="max_np",
        type=positive,
        metavar="N",
        yaml="elastic.max_np",
        help="use at most N slots, and keep the others as spares (default: use all)",
    )
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        yaml="elastic.host_discovery_script",
        help="an executable, or a command line for a shell, that prints the hosts that can be used now, one per "
        "line: 'h1' or 'h1:4'. Replaces -H, and is run repeatedly. slurm: the nodes of this Slurm job that are up",
    )
    add(
        "--slots-per-host",
        type=positive,
        metavar="N",
        yaml="elastic.slots_per_host",
        help="slots of hosts that are listed without a number (default: one for each GPU, otherwise one)",
    )
    add(
        "--reset-limit",
        type=whole,
        metavar="N",
        yaml="elastic.reset_limit",
        help="end the job when its workers would have to form again more often than this (default: no limit)",
    )
    add(
        "--blacklist-cooldown-range",
        nargs=2,
        dest="cooldown",
        type=seconds,
        metavar=("MIN", "MAX"),
        yaml="elastic.blacklist_cooldown_range",
        help="how long a host that has failed is left out: at least MIN seconds, twice as long each time, at most MAX "
        "(default: until it disappears from the list and returns)",
    )
    add(
        "--failures-per-host",
        type=positive,
        metavar="N",
        yaml="elastic.failures_per_host",
        help="leave out a host at the Nth failure of a worker there; before that, only the failed worker is "
        "restarted (default: 1, as in Horovod, also where a discovery lists only one host; 3 where -H names a "
        "single host, or no host is named)",
    )
    add(
        "--discovery-interval",
        type=some_seconds,
        metavar="SECONDS",
        yaml="elastic.discovery_interval_seconds",
        help="time between two runs of the discovery script (default: 1)",
    )
    add(
        "--discovery-timeout",
        type=some_seconds,
        metavar="SECONDS",
        yaml="elastic.discovery_timeout_seconds",
        help="time limit for one run of the discovery script (default: 10)",
    )


def options_from(arguments: argparse.Namespace) -> ElasticOptions | None:
    """Return the options of an elastic job; None if the command line has none.

    Raises:
        ConfigError: a flag for elastic jobs was given, but nothing makes the job elastic.
    """
    given = {field: getattr(arguments, dest) for field, dest in _DESTS.items()}
    if all(value is None for value in given.values()):
        for name in _SETTINGS:  # as variables, or in a file, they may be there for other jobs
            if is_given(arguments, name):
                raise ConfigError(
                    f"{settings()[name].flag} is for elastic jobs: add --min-np N or a discovery script, or "
                    "leave it out"
                )
        return None
    from hvdgloo.runner.elastic.options import ElasticOptions

    if given["cooldown"] is not None:
        given["cooldown"] = tuple(given["cooldown"])
    return ElasticOptions(**given)


def examined(inventory: Inventory, elastic: ElasticSpec) -> Inventory:
    """Return the hosts of an elastic job in the form of a fixed job's: those that are listed now, with all their slots.

    Raises:
        DiscoveryError: they cannot be listed.
    """
    from hvdgloo.runner.elastic.discovery import HostManager, host_entry

    listed = HostManager(elastic.discovery).update_available_hosts().hosts
    return replace(inventory, hosts=tuple(host_entry(*host) for host in listed), np=None)
