"""The flags of ``torchrun``: useful ones are accepted, and the others are refused with a hint at the equivalent."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdgloo._platform.machine import usable_cores, visible_gpus
from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli.setting_flags import AddArgument
from hvdgloo.runner.job.host_sources import Inventory

_HOSTS = "this launcher is started once and reaches all hosts itself; name them: -H h1:4,h2:4"
_FILES = "--output-filename DIRECTORY writes what each rank prints to a file, and shows it as well"
_NEEDLESS = "it has no equivalent here; leave it out"

_REFUSED = {
    "--rdzv-backend": _HOSTS,
    "--rdzv-endpoint": _HOSTS,
    "--rdzv-id": _HOSTS,
    "--rdzv-conf": f"{_HOSTS}; --start-timeout says how long to wait for them",
    "--node-rank": _HOSTS,
    "--master-addr": f"{_HOSTS}. MASTER_ADDR is an address of the first one",
    "--master-port": f"{_HOSTS}. MASTER_PORT is a free port of the first one",
    "--local-addr": "--nics chooses the addresses that hosts use",
    "--log-dir": _FILES,
    "--redirects": f"{_FILES}; --log-ranks limits what is shown",
    "--tee": _FILES,
    "--logs-specs": _FILES,
    "--local-ranks-filter": "--log-ranks 0,4-7 shows the output of these ranks only",
    "--duplicate-stdout-filters": _NEEDLESS,
    "--duplicate-stderr-filters": _NEEDLESS,
    "--monitor-interval": "the end of a worker is noticed at once; leave it out",
    "--shutdown-timeout": "--grace-period says how long workers have to end",
    "--signals-to-handle": "SIGINT, SIGTERM and SIGHUP are passed on to the workers; leave it out",
    "--start-method": _NEEDLESS,
    "--event-log-handler": _NEEDLESS,
    "--role": "ROLE_NAME is always 'default'; leave it out",
    "--numa-binding": "write the binding into the command: numactl --cpunodebind=0 python train.py",
}
"""Refused flags with a value, and their equivalents."""

_REFUSED_SWITCHES = {
    "--run-path": "name the file as the command",
    "--virtual-local-rank": "LOCAL_RANK is the rank on the host; leave it out",
}
"""Refused flags without a value, and their equivalents."""

_SHORT = {"--redirects": "-r", "--tee": "-t"}
_ONE_HOST = ("1", "1:1")


def add_torchrun_flags(add: AddArgument) -> None:
    """Add all flags of torchrun's, in both spellings; otherwise they would be refused as unknown."""
    add(
        *_spellings("--nproc-per-node"),
        metavar="N",
        help="workers on each host: a number; for this host also gpu or cpu (one for each) or auto (gpu, or else cpu)",
    )
    add("--nnodes", metavar="1", help="only 1: other hosts are named with -H")
    add("--standalone", action="store_true", help="has no effect: without -H a job runs on this host")
    add("--module", action="store_true", help="the command is the name of a module, as with -m")
    add(*_spellings("--no-python"), action="store_true", help="the command is a program, even if its name ends in .py")
    for flag in _REFUSED:
        short = [_SHORT[flag]] if flag in _SHORT else []
        add(*short, *_spellings(flag), dest=flag, help=argparse.SUPPRESS)
    for flag in _REFUSED_SWITCHES:
        add(*_spellings(flag), dest=flag, action="store_true", help=argparse.SUPPRESS)


def _spellings(flag: str) -> list[str]:
    """Return both spellings of a flag: ``--log-dir`` and ``--log_dir``."""
    return list(dict.fromkeys(("--" + flag[2:].replace("-", "_"), flag)))


def judge_torchrun_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that cannot be ignored without changing the job.

    Raises:
        ConfigError: a flag is refused; the text names the equivalent.
    """
    given = vars(arguments)
    for flag, instead in {**_REFUSED, **_REFUSED_SWITCHES}.items():
        if given.get(flag):
            raise ConfigError(f"{flag} is torchrun's: {instead}")
    nodes = arguments.nnodes
    if nodes is not None and nodes not in _ONE_HOST:
        if ":" in nodes:
            raise ConfigError(
                f"--nnodes {nodes}: for an elastic job give --min-np and --max-np, and -H or --host-discovery-script"
            )
        raise ConfigError(f"--nnodes {nodes}: {_HOSTS}")
    if arguments.nproc_per_node is not None and arguments.np is not None:
        raise ConfigError(
            "-np is the number of all workers, and --nproc-per-node the number on each host; give only one of them"
        )
    if arguments.module and arguments.no_python:
        raise ConfigError("--module and --no-python exclude each other: a module is run by Python")


def processes_here(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int | None:
    """Return the number of workers per host that ``--nproc-per-node`` requests; None if it is not given.

    Raises:
        ConfigError: its value cannot be used.
    """
    text = arguments.nproc_per_node
    if text is None:
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text not in ("auto", "cpu", "gpu"):
        raise ConfigError(f"--nproc-per-node {text}: give a number from 1, or auto, cpu or gpu")
    gpus = 0 if text == "cpu" else visible_gpus(environ)
    if text == "gpu" and not gpus:
        raise ConfigError("--nproc-per-node gpu: there is no GPU here; give a number, or cpu")
    return gpus or usable_cores()


def on_each_host(arguments: argparse.Namespace, count: int | None, inventory: Inventory) -> Inventory:
    """Return the same hosts, each with the number of slots that ``--nproc-per-node`` requests.

    Raises:
        ConfigError: the number of workers cannot be determined.
    """
    if count is None:
        return inventory
    if not inventory.hosts:
        raise ConfigError(
            "--nproc-per-node: where hosts are discovered, --slots-per-host says how many workers each has"
        )
    others = [host.name for host in inventory.hosts if host.name != "localhost"]
    if others and not arguments.nproc_per_node.isdecimal():
        raise ConfigError(
            f"--nproc-per-node {arguments.nproc_per_node}: the GPUs and cores of {others[0]} are not known here; give "
            "a number, or leave it out: a host without slots has a worker for each of its GPUs"
        )
    hosts = tuple(replace(host, slots=count) for host in inventory.hosts)
    return replace(inventory, hosts=hosts, np=count * len(hosts))


def as_command(arguments: argparse.Namespace, command: Sequence[str]) -> Sequence[str]:
    """Return the command in the syntax of hvdgloo-run."""
    return ["-m", *command] if arguments.module and command else command
