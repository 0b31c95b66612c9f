"""Flags for the way to other hosts and for the environment there, and the values that they yield."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping

from hvdgloo.config import Config
from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli.setting_flags import AddArgument
from hvdgloo.runner.job.environment import parse_exports, read_env_file
from hvdgloo.runner.job.spec import Reach
from hvdgloo.runner.transport.template import parse_template


def add_reach_flags(add: AddArgument) -> None:
    """Add the flags for the way to other hosts."""
    add("-p", "--ssh-port", type=_port, metavar="PORT", yaml="ssh.port", help="port of sshd on the hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", yaml="ssh.identity_file", help="private key for ssh")
    add(
        "--ssh-args",
        default="",
        metavar="ARGUMENTS",
        yaml="ssh.args",
        help="further arguments for ssh, as one word: --ssh-args='-J gate -o Compression=yes'",
    )
    add(
        "--agent-command",
        metavar="COMMAND",
        yaml="agent_command",
        help="reach hosts by this command instead of ssh; it connects standard input and output to what it runs there: "
        "'kubectl exec -i {host} --'",
    )
    add("--no-slurm", action="store_true", yaml="no_slurm", help="take neither hosts nor srun from a Slurm allocation")
    add(
        "--wait-for-hosts",
        action=argparse.BooleanOptionalAction,
        yaml="wait_for_hosts",
        help="keep trying hosts that are not up yet, until the start timeout (default: with --agent-command only)",
    )


def add_environment_flags(add: AddArgument) -> None:
    """Add the flags for the environment of workers on other hosts."""
    add(
        "-x",
        action="append",
        dest="exports",
        metavar="NAME[=VALUE]",
        yaml="environment.variables",
        help="pass this variable to the workers, on all hosts; may be repeated",
    )
    add(
        "--env-file",
        action="append",
        metavar="FILE",
        yaml="environment.file",
        help="the same from a file, with one NAME=VALUE in each line",
    )
    add(
        "--export",
        choices=("all", "named"),
        default="all",
        yaml="environment.export",
        help="which variables workers on other hosts get: all but those specific to a host (default), or only "
        "settings and the variables that -x and --env-file name",
    )
    add(
        "--remote-python",
        metavar="PATH",
        yaml="remote_python",
        help="the interpreter on other hosts (default: the same path as here)",
    )


def reach_from(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Reach:
    """Return the way to other hosts, according to the command line.

    Args:
        arguments: the parsed command line.
        environ: all variables, including those set by flags.

    Raises:
        ConfigError: a value cannot be used.
    """
    try:
        ssh_args = tuple(shlex.split(arguments.ssh_args))
    except ValueError as error:
        raise ConfigError(f"--ssh-args {arguments.ssh_args}: {error}") from None
    return Reach(
        python=arguments.remote_python or sys.executable,
        connect_timeout=Config.from_env(environ, only={"connect_timeout"}).connect_timeout,
        silence=arguments.heartbeat_timeout,
        wait_for_hosts=arguments.wait_for_hosts,
        ssh_port=arguments.ssh_port,
        ssh_identity_file=arguments.ssh_identity_file,
        ssh_args=ssh_args,
        agent_command=() if arguments.agent_command is None else parse_template(arguments.agent_command),
    )


def exports_from(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the command line passes on by name; ``-x`` takes precedence over files.

    Raises:
        ConfigError: a variable cannot be used; the text names the flag, or the file and line.
    """
    exports: dict[str, str] = {}
    for path in arguments.env_file or ():
        exports.update(read_env_file(path, environ))
    exports.update(parse_exports(arguments.exports or (), environ))
    return exports


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)
