"""The environment, command and requirements of the workers on a host."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hvdgloo._platform.writable import unwritable
from hvdgloo.errors import ConfigError
from hvdgloo.runner.console.console import make_directory
from hvdgloo.runner.host_admission import Admission
from hvdgloo.runner.job.advice import advise
from hvdgloo.runner.job.command import interface_variables, needs, thread_defaults, worker_environment
from hvdgloo.runner.job.environment import for_other_hosts
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Slot
from hvdgloo.runner.protocol.frames import Require, Spawn
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.transport.base import Spawner


def required_on(spec: LaunchSpec, spawner: Spawner, host: HostEntry) -> Require:
    """Return a host's requirements, which are checked before workers start."""
    if spawner.is_local(host):
        return Require(spec.cwd)  # the rest has been checked here
    if host.profile is not None:
        return Require(host.profile.cwd, outputs=_outputs(spec, host))  # what runs there has brought the agent
    files, programs = needs(command_on(spec, spawner, host), spec.reach.python)
    environ = base_environment(spec, spawner, host)
    return Require(spec.cwd, files, programs, environ.get("PATH", ""), _outputs(spec, host))


def check_outputs(spec: LaunchSpec, spawner: Spawner, hosts: Sequence[HostEntry]) -> None:
    """Refuse files that cannot be written on this host; other hosts check theirs before workers start.

    The directory for the workers' output is made.
    """
    if spec.output.directory is not None:
        make_directory(spec.output.directory)
    for host in hosts:
        if spawner.is_local(host):
            for problem in unwritable(_traces(spec, host), spec.cwd):
                raise ConfigError(f"--timeline-filename (HVDGLOO_TIMELINE): {problem}")
            for problem in unwritable(_log(spec, host), spec.cwd):
                raise ConfigError(f"--autotune-log-file (HVDGLOO_AUTOTUNE_LOG): {problem}")


def check_ports(spec: LaunchSpec, spawner: Spawner, hosts: Sequence[HostEntry], *, most: int | None = None) -> None:
    """Refuse a range with fewer ports than the job needs on one of its hosts even if all of them are free.

    Args:
        most: in an elastic job, the most workers that it may have. Each of them listens, because any may become rank 0.
    """
    if spec.config.port_range is None:
        return
    first, last = spec.config.port_range
    for host in hosts[:1] if spec.elastic is None else hosts:
        uses = ["MASTER_PORT"]
        if spawner.is_local(host):
            uses.insert(0, "the rendezvous server")
        workers = 1 if spec.elastic is None else min(host.slots or 1, most or host.slots or 1)
        uses.append("rank 0" if workers == 1 else f"each of {workers} workers, of which any may become rank 0")
        needed = len(uses) - 1 + workers
        if last - first + 1 < needed:
            raise ConfigError(
                f"--port-range {first}-{last} (HVDGLOO_PORT_RANGE) is too small: host {host.name} needs {needed} "
                f"ports, for {', '.join(uses[:-1])} and {uses[-1]}; give a wider one"
            )


def _outputs(spec: LaunchSpec, host: HostEntry) -> Sequence[str]:
    return (*_traces(spec, host), *_log(spec, host))


def _log(spec: LaunchSpec, host: HostEntry) -> Sequence[str]:
    """Return the log file of ``--autotune``, which rank 0 writes, if rank 0 is on this host."""
    log = spec.config.autotune_log if spec.config.autotune else None
    return (log,) if log and _begins(spec, host) else ()


def _traces(spec: LaunchSpec, host: HostEntry) -> Sequence[str]:
    """Return the trace file of ranks on this host, including ``{rank}``, if they write any from the start."""
    name = spec.config.first_timeline
    return (name,) if name and ("{rank}" in name or _begins(spec, host)) else ()


def _begins(spec: LaunchSpec, host: HostEntry) -> bool:
    """Tell whether rank 0 will be on this host."""
    return bool(spec.hosts) and host.name == spec.hosts[0].name


def command_on(spec: LaunchSpec, spawner: Spawner, host: HostEntry) -> tuple[str, ...]:
    """Return the command of workers on a host."""
    if host.profile is not None:
        return host.profile.command
    return spec.command if spec.remote_command is None or spawner.is_local(host) else spec.remote_command


def advice_for(spec: LaunchSpec, spawner: Spawner, host: HostEntry, cause: str) -> str:
    """Return one line of advice about a worker that failed on a host; empty if there is none."""
    if spec.function is not None:
        return ""  # its program and its interpreter are the caller's
    here = spawner.is_local(host)
    python, option = (sys.executable, "") if here else (spec.reach.python, "--remote-python")
    return advise(cause, command_on(spec, spawner, host), python, option=option)


def base_environment(spec: LaunchSpec, spawner: Spawner, host: HostEntry) -> Mapping[str, str]:
    """Return the user's variables that are sent to a host."""
    if spawner.is_local(host):
        return spec.environ
    sent = for_other_hosts(spec.environ, spec.exported, export_all=spec.export_all)
    own = host.profile
    if own is None:
        return sent
    if "PYTHONPATH" in sent:
        sent["PYTHONPATH"] = os.pathsep.join(filter(None, (own.path, sent["PYTHONPATH"])))
    return {name: value for name, value in sent.items() if name not in own.kept}


class HostWorkers:
    """The workers of one host: their environment, and the frames that start them.

    Args:
        link: the link to its agent.
        admission: has admitted it, and serves.

    Attributes:
        environment: the variables that all workers of the host share.
        master: address and port for ``MASTER_ADDR`` and ``MASTER_PORT``, if rank 0 is there.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        spawner: Spawner,
        job_id: str,
        link: AgentLink,
        admission: Admission,
    ) -> None:
        host, reached = link.host, admission.reached(link)
        assert link.hello is not None
        base = base_environment(spec, spawner, host)
        chosen = bool(spec.nics.rules(host.name).items)
        self.environment = {**interface_variables(reached.address, chosen=chosen), **base}
        self.master = reached.address.address, reached.master_port
        self._spec = spec
        self._job_id = job_id
        self._hello = link.hello
        self._address = reached.address.address
        self._rendezvous = admission.endpoint(link)
        self._command = command_on(spec, spawner, host)
        # The names of variables on the host that limit threads count as well.
        self._limits = base if host.profile is None else {**base, **dict.fromkeys(host.profile.limits, "")}

    def threads(self, local_size: int) -> dict[str, str]:
        """Return the variables that share the host's cores among so many workers."""
        cores = self._hello.cores
        return thread_defaults(cores, local_size, self._limits, machine_cores=self._hello.machine_cores)

    def spawn(
        self,
        number: int,
        slot: Slot,
        master: tuple[str, int] | None,
        *,
        restart: int = 0,
        max_restarts: int | None,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> Spawn:
        """Return the frame that starts a worker.

        Args:
            slot: its place; in an elastic job, the one that it will probably get.
            master, restart, max_restarts: as for ``worker_environment``.
            more: further variables for this worker.
        """
        env = worker_environment(
            slot,
            job_id=self._job_id,
            epoch=0,
            rendezvous=self._rendezvous,
            secret=self._spec.secret,
            address=self._address,
            master=master,
            restart=restart,
            max_restarts=max_restarts,
        )
        return Spawn(
            number,
            self._command,
            {**env, **self.threads(slot.local_size), **more},
            stdin=slot.rank == self._spec.stdin_rank,
            task=self._spec.function is not None,
        )
