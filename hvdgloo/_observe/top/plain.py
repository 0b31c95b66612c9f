"""The screen of ``top`` in plain text, where rich is not installed."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from hvdgloo._observe.top import content
from hvdgloo._observe.view import Snapshot
from hvdgloo._platform.tables import aligned

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, without a cursor
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@contextmanager
def live(stdout: TextIO) -> Iterator[Callable[[Snapshot, int], None]]:
    """Take the whole terminal; provide a function that shows a snapshot, with the ranks from a place on."""

    def show(snapshot: Snapshot, first: int) -> None:
        size = shutil.get_terminal_size()
        shown = lines(snapshot, width=size.columns, height=size.lines, first=first, encoding=stdout.encoding)
        stdout.write(_HOME + "\n".join(f"{line}{_REST_OF_LINE}" for line in shown) + _REST_OF_SCREEN)
        stdout.flush()

    stdout.write(_ENTER)
    try:
        yield show
    finally:
        stdout.write(_LEAVE)


def write(snapshot: Snapshot, stdout: TextIO, *, whole: bool) -> None:
    """Write a snapshot: all of it, or as much as the terminal has room for."""
    size = shutil.get_terminal_size() if stdout.isatty() else None
    shown = lines(
        snapshot,
        width=None if size is None else size.columns,
        height=None if size is None or whole else size.lines,
        encoding=stdout.encoding,
    )
    stdout.write("".join(f"{line}\n" for line in shown))


def lines(
    snapshot: Snapshot,
    *,
    width: int | None = None,
    height: int | None = None,
    first: int = 0,
    encoding: str | None = "utf-8",
) -> list[str]:
    """Return the lines of the screen.

    Args:
        snapshot: the job.
        width, height: size of the terminal; None if there is no limit.
        first: place of the first rank to be shown in the table.
        encoding: encoding of the output, in which states may have to be marked by letters.
    """
    marks = content.marks(not (encoding or "utf-8").lower().startswith("utf"))
    head, tail = _fitted(content.head(snapshot), width), _fitted(content.tail(snapshot), width)
    shown, rows = content.room(height, len(head) + len(tail), len(snapshot.hosts))
    hosts = [(name.text, states.text, load.text) for name, states, load in content.hosts(snapshot, marks)]
    grid = aligned(hosts[:shown])
    if shown < len(hosts):
        grid.append(content.more_hosts(len(hosts) - shown).text)
    columns, cells = content.ranks(snapshot, first, rows, width)
    table = aligned(
        [[column.heading for column in columns], *([cell.text for cell in row] for row in cells)],
        right={place for place, column in enumerate(columns) if column.right},
    )
    made = [*head, *grid, content.legend(marks).text.rstrip(), *tail, *table]
    return [line[:width].rstrip() for line in made[:height]]


def _fitted(made: list[content.Line], width: int | None) -> list[str]:
    """Return the texts of lines, some of which take several lines of a terminal."""
    return [
        text for line in made for text in (textwrap.wrap(line.text, width) if line.wraps and width else [line.text])
    ]
