"""``hvdgloo-run tune``: from its flags to a measurement and its files."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping, Sequence
from typing import TextIO

from hvdgloo._platform.files import overwrite
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, JobFailedError
from hvdgloo.runner.cli import setting_flags
from hvdgloo.runner.job.spec import LaunchSpec

FLAGS = ("save", "plot", "seconds", "allow_lossy")
"""Flags that mean nothing for a job, by their ``dest``."""


def check(given: argparse.Namespace) -> None:
    """Refuse flags of ``tune`` if a job is to be started.

    Raises:
        ConfigError: such a flag was given.
    """
    for name in FLAGS:
        if getattr(given, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for hvdgloo-run tune")


def check_log(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Refuse ``--autotune-log-file`` if autotuning is off. (A variable may be set for jobs of any kind.)

    Args:
        arguments: the parsed command line.
        environ: all variables, including those set by flags.

    Raises:
        ConfigError: the flag was given.
    """
    if setting_flags.is_given(arguments, "autotune_log") and not Config.from_env(environ).autotune:
        raise ConfigError("--autotune-log-file needs --autotune; add it, or leave the file out")


def run(
    spec: LaunchSpec, given: argparse.Namespace, program: Sequence[str], *, default_seconds: int, stderr: TextIO
) -> str:
    """Measure, write the requested files, and return the text to print.

    Raises:
        ConfigError: a file cannot be written, the program is not a Python program, or there is only one rank.
        LaunchError, JobFailedError: a job of the measurement failed.
    """
    from hvdgloo.runner.tuning import campaign, report

    campaign.check_size(spec)
    files = [path for path in (given.save, given.plot) if path is not None]

    def say(text: str) -> None:
        stderr.write(f"hvdgloo-run: {text}\n")
        stderr.flush()

    for path in files:  # before anything is measured
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            say(f"creating the directory {folder}")
        _write(path, "", append=True)

    try:
        found = campaign.run(
            spec,
            program=program,
            seconds=given.seconds or default_seconds,
            stderr=stderr,
            say=say,
            allow_lossy=bool(given.allow_lossy),
        )
    except KeyboardInterrupt:  # between two jobs
        raise JobFailedError("stopped by SIGINT", exit_code=128 + signal.SIGINT) from None
    if given.save is not None:
        _write(given.save, report.as_yaml(found))
        say(f"saved the settings to {given.save}; use them with hvdgloo-run --config-file {given.save} ...")
    if given.plot is not None:
        _write(given.plot, report.as_svg(found))
        say(f"saved the picture to {given.plot}")
    return report.as_json(found) if given.json else report.as_text(found)


def _write(path: str, text: str, *, append: bool = False) -> None:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with os.fdopen(overwrite(path, append=append), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
