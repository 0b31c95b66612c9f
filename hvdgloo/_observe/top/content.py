"""Content of ``top`` for a snapshot, from the top down: the job, its hosts, stragglers, events, ranks. Pure: lines and
cells are texts with styles, which are drawn by rich (``screen``) or as plain text (``plain``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvdgloo._observe.view import STATES, Host, Job, Ranks, Snapshot
from hvdgloo._observe.words import duration, left, measured, number, progress, share, size
from hvdgloo._platform.spelling import in_one_line

STYLES = {
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
_EVENTS = 5
_STRAGGLERS = 3
_LEAST_HOSTS = 4  # lines of hosts, where there are more than fit


class Part(NamedTuple):
    """A piece of text, and its style as rich names it."""

    text: str
    style: str = ""


class Line(NamedTuple):
    """Pieces of text next to each other; a line that does not wrap is shortened where it is too long."""

    parts: tuple[Part, ...]
    wraps: bool = False

    @property
    def text(self) -> str:
        """Text without styles."""
        return "".join(part.text for part in self.parts)


class Column(NamedTuple):
    """A column of the table of ranks; ``width`` is its least width."""

    heading: str
    width: int
    right: bool = True


def marks(ascii_only: bool) -> dict[str, str]:
    """Return the mark of each state."""
    return _PLAIN_MARKS if ascii_only else _MARKS


def room(height: int | None, lines: int, hosts: int) -> tuple[int, int | None]:
    """Divide the lines of a terminal: return the number of hosts and of ranks to be shown; None for all ranks.

    Args:
        height: lines of the terminal; None for as many as it takes.
        lines: number of lines that the rest takes.
        hosts: number of hosts.
    """
    if height is None:
        return hosts, None
    free = max(0, height - lines - 3)  # legend, headings
    shown = min(hosts, max(_LEAST_HOSTS, free // 2))
    return shown, max(0, free - shown - (shown < hosts))


def head(snapshot: Snapshot) -> list[Line]:
    """Return the lines about the job and its data planes."""
    return [*_job(snapshot), *_planes(snapshot)]


def tail(snapshot: Snapshot) -> list[Line]:
    """Return the lines about stragglers and events."""
    return [*_stragglers(snapshot), *_events(snapshot)]


def order(ranks: Ranks, slow: list[int]) -> list[int]:
    """Sort the indices in ``ranks`` for the table: ranks that need attention first, then stragglers."""
    early = {rank: place for place, rank in enumerate(slow)}
    return sorted(
        range(len(ranks.rank)),
        key=lambda n: (STATES[ranks.state[n]] not in _BAD, early.get(ranks.rank[n], len(early)), ranks.rank[n]),
    )


def hosts(snapshot: Snapshot, marks: Mapping[str, str]) -> list[tuple[Part, Line, Part]]:
    """Return a row for each host: its name, the states of its ranks, and its load."""
    cells: dict[int, tuple[Part, ...]] = {}
    ranks = snapshot.ranks
    for place in range(len(ranks.rank)):
        state = STATES[ranks.state[place]]
        cells[ranks.host[place]] = (*cells.get(ranks.host[place], ()), Part(marks[state], STYLES[state]))
    return [
        (Part(in_one_line(host.name), _host_style(host)), Line(cells.get(index, ())), Part(_host(host), "dim"))
        for index, host in enumerate(snapshot.hosts)
    ]


def more_hosts(count: int) -> Line:
    """Return the line about hosts that have no line of their own."""
    return Line((Part(f"and {_count(count, 'host')} more", "dim"),))


def legend(marks: Mapping[str, str]) -> Line:
    """Return the line that explains the marks."""
    parts = [(Part(marks[state], STYLES[state]), Part(f" {state}  ", "dim")) for state in STATES[:7]]
    return Line(tuple(part for pair in parts for part in pair))


def ranks(snapshot: Snapshot, first: int, rows: int | None, width: int | None) -> tuple[list[Column], list[list[Part]]]:
    """Return the columns and rows of the table of ranks. A narrow one has fewer columns.

    Args:
        snapshot: the job.
        first: place of the first rank to be shown, in the table's order.
        rows: number of ranks to be shown; None for all.
        width: width of the terminal; None if there is no limit.
    """
    ranks, hosts = snapshot.ranks, snapshot.hosts
    unwanted = _WITHOUT_STEPS if any(ranks.steps) else _OF_STEPS
    measures = [column for column in _COLUMNS if (width is None or width >= column[2]) and column[0] not in unwanted]
    columns = [
        Column("rank", 4),
        Column("host", 4, right=False),
        Column("state", _LONGEST_STATE, right=False),
        *(Column(heading, least) for heading, least, _, _ in measures),
        Column("", 0, right=False),
    ]
    places = order(ranks, [straggler.rank for straggler in snapshot.stragglers])
    return columns, [
        [
            Part(str(ranks.rank[n])),
            Part(in_one_line(hosts[ranks.host[n]].name)),
            Part(STATES[ranks.state[n]], STYLES[STATES[ranks.state[n]]]),
            *(Part(value(ranks, n)) for _, _, _, value in measures),
            Part(in_one_line(ranks.detail[n])),
        ]
        for n in places[first : None if rows is None else first + rows]
    ]


def _line(text: str, style: str = "", *, wraps: bool = False) -> Line:
    return Line((Part(text, style),), wraps)


def _job(snapshot: Snapshot) -> list[Line]:
    job = snapshot.job
    lasted = f"{job.state} {duration(round(max(0.0, job.now - job.started)))}"
    title = Line((Part(lasted, STYLES.get(job.state, "")), Part(f"  {in_one_line(job.command)}", "bold")))
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
    lines = [title, _line(facts)]
    if job.step_seconds:
        parts = [Part(f"{duration(job.step_seconds)} per step: ")]
        for name in ("computing", "waiting", "communicating"):
            parts += [Part("  " if len(parts) > 1 else ""), Part(f"{share(getattr(job, name))} {name}", STYLES[name])]
        lines.append(Line(tuple(parts)))
    if job.outer:
        lines.append(_line(job.outer))
    lines += _logged(job)
    if job.message:
        lines.append(_line(in_one_line(job.message), STYLES["failed"] if job.state == "failed" else "", wraps=True))
    return lines


def _logged(job: Job) -> list[Line]:
    """Build a line with the training's progress and one with the numbers that the program logs."""
    told = job.progress
    facts: list[str] = []
    if told is not None:
        facts = progress(told.step, told.steps, told.epoch, told.epochs, told.share) + left(told.remaining)
    numbers = [f"{in_one_line(name)} {measured(value)}" for name, value in job.logged.items()]
    return [_line("  ".join(line)) for line in (facts, numbers) if line]


def _planes(snapshot: Snapshot) -> list[Line]:
    return [
        _line(
            in_one_line(
                f"{plane.name} ({plane.device}): {plane.why or _count(plane.ranks, 'rank')}, "
                f"{size(plane.bytes_per_second)}/s{', ' if plane.crossed else ''}{plane.crossed}"
            ),
            "dim",
        )
        for plane in snapshot.planes
        if not plane.process_set
    ]


def _host_style(host: Host) -> str:
    return {"up": "", "lost": STYLES["lost"]}.get(host.state, "dim")


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


def _stragglers(snapshot: Snapshot) -> list[Line]:
    shown = snapshot.stragglers[:_STRAGGLERS]
    return [_line(in_one_line(straggler.text), STYLES["waiting"], wraps=True) for straggler in shown]


def _events(snapshot: Snapshot) -> list[Line]:
    shown = {straggler.rank for straggler in snapshot.stragglers[:_STRAGGLERS]}  # just above
    ended = {
        rank
        for rank, state in zip(snapshot.ranks.rank, snapshot.ranks.state, strict=True)
        if STATES[state] == "ended" and snapshot.job.state == "failed"  # only because another rank had failed
    }
    events = [event for event in snapshot.events if event.kind != "straggler" or event.rank not in shown]
    return [
        _line(
            f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {in_one_line(event.text)}",
            "red" if event.kind == "stall" or (event.kind == "failure" and event.rank not in ended) else "",
        )
        for event in events[-_EVENTS:]
    ]


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
