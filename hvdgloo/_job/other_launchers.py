"""Processes that something else than hvdgloo has started: torchrun, mpirun or srun.

Each would be a job of its own, and train a model of its own. Those that torchrun has started on one host are joined to
one job. What they need for that, above all a secret, must not pass through torchrun's store, which any process may read
that reaches its port. Ranks of one host that belong to one user have a better place: that user's private directory, in
which rank 0 says where its server listens. Across hosts there is no such place; there, and with other launchers, a
warning names the command to use instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hvdgloo._job.context import Context
from hvdgloo.config import Config, place_variables
from hvdgloo.errors import ConfigError, ConnectError

if TYPE_CHECKING:
    from hvdgloo.rendezvous import RendezvousServer

logger = logging.getLogger(__name__)

_SIZES = {
    "WORLD_SIZE": ("RANK", "LOCAL_WORLD_SIZE"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI_SIZE": ("PMI_RANK", "MPI_LOCALNRANKS"),
    "SLURM_NTASKS": ("SLURM_PROCID", ""),
}
"""Variables with the number of processes that a launcher has started; those with this one's rank, and with the number
of processes on its host.
"""

_OF_RUN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that together tell one start by torchrun from all others that are under way on this host."""

_LOOK_AGAIN = 0.02  # seconds
_LOOPBACK = "127.0.0.1"
_servers: list[RendezvousServer] = []
"""Rank 0's, which serves for as long as its process lives."""
_warned_of_mpi = False


@contextmanager
def meeting(config: Config) -> Iterator[Config]:
    """While processes that torchrun has started on this host meet: the settings with which they join one job.

    The environment then says the same as in a process that ``hvdgloo-run`` has started: whatever this process starts
    must know its place.

    Args:
        config: the settings so far, which are returned where there is nothing to be joined.

    Raises:
        ConnectError: rank 0 did not come within the start timeout.
    """
    environ = os.environ
    if not _is_torchrun_s(config, environ):
        yield config
        return
    import hashlib

    from hvdgloo._platform.runtime import runtime_folder
    from hvdgloo.rendezvous import host_identity

    try:
        folder = runtime_folder(environ)
    except ConfigError as error:
        logger.debug("%s", error)
        yield config  # and so it is alone, about which there is a warning
        return
    start = json.dumps([host_identity(), *(environ.get(name, "") for name in _OF_RUN)])
    path = os.path.join(folder, f"torchrun.{hashlib.sha256(start.encode()).hexdigest()[:16]}")
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    with contextlib.ExitStack() as until_joined:
        told = _invite(path, size, config, until_joined) if rank == 0 else _await_invitation(path, config)
        places = place_variables(
            rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1, node=0, nodes=1
        )
        environ.update({name: value for name, value in places.items() if name.startswith(("HVDGLOO_", "HOROVOD_"))})
        environ.update(told, HVDGLOO_ADDRESS=_LOOPBACK, HVDGLOO_HOSTNAME="localhost")
        yield Config.from_env(environ)


def _is_torchrun_s(config: Config, environ: Mapping[str, str]) -> bool:
    """Tell whether torchrun has started this process, and all that it has started are on this host."""
    # The last variable is set by torchrun in any case, and by no other launcher.
    return (
        config.rendezvous is None
        and "TORCHELASTIC_USE_AGENT_STORE" in environ
        and _number(environ, "WORLD_SIZE") > 1
        and environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
        and environ.get("LOCAL_RANK") == environ.get("RANK")
    )


def _invite(path: str, size: int, config: Config, until_joined: contextlib.ExitStack) -> dict[str, str]:
    """On rank 0: serve, and say where in a file, which is locked as long as it holds."""
    import secrets

    from hvdgloo._platform.files import PRIVATE, create
    from hvdgloo.rendezvous import RendezvousServer, generate_secret

    secret = generate_secret()
    server = RendezvousServer(
        secret=secret,
        hosts=[("localhost", size)],
        bind=(_LOOPBACK,),
        port_range=config.port_range,
        start_timeout=config.start_timeout,
    )
    _servers.append(server.start())
    told = {
        "HVDGLOO_RENDEZVOUS": server.endpoint,
        "HVDGLOO_SECRET": secret.hex(),
        "HVDGLOO_JOB_ID": secrets.token_hex(16),
    }
    new = f"{path}.{secrets.token_hex(8)}"
    file = until_joined.enter_context(os.fdopen(create(new, PRIVATE), "w"))
    fcntl.flock(file, fcntl.LOCK_EX)
    json.dump(told, file)
    file.flush()
    os.rename(new, path)
    until_joined.callback(os.unlink, path)
    return told


def _await_invitation(path: str, config: Config) -> dict[str, str]:
    """On other ranks: what rank 0 says."""
    deadline = time.monotonic() + config.start_timeout
    while True:
        told = _invitation(path)
        if told is not None:
            return told
        if time.monotonic() >= deadline:
            raise ConnectError(
                f"torchrun has started this process, and rank 0 did not call hvd.init() within "
                f"{config.start_timeout:g} s (HVDGLOO_START_TIMEOUT)",
                rank=0,
            )
        time.sleep(_LOOK_AGAIN)


def _invitation(path: str) -> dict[str, str] | None:
    """Read the file; None if it is not there, or was left behind by a process that was killed."""
    try:
        with open(path, encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                told: dict[str, str] = json.load(file)
                return told
    except FileNotFoundError:
        pass
    return None


# Warnings.


def warn(context: Context) -> None:
    """Warn of processes that were meant to be one job, and are several. Rank 0 does, for all of them.

    Args:
        context: of the job that this process has joined.
    """
    if context.config.rendezvous is None:
        _warn_alone(os.environ)
    elif context.rank == 0:
        warn_of_mpi(context.size)


def _warn_alone(environ: Mapping[str, str]) -> None:
    for name, (rank, local_size) in _SIZES.items():
        size = _number(environ, name)
        if size > 1:
            if _number(environ, rank) == 0:
                here = _number(environ, local_size)
                hosts = f" -H HOST1:{here},HOST2:{here}" if 0 < here < size else ""
                logger.warning(
                    "this process is a job of its own, although %s=%d says that %d processes belong together: hvdgloo "
                    "knows nothing of the others, and each trains a model of its own. Start them with hvdgloo's "
                    "launcher: hvdgloo-run -np %d%s %s",
                    *(name, size, size, size, hosts, _program()),
                )
            return


def warn_of_mpi(size: int) -> None:
    """Warn if mpi4py was imported, and takes this process of a job of ``size`` ranks for the only one."""
    global _warned_of_mpi
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or size == 1 or _warned_of_mpi:
        return
    try:
        alone = mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() == 1
    except Exception:  # whatever stands for mpi4py here
        logger.debug("mpi4py cannot be asked for its size", exc_info=True)
        return
    if alone:
        _warned_of_mpi = True
        logger.warning(
            "mpi4py sees this process alone (MPI.COMM_WORLD has 1 rank), while hvd.size() is %d: hvdgloo-run starts no "
            "MPI job. Use hvd.allreduce(), hvd.broadcast_object() and so on instead of MPI's",
            size,
        )


def _program() -> str:
    """Return this process's program, as it is named behind ``hvdgloo-run``, without arguments: they may be secret."""
    import shlex

    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return f"-m {spec.name.removesuffix('.__main__')} ..."
    return f"{shlex.quote(sys.argv[0])} ..." if sys.argv and sys.argv[0] not in ("", "-c") else "train.py"


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable's value; 0 if there is none."""
    try:
        return int(environ.get(name, ""))
    except ValueError:
        return 0
