"""The screen of ``top``, drawn by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hvdgloo._observe.top import content
from hvdgloo._observe.top.content import Line, Part
from hvdgloo._observe.view import Snapshot

ENDLESS = 100_000
"""Width of a console that no line exceeds."""


@contextmanager
def live(stdout: TextIO) -> Iterator[Callable[[Snapshot, int], None]]:
    """Take the whole terminal; provide a function that shows a snapshot, with the ranks from a place on."""
    console = Console(file=stdout, highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as shown:
        yield lambda snapshot, first: shown.update(Screen(snapshot, first=first), refresh=True)


def write(snapshot: Snapshot, stdout: TextIO, *, whole: bool) -> None:
    """Write a snapshot: all of it, or as much as the terminal has room for."""
    endless = not stdout.isatty()  # a pipe or a file gets everything
    console = Console(file=stdout, highlight=False, width=ENDLESS if endless else None)
    console.print(Screen(snapshot, whole=whole, endless=endless), end="")


class Screen:
    """A snapshot as a renderable.

    Args:
        snapshot: the job.
        whole: show all hosts and ranks, however many lines that takes.
        endless: lines are as long as they need to be, and nothing is shortened; for a console of width ``ENDLESS``.
        first: place of the first rank to be shown in the table.
    """

    def __init__(self, snapshot: Snapshot, *, whole: bool = False, endless: bool = False, first: int = 0) -> None:
        self._snapshot = snapshot
        self._endless = endless
        self._whole = whole
        self._first = first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = not options.encoding.startswith("utf")
        marks = content.marks(ascii_only)
        height = None if self._whole else options.height or console.height
        overflow = "crop" if ascii_only else "ellipsis"
        head = [_text(line, overflow) for line in content.head(self._snapshot)]
        tail = [_text(line, overflow) for line in content.tail(self._snapshot)]
        lines = len(self._lines(console, options, Group(*head, *tail)))
        shown, rows = content.room(height, lines, len(self._snapshot.hosts))
        width = None if self._endless else options.max_width
        grid = _grid(self._snapshot, shown, marks, width)
        legend = _text(content.legend(marks), overflow)
        body = Group(*head, grid, legend, *tail, _ranks(self._snapshot, self._first, rows, width))
        yield from self._cut(console, options, body, height)

    @staticmethod
    def _lines(console: Console, options: ConsoleOptions, what: RenderableType) -> list[list[Segment]]:
        return console.render_lines(what, options.update(height=None), pad=False)

    def _cut(self, console: Console, options: ConsoleOptions, what: RenderableType, height: int | None) -> RenderResult:
        for line in self._lines(console, options, what)[:height]:
            yield from line
            yield Segment.line()


def _text(line: Line, overflow: str = "ellipsis") -> Text:
    if line.wraps:
        return Text.assemble(*line.parts)
    return Text.assemble(*line.parts, no_wrap=True, overflow=overflow)  # type: ignore[arg-type]


def _cell(part: Part) -> Text:
    return Text(part.text, part.style)


def _grid(snapshot: Snapshot, shown: int, marks: dict[str, str], width: int | None) -> RenderableType:
    """Build a row for each host: the states of its ranks, and its load."""
    rows = content.hosts(snapshot, marks)
    cells = [(_cell(name), _text(states), _cell(load)) for name, states, load in rows]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.width = width
    columns: Iterable[tuple[list[Text], int]] = (
        ([name for name, _, _ in cells[:shown]], 4),
        ([states for _, states, _ in cells], 3),
    )
    for texts, part in columns:
        widest = max((text.cell_len for text in texts), default=0)
        table.add_column(
            no_wrap=True, overflow="ellipsis", width=widest if width is None else min(widest, width // part)
        )
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for row in cells[:shown]:
        table.add_row(*row)
    if shown == len(rows):
        return table
    return Group(table, _text(content.more_hosts(len(rows) - shown)))


def _ranks(snapshot: Snapshot, first: int, rows: int | None, width: int | None) -> RenderableType:
    """Build the table of ranks."""
    columns, cells = content.ranks(snapshot, first, rows, width)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", width=width)
    for heading, least, right in columns:
        table.add_column(
            heading,
            justify="right" if right else "left",
            no_wrap=True,
            min_width=least or None,
            max_width=None if width is None or heading != "host" else max(8, width // 8),
            ratio=None if heading else 1,
        )
    for row in cells:
        table.add_row(*map(_cell, row))
    return table
