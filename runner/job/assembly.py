"""A job, assembled from options or arguments: the command line and ``hvdgloo.run.run`` share this path.

Unusable values are refused here or earlier, before any agent is started.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace

from hvdgloo.config import Config
from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.host_sources import Inventory
from hvdgloo.runner.job.spec import (
    HEARTBEAT_TIMEOUT,
    PROGRAM_S_TIMEOUT,
    ElasticSpec,
    LaunchSpec,
    NetworkOptions,
    Reach,
    Views,
)


def assemble(
    inventory: Inventory,
    environ: Mapping[str, str],
    reach: Reach,
    *,
    command: tuple[str, ...],
    remote_command: tuple[str, ...] | None,
    cwd: str,
    secret: bytes,
    function: bytes | None = None,
    nics: tuple[str, ...] = (),
    exported: Collection[str] = (),
    export_all: bool = True,
    start_timeout: float | None = None,
    grace_period: float | None = None,
    heartbeat_timeout: float | None = None,
    output_directory: str | None = None,
    timestamps: bool = False,
    log_ranks: frozenset[int] | None = None,
    prefix: bool = True,
    stdin_rank: int | None = None,
    verbose: bool = False,
    elastic: ElasticSpec | None = None,
    max_restarts: int = 0,
    views: Views = Views(),  # noqa: B008 - it never changes
) -> LaunchSpec:
    """Return the job. Arguments that are not described here have the same meaning as in ``LaunchSpec``.

    Args:
        inventory: the hosts that the job runs on.
        environ: the workers' environment; its settings apply to the launcher, too.
        reach: how hosts are reached, except for what inventory and settings determine.
        nics: which addresses to use, in the form of ``--nics``.
        start_timeout: in seconds; None for the setting.
        heartbeat_timeout: seconds of silence between launcher and agent after which each considers the other lost; None
            for a value that suits a launcher inside the user's program.

    Raises:
        ConfigError: a value cannot be used; the text names it.
    """
    config = Config.from_env(environ)
    identity = reach.ssh_identity_file
    if identity is not None and not os.path.exists(os.path.expanduser(identity)):
        raise ConfigError(f"--ssh-identity-file {identity}: there is no such file")
    return LaunchSpec(
        command=command,
        remote_command=remote_command,
        hosts=inventory.hosts,
        np=inventory.np,
        cwd=cwd,
        environ=environ,
        exported=frozenset(exported),
        export_all=export_all,
        secret=secret,
        function=function,
        start_timeout=config.start_timeout if start_timeout is None else start_timeout,
        grace_period=grace_period,
        heartbeat_timeout=HEARTBEAT_TIMEOUT if heartbeat_timeout is None else heartbeat_timeout,
        launcher_timeout=PROGRAM_S_TIMEOUT if heartbeat_timeout is None else heartbeat_timeout,
        output_directory=None if output_directory is None else os.path.abspath(output_directory),
        timestamps=timestamps,
        log_ranks=log_ranks,
        prefix=prefix,
        stdin_rank=stdin_rank,
        verbose=verbose,
        timeline=config.timeline,
        autotune_log=config.autotune_log if config.autotune else None,
        reach=inventory.completed(replace(reach, connect_timeout=config.connect_timeout)),
        network=NetworkOptions(nics, config.port_range, config.connect_timeout, config.tls_files),
        elastic=elastic,
        max_restarts=max_restarts,
        views=views,
    )
