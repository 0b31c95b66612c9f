"""Agents started by the system's ssh: users' own ssh_config, keys, agents and jump hosts work as they do by hand.

One session per host. Nothing may prompt in the middle of a job, so ssh runs in batch mode; host keys are checked as the
user's own configuration says, and nothing is forwarded except what the user's configuration forwards.

ssh itself ends with status 255, whatever went wrong, and says why in words that have changed little in twenty years.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass

from hvdgloo._platform.spelling import followed_by
from hvdgloo.errors import LaunchError
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.processes.bootstrap import CommandStream, agent_argv
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Ending, Retry, other_failure, python_failure

SSH_FAILED = 255

_ALIVE_COUNT = 3  # unanswered questions after which ssh gives up


class SshSpawner:
    """One ssh session for each host."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def start(self, host: HostEntry) -> CommandStream:
        try:
            return CommandStream(ssh_argv(host, self._reach))
        except LaunchError as error:
            raise LaunchError(
                followed_by(
                    error, "install an ssh client (openssh-client), or reach hosts in another way (--agent-command)"
                )
            ) from error

    def is_local(self, host: HostEntry) -> bool:
        return False

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        return diagnose(host, ending, self._reach)


def ssh_argv(host: HostEntry, reach: Reach) -> tuple[str, ...]:
    """Return the command line. ssh uses an option's first value, so the user's arguments come first."""
    # One word for ssh, which passes it to the login shell there.
    return (*ssh_options(host, reach), "--", host.name, "exec " + shlex.join(agent_argv(reach.python)))


def ssh_options(host: HostEntry, reach: Reach) -> tuple[str, ...]:
    """Return the command line without host and command."""
    argv = ["ssh", *reach.ssh_args]
    if reach.ssh_port is not None:
        argv += ["-p", str(reach.ssh_port)]
    if reach.ssh_identity_file is not None:
        argv += ["-i", reach.ssh_identity_file]
    argv += ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(reach.connect_timeout))}"]
    # Ports that the user's configuration forwards are already taken if the user is logged in there, too.
    argv += ["-o", "ClearAllForwardings=yes"]
    # A connection that others may share would outlive the job, or die with it while others use it.
    argv += ["-o", "ControlMaster=no"]
    # The launcher judges silence on its own; this ends a client whose launcher was killed and whose network was cut.
    interval = max(1, math.ceil(reach.silence / _ALIVE_COUNT))
    argv += ["-o", f"ServerAliveInterval={interval}", "-o", f"ServerAliveCountMax={_ALIVE_COUNT}"]
    if host.user:
        argv += ["-l", host.user]
    return tuple(argv)


def _by_hand(host: HostEntry, reach: Reach) -> str:
    """Return the command with which the user can see the same failure and answer questions."""
    words = ["ssh"]
    words += reach.ssh_args
    if reach.ssh_port is not None:
        words += ["-p", str(reach.ssh_port)]
    if reach.ssh_identity_file is not None:
        words += ["-i", reach.ssh_identity_file]
    return shlex.join([*words, f"{host.user}@{host.name}" if host.user else host.name])


@dataclass(frozen=True)
class _Rule:
    """Words of ssh, what they mean, and the remedy. ``{by_hand}``, ``{said}`` and others are filled in."""

    pattern: str  # compiled on the first use, which a start that succeeds never makes
    cause: Cause
    text: str
    retry: Retry = Retry.NEVER


_RULES = (
    _Rule(
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad configuration|unknown option"
        r"|unknown key type|^usage: ssh|keyword .* extra arguments|Cannot execute command-line and remote command"
        r"|Bad port|missing argument|no argument after keyword",
        Cause.CONFIGURATION,
        "ssh does not accept its options: {said}; look at --ssh-args and at the ssh_config of this machine",
    ),
    _Rule(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        Cause.HOST_KEY_CHANGED,
        "its host key has changed; if the machine was reinstalled, remove the old key "
        "(ssh-keygen -R {known_as}) and accept the new one ({by_hand})",
    ),
    _Rule(
        r"Host key verification failed|host key is known for|authenticity of host .* can't be established"
        r"|REVOKED HOST KEY|No host key is known",
        Cause.HOST_KEY_UNKNOWN,
        "its host key is not known here, and there is no terminal to ask at; accept it once by hand ({by_hand}), or "
        "collect all keys with ssh-keyscan",
    ),
    _Rule(
        r"Permission denied \(|Permission denied, please try again|Too many authentication failures"
        r"|UNPROTECTED PRIVATE KEY FILE|No supported authentication methods|password has expired"
        r"|Password change required",
        Cause.AUTHENTICATION,
        "it refuses the login: {said}; ssh must work without a password: try {batch_by_hand}, then ssh-copy-id, "
        "ssh-add, or --ssh-identity-file",
    ),
    _Rule(
        r"Temporary failure in name resolution|Try again",
        Cause.NAME,
        "its name cannot be looked up now (temporary failure in name resolution); look at this machine's DNS",
        Retry.A_FEW_TIMES,
    ),
    _Rule(
        r"Could not resolve hostname|Name or service not known|nodename nor servname|No address associated"
        r"|Name has no usable address",
        Cause.NAME,
        "its name cannot be looked up; correct it, or make it known to DNS, /etc/hosts or ssh_config",
    ),
    _Rule(
        r"Connection refused",
        Cause.REFUSED,
        "it refuses the connection{port}; does sshd run there, and on this port (--ssh-port)?",
    ),
    _Rule(
        r"Timeout, server .* not responding",
        Cause.TIMED_OUT,
        "it was reached, and then nothing more came from it; was it cut off or switched off meanwhile?",
    ),
    _Rule(
        r"Connection timed out|Operation timed out|timed out during banner exchange|Connection to .* timed out",
        Cause.TIMED_OUT,
        "nothing answers{port} within {timeout} s; is it up, and does a firewall let ssh through "
        "(--connect-timeout-seconds)?",
    ),
    _Rule(
        r"No route to host|Network is unreachable|Host is down|Network is down|Cannot assign requested address",
        Cause.NO_ROUTE,
        "there is no route to it ({said}); is it up and in a network that this machine reaches?",
    ),
    _Rule(
        r"System is booting up|pam_nologin|Unprivileged users are not permitted to log in",
        Cause.NOT_THERE,
        "it does not let users in yet: {said}",
        Retry.A_FEW_TIMES,
    ),
    _Rule(
        r"Unable to negotiate with|no matching (host key|cipher|key exchange|MAC)",
        Cause.CONFIGURATION,
        "its sshd and this ssh have no algorithm in common: {said}; allow one in ssh_config",
    ),
    _Rule(
        r"kex_exchange_identification|ssh_exchange_identification|Connection (reset|closed) by"
        r"|Connection reset by peer|Broken pipe|Exceeded MaxStartups|Not allowed at this time|ssh_dispatch_run_fatal"
        r"|mux_client_request_session|client_loop: send disconnect|Connection to .* closed by remote host",
        Cause.DROPPED,
        "it drops the connection before the login ({said}); is sshd's MaxStartups too small, or does hosts.deny or "
        "fail2ban keep this machine out?",
        Retry.A_FEW_TIMES,
    ),
)
"""In the order in which they are tried: a jump host's refusal, for example, is followed by a dropped connection."""

_NOT_UP = frozenset({Cause.NAME, Cause.REFUSED, Cause.TIMED_OUT, Cause.NO_ROUTE, Cause.NOT_THERE})
"""Causes that an attempt may report for a host that is still starting up."""


def diagnose(host: HostEntry, ending: Ending, reach: Reach) -> Diagnosis:
    """Explain why a session ended without an agent."""
    found = python_failure(ending, reach.python)
    if found is not None:
        return found
    # A login shell may pass on 255 from another program; but then nothing here matches.
    rule = next((rule for rule in _RULES if ending.status == SSH_FAILED and _matching(rule, ending)), None)
    if rule is None:
        return other_failure(ending, "ssh" if ending.status == SSH_FAILED else "its login shell or agent")
    port = f" on port {reach.ssh_port}" if reach.ssh_port is not None else ""
    text = rule.text.format(
        said=_matching(rule, ending),
        by_hand=_by_hand(host, reach),
        batch_by_hand=_by_hand(host, reach).replace("ssh", "ssh -o BatchMode=yes", 1),
        known_as=host.name if reach.ssh_port in (None, 22) else f"'[{host.name}]:{reach.ssh_port}'",
        port=port,
        timeout=f"{reach.connect_timeout:g}",
    )
    retry = Retry.UNTIL_THE_DEADLINE if reach.wait_for_hosts and rule.cause in _NOT_UP else rule.retry
    return Diagnosis(rule.cause, text, retry)


def _matching(rule: _Rule, ending: Ending) -> str:
    """Return the last line that contains the rule's words, without the leading name of ssh."""
    line = next((line for line in reversed(ending.lines) if re.search(rule.pattern, line)), "")
    return line.strip().removeprefix("ssh: ")
