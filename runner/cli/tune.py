"""``hvdgloo-run tune``: from its flags to a measurement, and where the results go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TextIO

from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import LaunchSpec

FLAGS = ("save", "plot", "seconds")
"""Those that mean nothing for a job, by their ``dest``."""


def check(given: argparse.Namespace) -> None:
    """Refuse flags of ``tune`` where a job is to be started.

    Raises:
        ConfigError: there is one.
    """
    for name in FLAGS:
        if getattr(given, name) is not None:
            raise ConfigError(f"--{name} is for hvdgloo-run tune")


def run(
    spec: LaunchSpec, given: argparse.Namespace, program: Sequence[str], *, default_seconds: int, stderr: TextIO
) -> str:
    """Measure, write the files that were asked for, and return what is to be printed.

    Raises:
        ConfigError: a file cannot be written, or the program is none of Python's.
        LaunchError, JobFailedError: a job of the measurement has failed.
    """
    from hvdgloo.runner.tuning import campaign, report

    files = [path for path in (given.save, given.plot) if path is not None]
    for path in files:  # before anything is measured
        _write(path, "", mode="a")

    def say(text: str) -> None:
        stderr.write(f"hvdgloo-run: {text}\n")
        stderr.flush()

    found = campaign.run(spec, program=program, seconds=given.seconds or default_seconds, stderr=stderr, say=say)
    if given.save is not None:
        _write(given.save, report.as_yaml(found))
        say(f"settings are in {given.save}: hvdgloo-run --config-file {given.save} ...")
    if given.plot is not None:
        _write(given.plot, report.as_svg(found))
        say(f"the picture is {given.plot}")
    return report.as_json(found) if given.json else report.as_text(found)


def _write(path: str, text: str, mode: str = "w") -> None:
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
