"""Comparison of two jobs by their reports: what became faster or slower, and which settings differ. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hvdgloo._observe.view import Snapshot
from hvdgloo._observe.words import cores, duration, measured, number, size
from hvdgloo._platform.spelling import in_one_line

_NOTICEABLE = 0.03
"""Smallest change, as a share of the earlier value, that is judged: two runs of the same job differ, too."""
_UNKNOWN = "-"


class Row(NamedTuple):
    """A line of the comparison.

    Attributes:
        name: name of the value.
        earlier, later: the values in words.
        change: the change in words; empty if there is none, or the values are no numbers.
        judged: "better", "worse", or empty where that is not known or the change is small.
    """

    name: str
    earlier: str
    later: str
    change: str = ""
    judged: str = ""


class Comparison(NamedTuple):
    """Two jobs side by side.

    Attributes:
        headline: the most important change, in a sentence or two.
        rows: speed, use of the machines, and whom the others waited for.
        logged: numbers that the programs logged, by name.
        differences: settings, versions and data planes that are not the same.
    """

    headline: str
    rows: list[Row]
    logged: list[Row]
    differences: list[Row]


class _Measure(NamedTuple):
    """A value of a job. ``better`` is -1 if less is better, 1 if more is, and 0 if neither is."""

    name: str
    value: Callable[[Snapshot], float]
    text: Callable[[float], str]
    better: int


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def _bytes_in_a_step(job: Snapshot) -> float:
    steps = sum(job.ranks.steps)
    return sum(job.ranks.bytes) / steps if steps else 0.0


_PARTS = ("computing", "waiting", "communicating")
_MEASURES = (
    _Measure("time of a step", lambda job: job.job.step_seconds, duration, -1),
    *(
        _Measure(f"  {part}", lambda job, part=part: getattr(job.job, part) * job.job.step_seconds, duration, -1)  # type: ignore[misc]
        for part in _PARTS
    ),
    _Measure("bytes in each step, of a rank", _bytes_in_a_step, size, 0),
    _Measure("bytes per second, of all ranks", lambda job: job.job.bytes_per_second, size, 0),
    _Measure("processor, of a rank", lambda job: _mean(job.ranks.cpu), cores, 0),
    _Measure("memory, of a rank", lambda job: _mean(job.ranks.memory), size, 0),
    _Measure("steps", lambda job: job.job.steps, lambda value: f"{round(value):,}", 0),
    _Measure(
        "operations, of a rank",
        lambda job: max(job.ranks.operations, default=0),
        lambda value: f"{round(value):,}",
        0,
    ),
    _Measure("time from start to end", lambda job: max(0.0, job.job.now - job.job.started), duration, 0),
)


def compare(earlier: Snapshot, later: Snapshot) -> Comparison:
    """Compare two jobs that are over."""
    rows = [_measured(measure, earlier, later) for measure in _MEASURES if _known(measure, earlier, later)]
    slowest = _slowest(earlier), _slowest(later)
    if any(slowest):
        rows.append(Row("slowest rank", *(text or "none stands out" for text in slowest)))
    if earlier.job.outer or later.job.outer:
        rows.append(Row("outer steps", earlier.job.outer or "none", later.job.outer or "none"))
    return Comparison(_headline(earlier, later), rows, _logged(earlier, later), _differences(earlier, later))


def described(job: Snapshot) -> str:
    """Describe a job in a line: its command, its size and its end."""
    ranks, hosts = job.job.size, len({job.ranks.host[n] for n in range(len(job.ranks.rank))})
    size_of = f"{ranks} rank{'s' * (ranks != 1)} on {hosts} host{'s' * (hosts != 1)}"
    text = f"{in_one_line(job.job.command)}, {size_of}, {job.job.state}"
    return f"{text}: {in_one_line(job.job.message)}" if job.job.message else text


def _known(measure: _Measure, earlier: Snapshot, later: Snapshot) -> bool:
    return bool(measure.value(earlier) or measure.value(later))


def _measured(measure: _Measure, earlier: Snapshot, later: Snapshot) -> Row:
    before, after = measure.value(earlier), measure.value(later)
    first, second = (measure.text(value) if value else _UNKNOWN for value in (before, after))
    judged = ""
    if before and after and abs(after - before) >= _NOTICEABLE * before:
        judged = {0: "", 1: "better", -1: "worse"}[measure.better if after > before else -measure.better]
    return Row(measure.name, first, second, _change(before, after), judged)


def _change(before: float | None, after: float | None) -> str:
    """Return a change in words: "+12 %", "-3 %", "12.3 times"; empty if nothing can be said."""
    if not before or not after or (before < 0) != (after < 0):
        return ""
    ratio = after / before
    if ratio >= 10:
        return f"{number(ratio)} times"
    percent = 100 * (ratio - 1) * (1 if before > 0 else -1)
    rounded = f"{percent:+.0f}" if abs(percent) >= 9.95 else f"{percent:+.1f}"
    return "" if float(rounded) == 0 else f"{rounded} %"


def _headline(earlier: Snapshot, later: Snapshot) -> str:
    """Tell which job is faster, and which part of a step made most of the difference."""
    before, after = earlier.job.step_seconds, later.job.step_seconds
    if not before or not after:
        return "Steps were not counted in both jobs, so their speed cannot be compared."
    times = f"{duration(after)} instead of {duration(before)}"
    if abs(after - before) < _NOTICEABLE * before:
        return f"Both jobs are about as fast: a step takes {times}."
    faster = after < before
    change = _change(before, after).lstrip("+-")  # as in the table
    change += " less time" if faster else " more time" if change.endswith("%") else " as long"
    parts = {part: getattr(later.job, part) * after - getattr(earlier.job, part) * before for part in _PARTS}
    most = min(parts, key=parts.__getitem__) if faster else max(parts, key=parts.__getitem__)
    text = f"The later job is {'faster' if faster else 'slower'}: a step takes {change}, {times}."
    if (parts[most] < 0) is faster and parts[most]:
        text += f" Most of the difference is {most}: {duration(abs(parts[most]))} {'less' if faster else 'more'}."
    return text


def _slowest(job: Snapshot) -> str:
    if not job.stragglers:
        return ""
    first = job.stragglers[0]
    return f"rank {first.rank} ({in_one_line(first.host)}), {duration(first.seconds)} in each {first.unit[:-1]}"


def _logged(earlier: Snapshot, later: Snapshot) -> list[Row]:
    before, after = earlier.job.logged, later.job.logged
    rows = []
    for name in dict.fromkeys([*before, *after]):
        first, second = (measured(values[name]) if name in values else _UNKNOWN for values in (before, after))
        rows.append(Row(in_one_line(name), first, second, _change(before.get(name), after.get(name))))
    return rows


def _differences(earlier: Snapshot, later: Snapshot) -> list[Row]:
    units = {**earlier.units, **later.units}
    before, after = _facts(earlier, units), _facts(later, units)
    return [
        Row(in_one_line(name), *(in_one_line(facts.get(name, _UNKNOWN)) for facts in (before, after)))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _facts(job: Snapshot, units: dict[str, str]) -> dict[str, str]:
    facts = {"data planes": ", ".join(sorted({plane.name for plane in job.planes}))}
    facts |= {name: _setting(value, units.get(name, "")) for name, value in job.settings.items()}
    return facts | {f"version of {name}": version for name, version in job.job.versions.items()}


def _setting(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = measured(value) if isinstance(value, int | float) else str(value)
    return f"{text} {unit}" if unit else text
