"""``hvdgloo-run``: from the command line to a LaunchSpec.

The flags are the same as ``horovodrun``'s, so that scripts keep working: a flag that has a meaning here means the same,
a flag without one is accepted with a notice, and a flag that would change the job is refused.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TextIO

from hvdgloo._platform import interrupts
from hvdgloo.config import VARIABLES_CHECKED, unknown_variables, without_place
from hvdgloo.errors import ConfigError, HvdglooError, JobFailedError, LaunchError, MissingDependencyError
from hvdgloo.rendezvous._auth import generate_secret
from hvdgloo.runner.cli import config_file, setting_flags, tune
from hvdgloo.runner.cli.config_file import FileContent
from hvdgloo.runner.cli.elastic import examined, options_from
from hvdgloo.runner.cli.flags import (
    PROGRAM,
    TUNE_SECONDS,
    Parser,
    build_parser,
    judge_known_flags,
    misplaced,
    misplaced_in_vain,
    output_from,
    program_as_value,
    split,
    times_from,
    views_from,
)
from hvdgloo.runner.cli.reach import exports_from, reach_from
from hvdgloo.runner.cli.torchrun import as_command, on_each_host, processes_here
from hvdgloo.runner.console.writer import is_broken_pipe
from hvdgloo.runner.job.command import resolve_command, resolve_elsewhere
from hvdgloo.runner.job.environment import working_directory
from hvdgloo.runner.job.host_sources import take_inventory
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.version import __version__

USAGE_ERROR = 2

_HELP = frozenset({"-h", "--help", "--help-all"})

_WIDTH, _WIDEST = 100, 120  # of reports: in a file, and on a terminal at most


@dataclass(frozen=True)
class CommandLine:
    """A job from the command line, with notices for the user."""

    spec: LaunchSpec
    notices: tuple[str, ...] = ()


def command() -> NoReturn:
    """Run ``main``, and end the process."""
    status = main()
    interrupts.end_at_once()
    # At exit, Python looks for garbage among all objects, which would take longer than everything else that is left.
    gc.freeze()
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    stdout, stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    try:
        return _run(sys.argv[1:] if argv is None else list(argv), stdout, stderr, alone=argv is None)
    except JobFailedError as error:
        return _complain(stderr, error, error.exit_code)
    except (ConfigError, MissingDependencyError) as error:
        return _complain(stderr, error, USAGE_ERROR)
    except HvdglooError as error:
        return _complain(stderr, error, 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _complain(stderr: TextIO, error: Exception, status: int) -> int:
    stderr.write("".join(f"{PROGRAM}: {line}\n" for line in str(error).splitlines()))
    return status


def _nowhere() -> TextIO:
    return open(os.devnull, "w")


def _run(argv: Sequence[str], stdout: TextIO, stderr: TextIO, *, alone: bool) -> int:
    """Run the command line with these streams, and return the exit status.

    Args:
        alone: True if this process is the command itself rather than a program that calls ``main``.
    """
    if argv[:2] == ["timeline", "merge"]:
        from hvdgloo.runner.cli import trace_merge

        return _print(trace_merge.main(argv[1:]) + "\n", stdout, stderr)
    if argv[:2] == ["report", "compare"]:
        from hvdgloo.runner.cli import report_comparison

        interrupts.raise_again()
        try:
            report_comparison.main(argv[2:], stdout)
            stdout.flush()
            return 0
        except OSError as error:
            return _unwritable(error, stdout, stderr)
    if argv[:1] == ["top"]:
        from hvdgloo._observe.top import command as top

        interrupts.raise_again()
        try:
            return top.main(argv[1:], stdout, os.environ)
        except OSError as error:
            return _unwritable(error, stdout, stderr)
    parser = build_parser()
    flags, command, tuned = split_all(argv, parser.values, "tune")
    doctor = False
    if not tuned:
        flags, command, doctor = split_all(argv, parser.values)
    if not _HELP.isdisjoint(flags):
        usual = parser.format_help if "--help-all" in flags else parser.brief_help
        shown = parser.doctor_help if doctor else parser.tune_help if tuned else usual
        return _print(shown(), stdout, stderr)
    given = parser.given(flags)
    if given.json and not (doctor or tuned):
        raise ConfigError(f"--json is for {PROGRAM} doctor and {PROGRAM} tune")
    if not tuned:
        tune.check(given)
    if given.version:
        return _print(f"{__version__}\n", stdout, stderr)
    if given.check_build:
        from hvdgloo.runner.cli.build_report import build_table

        return _print(build_table(), stdout, stderr)
    if not command and (advice := program_as_value(flags, parser.values)):
        raise ConfigError(advice)
    line = command_line(parser, given, command, doctor=doctor or tuned)
    for notice in line.notices:
        stderr.write(f"{PROGRAM}: {notice}\n")
    stderr.flush()
    # The launcher's heavier half is imported here, because --help and mistyped flags do not need it.
    if doctor:
        from hvdgloo.runner.doctor.doctor import run

        interrupts.raise_again()
        found, well = run(line.spec, stderr=stderr, width=_width(stdout), json=bool(given.json))
        return _print(found, stdout, stderr) or int(not well)
    if tuned:
        interrupts.raise_again()
        found = tune.run(line.spec, given, command, default_seconds=TUNE_SECONDS, stderr=stderr)
        return _print(found, stdout, stderr)
    from hvdgloo.runner.launch import launch
    from hvdgloo.runner.surroundings import Surroundings

    report = launch(line.spec, Surroundings(stdout, stderr, fork=alone))
    first = report.outcome.first
    if first is not None and first.status > 0 and not report.advice:
        usage_error = first.status == USAGE_ERROR
        hint = misplaced_in_vain(command, parser.values, report.last_lines, usage_error=usage_error)
        report = replace(report, advice=hint)
    summary = report.summary(whole=False)
    if summary:
        # All output has been written; if it has lost its reader, that no longer matters here.
        try:
            stderr.write("".join(f"{PROGRAM}: {text}\n" for text in summary.splitlines()))
            stderr.flush()
        except OSError:
            pass
    return report.exit_code


def _print(text: str, stdout: TextIO, stderr: TextIO) -> int:
    """Write the text, and return the exit status."""
    try:
        stdout.write(text)
        stdout.flush()
        return 0
    except OSError as error:
        return _unwritable(error, stdout, stderr)


def _unwritable(error: OSError, stdout: TextIO, stderr: TextIO) -> int:
    """Return the exit status for a failure of standard output: a reader that has gone (``| head``) is no reason for a
    traceback."""
    # What is still buffered would fail again when the interpreter ends.
    if stdout is sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
    if is_broken_pipe(error):
        return 128 + signal.SIGPIPE
    return _complain(stderr, LaunchError(f"standard output cannot be written: {error.strerror}"), 1)


def _width(stdout: TextIO) -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST) if stdout.isatty() else _WIDTH


def split_all(
    argv: Sequence[str], values: Mapping[str, int], word: str = "doctor"
) -> tuple[list[str], list[str], bool]:
    """Return flags, command, and whether the job is to be examined rather than run: ``doctor`` (or another word) may
    come before or after the flags.

    A program with the name of a subcommand is run by ``-- doctor``.
    """
    flags, command = split(argv, values)
    if argv[len(flags) : len(flags) + 1] != [word]:
        return flags, command, False
    more, command = split(command[1:], values)
    return flags + more, command, True


def command_line(
    parser: Parser, given: argparse.Namespace, command: Sequence[str], *, doctor: bool = False
) -> CommandLine:
    """Build a job from the given flags.

    Args:
        doctor: no command is needed, and notices about starting processes are left out.

    Raises:
        ConfigError: a value cannot be used, or there is no such command.
    """
    notices = judge_known_flags(given)
    content = FileContent() if given.config_file is None else config_file.read(given.config_file, parser)
    notices += [f"{given.config_file}: {key} has no effect here" for key in content.ignored]
    arguments = parser.complete(given, content.flags)
    environ = {**os.environ, **content.environ, **setting_flags.from_flags(arguments)}
    exports = exports_from(arguments, environ)
    tune.check_log(arguments, environ)
    environ = without_place({**environ, **exports})
    environ.pop(VARIABLES_CHECKED, None)  # of a job around this one
    notices += unknown_variables(environ)
    environ[VARIABLES_CHECKED] = "1"
    options = options_from(arguments)
    np = processes_here(arguments, environ)
    asked = arguments.np if np is None else np
    command = as_command(arguments, command)
    inventory = take_inventory(
        environ,
        hosts=arguments.hosts,
        hostfile=arguments.hostfile,
        np=asked if options is None else options.size(asked),
        slurm=not arguments.no_slurm,
        discovered=options is not None and options.discovered,
    )
    inventory = on_each_host(arguments, np, inventory)
    elastic = None if options is None else options.spec(inventory, environ)
    if doctor and elastic is not None:
        inventory, elastic = examined(inventory, elastic), None
    notices += () if doctor else inventory.notices
    if asked is None and not doctor:
        notices += filter(None, [misplaced(command, dict.fromkeys(parser.spellings("np"), 1))])
    reach = inventory.completed(reach_from(arguments, environ))
    cwd = working_directory(environ)
    workers_command = (
        resolve_command(
            command,
            python=None if arguments.no_python else sys.executable,
            cwd=cwd,
            search_path=environ.get("PATH"),
            module_path=sys.path,
        )
        if command or not doctor
        else ()
    )
    spec = LaunchSpec(
        command=workers_command,
        remote_command=(
            resolve_elsewhere(command, python=None if arguments.no_python else reach.python) if command else None
        ),
        hosts=inventory.hosts,
        np=inventory.np,
        cwd=cwd,
        environ=environ,
        exported=frozenset(exports),
        export_all=arguments.export == "all",
        secret=generate_secret(),
        stdin_rank=arguments.stdin,
        reach=reach,
        network_interfaces=(*(arguments.nics or ()), *(arguments.network_interface or ())),
        times=times_from(arguments),
        output=output_from(arguments),
        elastic=elastic,
        max_restarts=arguments.max_restarts,
        views=views_from(arguments, command),
    )
    return CommandLine(spec, tuple(notices))
