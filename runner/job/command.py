"""A worker's command line and environment. Both are data until the last moment: no shell parses them."""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
from collections.abc import Mapping, Sequence

from hvdgloo._platform.nics import nccl_variables
from hvdgloo._platform.spelling import suggestions
from hvdgloo.config import format_endpoint, place_variables
from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import Slot
from hvdgloo.runner.network.interfaces import Address

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
NO_LIMIT = 2**31 - 1
"""Value that stands for an unlimited number of restarts: programs read the variable as an integer and compare the count
with it."""
_SUBCOMMANDS = {name.split()[0]: name for name in ("doctor", "report compare", "timeline merge", "top", "tune")}
"""Subcommands, which take a command's place, by their first word."""
_OWN_INTERPRETER = ("python", "python3")
_MORE_HOSTS = re.compile(r",.*|[^/]+(:\d+|,)")
"""Pattern of words that look like the rest of a host list that a space has split."""


def resolve_command(
    command: Sequence[str], *, python: str | None, cwd: str, search_path: str | None, module_path: Sequence[str]
) -> tuple[str, ...]:
    """Return the argv that runs the user's command.

    ``train.py ...`` and ``-m package.module ...`` are run by ``python``, the interpreter that hvdgloo is installed for;
    so is a command that begins with the bare word ``python`` or ``python3``. Anything else is a program, looked up as a
    shell does.

    Args:
        python: None if the first word is a program, whatever its name.
        module_path: where ``-m`` looks, in addition to ``cwd``.

    Raises:
        ConfigError: there is no such file, module or program, or no command at all.
    """
    if not command:
        raise ConfigError("there is no command to run; write for example: hvdgloo-run -np 2 train.py")
    program, arguments = command[0], tuple(command[1:])
    if python is None:
        return (_executable(program, cwd, search_path), *arguments)
    if program == "-m":
        return (python, "-m", *_module(arguments, [cwd, *module_path]), *arguments[1:])
    if program.endswith(".py"):
        _require_file(program, cwd)
        return (python, program, *arguments)
    if program in _OWN_INTERPRETER:
        _check_script(arguments, cwd)
        return (python, *arguments)
    return (_executable(program, cwd, search_path), *arguments)


def resolve_elsewhere(command: Sequence[str], *, python: str | None) -> tuple[str, ...]:
    """Return the argv that runs the user's command on another host, whose interpreter and search path may differ."""
    program = command[0]
    if python is None:
        return tuple(command)
    if program == "-m" or program.endswith(".py"):
        return (python, *command)
    return (python, *command[1:]) if program in _OWN_INTERPRETER else tuple(command)


def needs(argv: Sequence[str], python: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the files and programs that must exist where workers run, as far as an argv shows them.

    Args:
        python: hvdgloo's own interpreter on that host, which exists if an agent runs.
    """
    if not argv:
        return (), ()
    if argv[0] == python:
        return [word for word in argv[1:2] if word.endswith(".py")], ()
    return (), [argv[0]]


def _module(arguments: Sequence[str], path: Sequence[str]) -> tuple[str]:
    if not arguments:
        raise ConfigError("-m needs the name of a module; write for example: hvdgloo-run -np 2 -m package.train")
    top = arguments[0].partition(".")[0]
    finders = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter)
    if not any(finder.find_spec(top) for finder in finders) and not importlib.machinery.PathFinder.find_spec(
        top, list(path)
    ):
        raise ConfigError(f"there is no module named {top!r}, neither in {path[0]} nor among the installed packages")
    return (arguments[0],)


def _check_script(arguments: Sequence[str], cwd: str) -> None:
    """Check that the script exists in ``python train.py``."""
    if arguments and arguments[0].endswith(".py"):
        _require_file(arguments[0], cwd)


def _require_file(path: str, cwd: str) -> None:
    full = os.path.join(cwd, path)
    if not os.path.isfile(full):
        raise ConfigError(f"there is no file {path} in {cwd}")
    if not os.access(full, os.R_OK):
        raise ConfigError(f"{path} cannot be read: you have no permission")


def _executable(program: str, cwd: str, search_path: str | None) -> str:
    path = os.path.join(cwd, program)
    if os.path.isdir(path) and (os.sep in program or shutil.which(program, path=search_path) is None):
        within = os.path.join(program, "train.py")
        raise ConfigError(f"{program} is a directory; name the program to run, such as {within}")
    if os.sep in program:
        if not os.path.isfile(path):
            raise ConfigError(f"there is no program {program} in {cwd}")
        if not os.access(path, os.X_OK):
            raise ConfigError(f"{program} is not executable; chmod +x it, or name the interpreter that runs it")
        return program
    found = shutil.which(program, path=search_path)
    if found is None:
        if _MORE_HOSTS.fullmatch(program):
            raise ConfigError(
                f"{program} was taken for the program to run; separate hosts by commas, without spaces: -H h1:4,h2:4"
            )
        known = [_SUBCOMMANDS[first] for first in suggestions(program, _SUBCOMMANDS)]
        meant = [f"./{program}"] if os.path.exists(path) else known
        hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
        raise ConfigError(f"there is no program {program} in the search path{hint}")
    return found


def worker_environment(
    slot: Slot,
    *,
    job_id: str,
    epoch: int,
    rendezvous: tuple[str, int],
    secret: bytes,
    address: str,
    master: tuple[str, int] | None,
    restart: int = 0,
    max_restarts: int | None = 0,
) -> dict[str, str]:
    """Return the variables that are added to the user's environment for one worker.

    There are three families: hvdgloo's names, the Horovod names that have a meaning here, and the names that torchrun
    sets, which torch.distributed's ``env://`` and libraries based on it read.

    Args:
        rendezvous: address and port of the server.
        address: the worker's own address, at which its peers reach it.
        master: an address of rank 0's host and a free port there, for the user's own torch.distributed; None if not yet
            known.
        restart: how often all workers have been restarted.
        max_restarts: how often all workers may be restarted, or the workers of an elastic job may form again; None for
            no limit.
    """
    return {
        **place_variables(
            rank=slot.rank,
            size=slot.size,
            local_rank=slot.local_rank,
            local_size=slot.local_size,
            cross_rank=slot.cross_rank,
            cross_size=slot.cross_size,
            node=slot.node,
            nodes=slot.nodes,
        ),
        "HVDGLOO_HOSTNAME": slot.hostname,
        "HOROVOD_HOSTNAME": slot.hostname,
        "HVDGLOO_RENDEZVOUS": format_endpoint(*rendezvous),
        "HVDGLOO_SECRET": secret.hex(),
        "HVDGLOO_JOB_ID": job_id,
        "HVDGLOO_EPOCH": str(epoch),
        "HVDGLOO_ADDRESS": address,
        "HVDGLOO_RESTART": str(restart),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous[1]),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(NO_LIMIT if max_restarts is None else max_restarts),
        **({} if master is None else {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}),
        "PYTHONUNBUFFERED": "1",
    }


def interface_variables(address: Address, *, chosen: bool) -> dict[str, str]:
    """Return the variables that tell libraries which network interface the job uses on this host.

    Gloo gets no variable with IPv6: it would take the interface's first address, which is the link-local one. NCCL uses
    all the interfaces that it finds, and gets a variable only if the user has chosen.

    Args:
        chosen: True if the user has chosen the interfaces of this host.
    """
    if not address.nic:
        return {}
    ipv6 = address.version == 6
    gloo = {} if ipv6 else {"GLOO_SOCKET_IFNAME": address.nic}
    nccl = nccl_variables(address.nic if chosen else "", ipv6=ipv6)
    return {"HOROVOD_GLOO_IFACE": address.nic, **gloo, **nccl}


def thread_defaults(cores: int, local_size: int, environ: Mapping[str, str], *, machine_cores: int) -> dict[str, str]:
    """Return thread counts that keep the workers of a host from competing for its cores.

    Variables that the user has set are kept; OMP_NUM_THREADS suppresses all others, because the other libraries follow
    it. A single worker that may use the whole machine needs no limit either.
    """
    if "OMP_NUM_THREADS" in environ or (local_size == 1 and cores == machine_cores):
        return {}
    threads = str(max(1, cores // local_size))
    return {name: threads for name in THREAD_VARIABLES if name not in environ}
