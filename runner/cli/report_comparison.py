"""``hvdgloo-run report compare``: two jobs side by side, by their reports."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import TextIO

import msgspec

from hvdgloo._observe.comparison import Comparison, Row, compare, described
from hvdgloo._observe.view import SCHEMA, Snapshot
from hvdgloo._platform.tables import aligned
from hvdgloo.errors import ConfigError

USAGE = "hvdgloo-run report compare EARLIER LATER"
_HEADINGS = ("", "earlier", "later", "change")
_STYLES = {"better": "green", "worse": "red"}


class _Report(msgspec.Struct):
    """The part of a report that is compared."""

    snapshot: Snapshot


def main(arguments: Sequence[str], stdout: TextIO) -> None:
    """Run the subcommand.

    Raises:
        ConfigError: the arguments are wrong, or a file is not a report.
    """
    if arguments in (["-h"], ["--help"]):
        stdout.write(f"usage: {USAGE}\n\nCompare two jobs by what hvdgloo-run --report has written (.json or .html).\n")
        return
    if len(arguments) != 2 or any(argument.startswith("-") for argument in arguments):
        raise ConfigError(f"report: write {USAGE}, with two files that hvdgloo-run --report has written")
    jobs = [read(path) for path in arguments]
    comparison = compare(*jobs)
    for word, path, job in zip(("earlier", "later"), arguments, jobs, strict=True):
        stdout.write(f"{word + ':':<8} {path}: {described(job)}\n")
    stdout.write(f"\n{comparison.headline}\n")
    for title, rows in _tables(comparison):
        stdout.write(f"\n{title}\n")
        _print(rows, stdout)


def read(path: str) -> Snapshot:
    """Read a job from its report: the JSON file, or the HTML file with the JSON file next to it.

    Raises:
        ConfigError: the file cannot be read, or is not a report of this version.
    """
    stem, extension = os.path.splitext(path)
    data = f"{stem}.json" if extension.lower() in (".html", ".htm") else path
    try:
        with open(data, "rb") as file:
            report = msgspec.json.decode(file.read(), type=_Report)
    except OSError as error:
        raise ConfigError(f"report: {data} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(
            f"report: {data} is not a report; hvdgloo-run --report {stem}.html train.py writes one"
        ) from None
    if report.snapshot.schema != SCHEMA:
        raise ConfigError(f"report: {data} was written by another version of hvdgloo; compare with that version")
    return report.snapshot


def _tables(comparison: Comparison) -> Iterable[tuple[str, list[Row]]]:
    titles = ("Means over each whole job", "Logged by the programs, last values", "Settings and versions that differ")
    return [
        (title, rows)
        for title, rows in zip(titles, (comparison.rows, comparison.logged, comparison.differences), strict=True)
        if rows
    ]


def _print(rows: Sequence[Row], stdout: TextIO) -> None:
    """Print a table, with colours on a terminal if rich is installed."""
    cells = [(row.name, row.earlier, row.later, " ".join(filter(None, (row.change, row.judged)))) for row in rows]
    headings = _HEADINGS if any(row[3] for row in cells) else _HEADINGS[:3]
    cells = [row[: len(headings)] for row in cells]  # type: ignore[misc]
    lines = aligned([headings, *cells])
    if not stdout.isatty() or importlib.util.find_spec("rich") is None:
        stdout.write("".join(f"{line}\n" for line in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stdout, highlight=False)
    console.print(Text(lines[0], "dim"), soft_wrap=True)
    for row, line in zip(rows, lines[1:], strict=True):
        console.print(Text(line, _STYLES.get(row.judged, "")), soft_wrap=True)
