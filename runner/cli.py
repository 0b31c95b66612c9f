"""``hvdgloo-run``: the command line, to a LaunchSpec.

The flags are those of ``horovodrun``, so that scripts keep working: what has a meaning here means the same, what has
none is accepted with a line that says so, and what would make it another job is refused.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, HvdglooError, JobFailedError
from hvdgloo.rendezvous.auth import generate_secret
from hvdgloo.runner import options
from hvdgloo.runner.command import resolve_command
from hvdgloo.runner.hosts import parse_hosts, read_hostfile
from hvdgloo.runner.machine import visible_gpus
from hvdgloo.runner.spec import GRACE_AFTER_FAILURE, GRACE_AFTER_SIGNAL, HEARTBEAT_TIMEOUT, Host, LaunchSpec
from hvdgloo.version import __version__

PROGRAM = "hvdgloo-run"
USAGE_ERROR = 2

_EPILOG = """\
The command is a Python file (run by this interpreter), -m and a module, or any program. Examples:
  hvdgloo-run -np 4 train.py --epochs 90
  hvdgloo-run -H localhost:4 -- python train.py
  hvdgloo-run -np 2 -m package.train

The exit status is that of the first worker that failed (128+N if signal N ended it), 0 only if all succeeded.
Ctrl-C is passed on to the workers, which then have the grace period to end; Ctrl-C again kills them at once. Ctrl-Z
stops the launcher alone: the workers go on, and their output waits for fg or bg.
"""


@dataclass(frozen=True)
class CommandLine:
    """What was asked for, and what is to be said about it."""

    spec: LaunchSpec
    notices: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    """Remembers how many values each flag takes, to find where the command begins."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        super().__init__(
            prog=PROGRAM,
            usage=f"{PROGRAM} [options] [--] command ...",
            description="Start the workers of a training job, watch over them, and leave nothing behind.",
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def group(self, title: str) -> options.AddArgument:
        group = self.add_argument_group(title)

        def add(*flags: str, **how: Any) -> argparse.Action:
            action = group.add_argument(*flags, **how)
            takes = action.nargs if isinstance(action.nargs, int) else 1
            self.values.update(dict.fromkeys(action.option_strings, takes))
            return action

        return add

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    stdout, stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    try:
        return _run(sys.argv[1:] if argv is None else list(argv), stdout, stderr)
    except JobFailedError as error:
        return _complain(stderr, error, error.exit_code)
    except ConfigError as error:
        return _complain(stderr, error, USAGE_ERROR)
    except HvdglooError as error:
        return _complain(stderr, error, 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _complain(stderr: TextIO, error: Exception, status: int) -> int:
    stderr.write(f"{PROGRAM}: {error}\n")
    return status


def _nowhere() -> TextIO:
    return open(os.devnull, "w")


def _run(argv: Sequence[str], stdout: TextIO, stderr: TextIO) -> int:
    parser = build_parser()
    flags, command = split(argv, parser.values)
    arguments = parser.parse_args(flags)
    if arguments.version:
        stdout.write(f"{__version__}\n")
        return 0
    if arguments.check_build:
        stdout.write(build_table())
        return 0
    line = command_line(arguments, command)
    for notice in line.notices:
        stderr.write(f"{PROGRAM}: {notice}\n")
    stderr.flush()
    # The launcher's heavier half; --help and a mistyped flag do without it.
    from hvdgloo.runner.launch import launch

    report = launch(line.spec, stdout=stdout, stderr=stderr)
    summary = report.summary()
    if summary:
        # All output is out; if nobody reads it any more, that is no news here.
        try:
            stderr.write("".join(f"{PROGRAM}: {text}\n" for text in summary.splitlines()))
            stderr.flush()
        except OSError:
            pass
    return report.outcome.exit_code


def split(argv: Sequence[str], values: dict[str, int]) -> tuple[list[str], list[str]]:
    """The launcher's own flags, and the command.

    The command begins after ``--``, with ``-m``, or with the first word that is neither a flag nor a flag's value.

    Raises:
        ConfigError: a flag that does not exist, with the one that may have been meant.
    """
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return list(argv[:position]), list(argv[position + 1 :])
        if word == "-m" or not word.startswith("-") or word == "-":
            break
        flag, equals, _ = word.partition("=")
        if flag not in values:
            raise ConfigError(_unknown(flag, values))
        position += 1 if equals else 1 + values[flag]
    return list(argv[:position]), list(argv[position:])


def _unknown(flag: str, values: dict[str, int]) -> str:
    close = difflib.get_close_matches(flag, values, n=2, cutoff=0.6)
    close += [known for known in values if not close and known.startswith(flag)][:2]
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; {PROGRAM} --help lists them all"
    return f"there is no option {flag}{hint} (the command's own options come after it)"


def build_parser() -> _Parser:
    """The flags, in groups as ``--help`` shows them."""
    parser = _Parser()
    add = parser.group("what to run, and where")
    parser.values.update({"-h": 0, "--help": 0})
    add(
        "-np",
        "--num-proc",
        dest="np",
        type=_positive,
        metavar="N",
        help="number of worker processes; by default all slots of the hosts, without hosts one per GPU",
    )
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and how many workers each may run")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same in a file, a line per host: name slots=N")
    add(
        "--stdin",
        type=_natural,
        metavar="RANK",
        help="give this rank the launcher's standard input, for a debugger; all others have none",
    )
    add("--config-file", metavar="FILE", help="a YAML file with settings; flags win over it")
    add("-cb", "--check-build", action="store_true", help="show what can be used on this machine, and exit")
    add("-v", "--version", action="store_true", help="show the version, and exit")
    add("--verbose", action="store_true", help="say what is being done")
    add = parser.group("output")
    add(
        "--output-filename",
        metavar="DIRECTORY",
        help="also write what each rank prints, byte for byte, to DIRECTORY/rank.<rank>/stdout and stderr",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamps",
        action="store_true",
        help="begin every line with the time",
    )
    add = parser.group("ends")
    add(
        "--grace-period",
        type=_seconds,
        metavar="SECONDS",
        help="time between asking workers to end and killing them "
        f"(default: {GRACE_AFTER_FAILURE:g} after a failure, {GRACE_AFTER_SIGNAL:g} after a signal)",
    )
    add("--heartbeat-timeout", type=_seconds, default=HEARTBEAT_TIMEOUT, metavar="SECONDS",
        help=f"silence after which a host counts as lost (default: {HEARTBEAT_TIMEOUT:g})")  # fmt: skip
    options.add_setting_flags(parser.group("settings of the workers"))
    _add_known_flags(parser)
    return parser


def _add_known_flags(parser: _Parser) -> None:
    """Horovod's other flags, so that they are not taken for mistakes."""
    add = parser.group("accepted from horovodrun")
    hidden = argparse.SUPPRESS
    add("--gloo", action="store_true", help="the only controller, and the default")
    add("-p", "--ssh-port", type=_positive, help=hidden)
    add("-i", "--ssh-identity-file", help=hidden)
    add("--disable-cache", action="store_true", help=hidden)
    add("--network-interfaces", "--network-interface", action="append", help=hidden)
    for flag, count, _ in (*options.IGNORED_FLAGS, *options.REFUSED_FLAGS):
        if flag in parser.values:
            continue  # it has become a setting
        if count == 0:
            add(flag, dest=flag, action="store_true", help=hidden)
        else:
            add(flag, dest=flag, nargs=count, help=hidden)


def command_line(arguments: argparse.Namespace, command: Sequence[str]) -> CommandLine:
    """From parsed flags to a job.

    Raises:
        ConfigError: a value that cannot be used.
        LaunchError: there is no such command.
    """
    notices: list[str] = []
    _judge_known_flags(arguments, notices)
    environ = dict(os.environ)
    if arguments.config_file is not None:
        from_file, ignored = options.from_file(arguments.config_file)
        environ.update(from_file)
        notices += [f"{arguments.config_file}: {key} has no effect here" for key in ignored]
    environ.update(options.from_flags(arguments))
    hosts, np = choose_hosts(arguments, environ, notices)
    directory = arguments.output_filename
    cwd = os.getcwd()
    spec = LaunchSpec(
        command=resolve_command(
            command, python=sys.executable, cwd=cwd, search_path=environ.get("PATH"), module_path=sys.path
        ),
        hosts=hosts,
        np=np,
        cwd=cwd,
        environ=environ,
        secret=generate_secret(),
        start_timeout=Config.from_env(environ).start_timeout,
        grace_period=arguments.grace_period,
        heartbeat_timeout=arguments.heartbeat_timeout,
        output_directory=None if directory is None else os.path.abspath(directory),
        timestamps=arguments.timestamps,
        stdin_rank=arguments.stdin,
        verbose=arguments.verbose,
    )
    return CommandLine(spec, tuple(notices))


def choose_hosts(
    arguments: argparse.Namespace, environ: dict[str, str], notices: list[str]
) -> tuple[tuple[Host, ...], int]:
    """Hosts and number of workers, with the defaults for what was not given."""
    if arguments.hosts is not None and arguments.hostfile is not None:
        raise ConfigError("give either --hosts or --hostfile, not both")
    np: int | None = arguments.np
    if arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts)
    elif arguments.hostfile is not None:
        hosts = read_hostfile(arguments.hostfile)
    else:
        if np is None:
            gpus = visible_gpus(environ)
            np = max(1, gpus)
            found = f"one for each of {gpus} GPUs" if gpus else "there is no GPU"
            notices.append(f"starting {np} process{'es' if np > 1 else ''} ({found}); -np chooses another number")
        return (Host("localhost", np),), np
    return hosts, np if np is not None else sum(host.slots for host in hosts)


def _judge_known_flags(arguments: argparse.Namespace, notices: list[str]) -> None:
    given = vars(arguments)
    for flag, _, reason in options.REFUSED_FLAGS:
        if given.get(flag):
            raise ConfigError(f"{flag}: {reason}")
    notices += [f"{flag}: {reason}" for flag, _, reason in options.IGNORED_FLAGS if given.get(flag)]


def build_table() -> str:
    """What ``--check-build`` prints."""
    frameworks = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
    found = {name: importlib.util.find_spec(module) is not None for name, module in frameworks.items()}
    operations = {"NCCL": found["PyTorch"] and _nccl(), "DDL": False, "CCL": False, "MPI": False}
    blocks: tuple[tuple[str, dict[str, bool]], ...] = (
        (f"hvdgloo v{__version__}:", {}),
        ("Available Frameworks:", found),
        ("Available Controllers:", {"MPI": False, "Gloo": True}),
        ("Available Tensor Operations:", {**operations, "Gloo": found["PyTorch"]}),
    )
    return "\n".join(
        f"{title}\n" + "".join(f"    [{'X' if there else ' '}] {name}\n" for name, there in rows.items())
        for title, rows in blocks
    )


def _nccl() -> bool:
    import torch.distributed

    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
