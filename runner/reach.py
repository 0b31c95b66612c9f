"""The flags that say how other hosts are reached, and what they amount to."""

from __future__ import annotations

import argparse
import shlex
import sys

from hvdgloo.errors import ConfigError
from hvdgloo.runner.options import AddArgument
from hvdgloo.runner.spec import Reach


def add_reach_flags(add: AddArgument) -> None:
    """Add them to the command line."""
    add("-p", "--ssh-port", type=_port, metavar="PORT", yaml="ssh.port", help="port of sshd on the hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", yaml="ssh.identity_file", help="private key for ssh")
    add("--ssh-args", default="", metavar="ARGUMENTS", yaml="ssh.args", help="further arguments of ssh, in one word")
    add(
        "--remote-python",
        metavar="PATH",
        yaml="remote_python",
        help="the interpreter on other hosts (default: the same path as here)",
    )


def reach_from(arguments: argparse.Namespace, connect_timeout: float) -> Reach:
    """How hosts are reached, according to the command line.

    Raises:
        ConfigError: a value that cannot be used.
    """
    try:
        ssh_args = tuple(shlex.split(arguments.ssh_args))
    except ValueError as error:
        raise ConfigError(f"--ssh-args {arguments.ssh_args}: {error}") from None
    return Reach(
        python=arguments.remote_python or sys.executable,
        connect_timeout=connect_timeout,
        ssh_port=arguments.ssh_port,
        ssh_identity_file=arguments.ssh_identity_file,
        ssh_args=ssh_args,
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)
