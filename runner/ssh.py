"""Agents by way of the system's ssh: users' own ssh_config, keys, agents and jump hosts work as they do by hand.

One session per host. Nothing may prompt in the middle of a job, so ssh runs in batch mode; host keys are checked as the
user's own configuration says.
"""

from __future__ import annotations

import shlex

from hvdgloo.runner.reasons import Diagnosis, Ending, other_failure, python_failure
from hvdgloo.runner.remote import CommandStream, agent_argv
from hvdgloo.runner.spec import Host, Reach


class SshSpawner:
    """One ssh session for each host."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def start(self, host: Host) -> CommandStream:
        return CommandStream(ssh_argv(host, self._reach))

    def diagnose(self, host: Host, ending: Ending) -> Diagnosis:
        if ending.status == 255:
            return other_failure(ending, "ssh")
        return python_failure(ending, self._reach.python) or other_failure(ending, "its agent")

    def sweep(self, host: Host, job_id: str) -> None:
        """Nothing: the stream's end has told agent and warden there, and another session would wait for the network."""

    def address(self, host: Host) -> str:
        return host.name


def ssh_argv(host: Host, reach: Reach) -> tuple[str, ...]:
    """The command line. ssh takes the first value that it meets of an option, so the user's arguments come first."""
    argv = ["ssh", *reach.ssh_args]
    if reach.ssh_port is not None:
        argv += ["-p", str(reach.ssh_port)]
    if reach.ssh_identity_file is not None:
        argv += ["-i", reach.ssh_identity_file]
    argv += ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(reach.connect_timeout))}"]
    # What the user forwards in sessions of his own would clash with those.
    argv += ["-o", "ClearAllForwardings=yes"]
    if host.user:
        argv += ["-l", host.user]
    # One word for ssh, which hands it to the login shell there.
    return (*argv, "--", host.name, "exec " + shlex.join(agent_argv(reach.python)))
