"""The screen of ``top`` for a snapshot, from the top down: the job, its hosts, stragglers, ranks, events."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hvdgloo._observe.view import STATES, Host, Job, Ranks, Snapshot
from hvdgloo._observe.words import duration, left, measured, number, progress, share, size
from hvdgloo._platform.spelling import in_one_line

_STYLES = {
    "starting": "dim",
    "computing": "green",
    "waiting": "yellow",
    "communicating": "blue",
    "idle": "dim",
    "stalled": "bold magenta",
    "lost": "bold red",
    "ended": "dim",
    "failed": "bold red",
    "running": "green",
    "stopped": "bold",
}
_MARKS = dict(zip(STATES, "·■□▣-!✗✓✗", strict=True))
_PLAIN_MARKS = dict(zip(STATES, ".#_=-!XvX", strict=True))
_BAD = ("stalled", "lost", "failed")
_LONGEST_STATE = max(map(len, STATES))
_COLUMNS: tuple[tuple[str, int, int, Callable[[Ranks, int], str]], ...] = (
    ("steps", 6, 0, lambda ranks, n: f"{ranks.steps[n]:,}"),
    ("step", 7, 0, lambda ranks, n: duration(ranks.step_seconds[n])),
    ("computing", 9, 0, lambda ranks, n: share(ranks.computing[n])),
    ("waiting", 7, 0, lambda ranks, n: share(ranks.waiting[n])),
    ("operations", 10, 0, lambda ranks, n: f"{ranks.operations[n]:,}"),
    ("bytes/s", 7, 100, lambda ranks, n: size(ranks.bytes_per_second[n])),
    ("CPU", 5, 110, lambda ranks, n: share(ranks.cpu[n])),  # of one core, as the system's own top shows it
    ("memory", 7, 110, lambda ranks, n: size(ranks.memory[n])),
)
"""Heading, width, least width of the terminal for this column, and its text for a rank."""
_OF_STEPS = frozenset({"steps", "step", "computing", "waiting"})
_WITHOUT_STEPS = frozenset({"operations"})
ENDLESS = 100_000
"""Width of a console that no line exceeds."""
_EVENTS = 5
_STRAGGLERS = 3
_LEAST_HOSTS = 4  # lines of hosts, where there are more than fit


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
        marks = _PLAIN_MARKS if ascii_only else _MARKS
        height = None if self._whole else options.height or console.height
        head = [*_job(self._snapshot), *_planes(self._snapshot)]
        tail = [*_stragglers(self._snapshot), *_events(self._snapshot, ascii_only)]
        lines = len(self._lines(console, options, Group(*head, *tail)))
        room = None if height is None else max(0, height - lines - 3)  # legend, headings
        hosts = len(self._snapshot.hosts)
        shown = hosts if room is None else min(hosts, max(_LEAST_HOSTS, room // 2))
        width = None if self._endless else options.max_width
        grid = _grid(self._snapshot, shown, marks, width)
        rows = None if room is None else max(0, room - shown - (shown < hosts))
        body = Group(*head, grid, _legend(marks), *tail, _ranks(self._snapshot, self._first, rows, width))
        yield from self._cut(console, options, body, height)

    @staticmethod
    def _lines(console: Console, options: ConsoleOptions, what: RenderableType) -> list[list[Segment]]:
        return console.render_lines(what, options.update(height=None), pad=False)

    def _cut(self, console: Console, options: ConsoleOptions, what: RenderableType, height: int | None) -> RenderResult:
        for line in self._lines(console, options, what)[:height]:
            yield from line
            yield Segment.line()


def order(ranks: Ranks, slow: list[int]) -> list[int]:
    """Sort the indices in ``ranks`` for the table: ranks that need attention first, then stragglers."""
    early = {rank: place for place, rank in enumerate(slow)}
    return sorted(
        range(len(ranks.rank)),
        key=lambda n: (STATES[ranks.state[n]] not in _BAD, early.get(ranks.rank[n], len(early)), ranks.rank[n]),
    )


def _job(snapshot: Snapshot) -> list[RenderableType]:
    job = snapshot.job
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f"{job.state} {duration(round(max(0.0, job.now - job.started)))}", _STYLES.get(job.state, ""))
    title.append(f"  {in_one_line(job.command)}", "bold")
    hosts = len({snapshot.ranks.host[n] for n in range(len(snapshot.ranks.rank))})
    facts = f"{_count(job.size, 'rank')} on {_count(hosts, 'host')}"
    if job.least is not None:
        most = f"to {job.most}" if job.most is not None else "or more"
        facts += f" (elastic: {job.least} {most}; epoch {job.epoch})"
    if any(snapshot.ranks.steps):
        facts += f"  step {job.steps:,}  {number(job.steps_per_second)} steps/s"
    else:
        facts += f"  {_count(max(snapshot.ranks.operations, default=0), 'operation')}"
    facts += f"  {size(job.bytes_per_second)}/s"
    lines: list[RenderableType] = [title, Text(facts, no_wrap=True, overflow="ellipsis")]
    if job.step_seconds:
        lines.append(
            Text.assemble(
                f"{duration(job.step_seconds)} per step: ",
                (f"{share(job.computing)} computing", _STYLES["computing"]),
                "  ",
                (f"{share(job.waiting)} waiting", _STYLES["waiting"]),
                "  ",
                (f"{share(job.communicating)} communicating", _STYLES["communicating"]),
                no_wrap=True,
                overflow="ellipsis",
            )
        )
    if job.outer:
        lines.append(Text(job.outer, no_wrap=True, overflow="ellipsis"))
    lines += _logged(job)
    if job.message:
        lines.append(Text(in_one_line(job.message), _STYLES["failed"] if job.state == "failed" else ""))
    return lines


def _logged(job: Job) -> list[RenderableType]:
    """Build a line with the training's progress and one with the numbers that the program logs."""
    told = job.progress
    facts: list[str] = []
    if told is not None:
        facts = progress(told.step, told.steps, told.epoch, told.epochs, told.share) + left(told.remaining)
    numbers = [f"{in_one_line(name)} {measured(value)}" for name, value in job.logged.items()]
    return [Text("  ".join(line), no_wrap=True, overflow="ellipsis") for line in (facts, numbers) if line]


def _planes(snapshot: Snapshot) -> list[RenderableType]:
    return [
        Text(
            in_one_line(
                f"{plane.name} ({plane.device}): {plane.why or _count(plane.ranks, 'rank')}, "
                f"{size(plane.bytes_per_second)}/s{', ' if plane.crossed else ''}{plane.crossed}"
            ),
            "dim",
            no_wrap=True,
            overflow="ellipsis",
        )
        for plane in snapshot.planes
        if not plane.process_set
    ]


def _grid(snapshot: Snapshot, shown: int, marks: dict[str, str], width: int | None) -> RenderableType:
    """Build a row for each host: the states of its ranks, and its load."""
    cells: dict[int, Text] = {}
    ranks = snapshot.ranks
    for place in range(len(ranks.rank)):
        state = STATES[ranks.state[place]]
        cells.setdefault(ranks.host[place], Text()).append(marks[state], _STYLES[state])
    names = [Text(in_one_line(host.name), _host_style(host)) for host in snapshot.hosts[:shown]]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.width = width
    for texts, part in ((names, 4), (list(cells.values()), 3)):
        widest = max((text.cell_len for text in texts), default=0)
        table.add_column(
            no_wrap=True, overflow="ellipsis", width=widest if width is None else min(widest, width // part)
        )
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for index, (name, host) in enumerate(zip(names, snapshot.hosts[:shown], strict=True)):
        table.add_row(name, cells.get(index, Text("")), Text(_host(host), "dim"))
    if shown == len(snapshot.hosts):
        return table
    return Group(table, Text(f"and {_count(len(snapshot.hosts) - shown, 'host')} more", "dim"))


def _host_style(host: Host) -> str:
    return {"up": "", "lost": _STYLES["lost"]}.get(host.state, "dim")


def _host(host: Host) -> str:
    if host.state != "up":
        return host.state
    if not host.cores:
        return ""
    facts = [f"stolen {share(host.stolen)}"] if host.stolen >= 0.005 else []  # what is unusual comes first
    facts += [f"throttled {share(host.throttled)}"] if host.throttled >= 0.005 else []
    facts += [f"processors {share(host.cpu)}", f"memory {size(host.memory)} of {size(host.memory_total)}"]
    if host.gpus:
        facts.append(f"GPUs {share(sum(gpu.use for gpu in host.gpus) / len(host.gpus))}")
    facts.append(f"network {size(host.received)}/s in, {size(host.sent)}/s out")
    return "  ".join(facts)


def _legend(marks: dict[str, str]) -> RenderableType:
    legend = Text(no_wrap=True, overflow="ellipsis")
    for state in STATES[:7]:
        legend.append(marks[state], _STYLES[state]).append(f" {state}  ", "dim")
    return legend


def _stragglers(snapshot: Snapshot) -> list[RenderableType]:
    return [Text(in_one_line(straggler.text), _STYLES["waiting"]) for straggler in snapshot.stragglers[:_STRAGGLERS]]


def _events(snapshot: Snapshot, ascii_only: bool) -> list[RenderableType]:
    shown = {straggler.rank for straggler in snapshot.stragglers[:_STRAGGLERS]}  # just above
    events = [event for event in snapshot.events if event.kind != "straggler" or event.rank not in shown]
    return [
        Text(
            f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {in_one_line(event.text)}",
            "red" if event.kind in ("failure", "stall") else "",
            no_wrap=True,
            overflow="crop" if ascii_only else "ellipsis",
        )
        for event in events[-_EVENTS:]
    ]


def _ranks(snapshot: Snapshot, first: int, rows: int | None, width: int | None) -> RenderableType:
    """Build the table of ranks, from the ``first`` one of its order on. A narrow one has fewer columns."""
    ranks, hosts = snapshot.ranks, snapshot.hosts
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", width=width)
    unwanted = _WITHOUT_STEPS if any(ranks.steps) else _OF_STEPS
    columns = [column for column in _COLUMNS if (width is None or width >= column[2]) and column[0] not in unwanted]
    table.add_column("rank", justify="right", no_wrap=True, min_width=4)
    table.add_column("host", no_wrap=True, max_width=None if width is None else max(8, width // 8))
    table.add_column("state", no_wrap=True, min_width=_LONGEST_STATE)
    for heading, least, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True, min_width=least)
    table.add_column("", no_wrap=True, ratio=1)
    places = order(ranks, [straggler.rank for straggler in snapshot.stragglers])
    for n in places[first : None if rows is None else first + rows]:
        state = STATES[ranks.state[n]]
        table.add_row(
            str(ranks.rank[n]),
            Text(in_one_line(hosts[ranks.host[n]].name)),
            Text(state, _STYLES[state]),
            *(value(ranks, n) for _, _, _, value in columns),
            Text(in_one_line(ranks.detail[n])),
        )
    return table


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
