"""Agents started by any command that connects standard input and output: ``kubectl exec``, ``docker exec``,
``nsenter``.

The command may fail because its host is not up yet (a pod that is being scheduled, a container that is being started),
and the words of all such commands for this cannot be known. So whatever is not known to be permanent is tried again,
until the start timeout.
"""

from __future__ import annotations

import os
import re
import shlex
import string
from collections.abc import Sequence

from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.processes.bootstrap import CommandStream, agent_argv
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Ending, Retry, other_failure, python_failure

FIELDS = {
    "host": "its name",
    "user": "what stands before the @ of user@host",
    "destination": "both, as given: user@host or host",
    "port": "--ssh-port",
    "command": "the agent's command line: as words if it stands alone, else as text for a shell",
    "shell": "the same as one word, quoted for a shell",
}
"""The names that may be in braces."""


class TemplateSpawner:
    """One command for each host.

    Args:
        hosts: those to which it will lead.

    Raises:
        ConfigError: the template uses a field that a host does not have.
    """

    def __init__(self, reach: Reach, hosts: Sequence[HostEntry]) -> None:
        self._reach = reach
        self._commands = {host.name: fill_in(reach.agent_command, host, reach) for host in hosts}

    def start(self, host: HostEntry) -> CommandStream:
        return CommandStream(self._commands[host.name])

    def is_local(self, host: HostEntry) -> bool:
        return False

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        return diagnose(ending, self._reach)


def parse_template(text: str) -> tuple[str, ...]:
    """Return the words of a template, split by a shell's rules.

    Raises:
        ConfigError: there are no words, or something unknown in braces.
    """
    try:
        words = tuple(shlex.split(text))
        fields = {field for word in words for _, field, _, _ in string.Formatter().parse(word) if field is not None}
    except ValueError as error:
        raise ConfigError(f"--agent-command {text}: {error}") from None
    if not words:
        raise ConfigError(
            "--agent-command: it is empty; write for example: --agent-command 'kubectl exec -i {host} --'"
        )
    unknown = sorted(fields - set(FIELDS))
    if unknown:
        known = ", ".join(f"{{{field}}}" for field in FIELDS)
        raise ConfigError(
            f"--agent-command {text}: there is no {{{unknown[0]}}}, only {known}; braces that are meant as such are "
            "written twice"
        )
    return words


def fill_in(template: Sequence[str], host: HostEntry, reach: Reach) -> tuple[str, ...]:
    """Return the command line for one host.

    Raises:
        ConfigError: a field is not given for this host.
    """
    agent = agent_argv(reach.python)
    values = {
        "host": host.name,
        "user": host.user,
        "destination": f"{host.user}@{host.name}" if host.user else host.name,
        "port": "" if reach.ssh_port is None else str(reach.ssh_port),
        "command": shlex.join(agent),
        "shell": shlex.join(agent),
    }
    argv: list[str] = []
    placed = False
    for word in template:
        fields = {field for _, field, _, _ in string.Formatter().parse(word) if field is not None}
        placed = placed or not fields.isdisjoint({"command", "shell"})
        for field in fields:
            if not values[field]:
                given = "--ssh-port" if field == "port" else f"user@{host.name}"
                raise ConfigError(
                    f"--agent-command uses {{{field}}}, which host {host.name} does not have: give {given}"
                )
        argv += agent if word == "{command}" else [word.format_map(values)]
    return tuple(argv) if placed else (*argv, *agent)


_USAGE = re.compile(
    r"unknown (shorthand )?flag|unrecognized option|invalid option|unknown option|unknown command|^usage:",
    re.IGNORECASE | re.MULTILINE,
)
_REFUSED = re.compile(
    r"Forbidden|Unauthorized|must be logged in|certificate|permission denied while trying to connect|Access denied"
    r"|Permission denied|Operation not permitted",
    re.IGNORECASE,
)


def diagnose(ending: Ending, reach: Reach) -> Diagnosis:
    """Explain why a command ended without an agent."""
    program = os.path.basename(reach.agent_command[0])
    found = python_failure(ending, reach.python) or _container_without_python(ending, reach.python)
    if found is not None:
        return found
    said = other_failure(ending, program).text
    if _USAGE.search(ending.text):
        return Diagnosis(Cause.CONFIGURATION, f"{said}; look at --agent-command")
    if _REFUSED.search(ending.text):
        return Diagnosis(Cause.AUTHENTICATION, f"{said}; {program} must work without questions here")
    retry = Retry.NEVER if reach.wait_for_hosts is False else Retry.UNTIL_THE_DEADLINE
    return Diagnosis(Cause.NOT_THERE, said, retry)


def _container_without_python(ending: Ending, python: str) -> Diagnosis | None:
    """Diagnose ``exec: "/opt/python": stat /opt/python: no such file or directory``, with any status."""
    line = next((line for line in ending.lines if python in line), "")
    if not re.search(r"no such file or directory|executable file not found", line, re.IGNORECASE):
        return None
    return python_failure(Ending(127, (line,)), python)
