"""The output of ``hvdgloo-run tune``: tables and bars for people, JSON for programs, a picture, and a configuration
file. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from typing import Any

from hvdgloo._platform.tables import aligned
from hvdgloo.config import settings as declarations
from hvdgloo.runner.tuning.campaign import OTHER_PLANE, Again, Campaign
from hvdgloo.runner.tuning.measure import Found, Measured, Setup
from hvdgloo.version import __version__

_BAR = 40
_ENOUGH = 0.2
"""Share of a step's gradients above which the results hold for all of their buckets."""
_PLANES = {
    "shm": "shared memory",
    "hierarchical": "shared memory in each host, Gloo between hosts",
    "gloo": "Gloo",
    "pygloo": "Gloo",
    "local": "one process",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 360, 70, 50  # of a plot in the picture
_COLOURS = ("#1769aa", "#c2410c", "#15803d", "#7e22ce")


def as_text(campaign: Campaign) -> str:
    """Format tables of data planes and settings, bars of the tried values, and the settings to use."""
    main = campaign.main
    blocks = [
        f"{_count(main.ranks, 'rank')} on {_count(main.hosts, 'host')}, {_PLANES.get(main.plane, main.plane)}; "
        + campaign.workload,
        _sweep_table(campaign),
        *(_found(found) for found in main.found),
        *(_other(campaign, variant.name, measured) for variant, measured in campaign.others),
        *_wires(campaign),
        _conclusion(campaign),
    ]
    return "\n\n".join(blocks) + "\n"


def as_yaml(campaign: Campaign) -> str:
    """Format a file for ``--config-file``; without settings, if the defaults are best."""
    main = campaign.main
    where = f"{_count(main.ranks, 'rank')} on {_count(main.hosts, 'host')}"
    lines = [f"# Measured by hvdgloo-run tune (hvdgloo {__version__}): {where}, {campaign.workload}"]
    sections: dict[str, list[str]] = {}
    for key, value in _file_settings(campaign.settings).items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"  {name}: {value}")
    if not sections:
        lines.append("# The defaults are best: nothing else was clearly faster.")
    for section, values in sections.items():
        lines += [f"{section}:", *values]
    lines[1:1] = [f"# {line}" for line in _reservation(campaign)]
    return "\n".join(lines) + "\n"


def as_json(campaign: Campaign) -> str:
    """Format all results."""
    return json.dumps(
        {
            "version": __version__,
            "workload": campaign.workload,
            "settings": _file_settings(campaign.settings),
            "planes": [
                {"name": name, "plane": measured.plane, "ranks": measured.ranks, "hosts": measured.hosts,
                 "allreduce_seconds": measured.sweep, "found": [_found_values(found) for found in measured.found]}
                for name, measured in _planes(campaign)
            ],
            "wires": dict(campaign.main.wires),
            "again": None if campaign.again is None else _again_values(campaign.again),
        },
        indent=2,
    ) + "\n"  # fmt: skip


def as_svg(campaign: Campaign) -> str:
    """Draw the speed of each data plane by size, and the speed of steps by the tried values."""
    lines = [
        (name, [(str(_size(size)), size / seconds / 1e6) for size, seconds in measured.sweep.items()])
        for name, measured in _planes(campaign)
    ]
    parts = [_line_plot("allreduce, MB/s, by the tensor's size", lines)]
    for found in campaign.main.found:
        name, values = _first_axis(found)
        if len(values) > 1:
            title = f"steps per second, by {_label(name)} ({_way(found)})"
            parts.append(_line_plot(title, [("", [(_shown(name, v), 1 / s) for v, s in values])]))
    height = (_HEIGHT + 2 * _TOP) * len(parts)
    body = "\n".join(
        f'<g transform="translate(0 {number * (_HEIGHT + 2 * _TOP)})">{part}</g>' for number, part in enumerate(parts)
    )
    width = _WIDTH + 2 * _LEFT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


# Text.


def _sweep_table(campaign: Campaign) -> str:
    planes = _planes(campaign)
    names = ["allreduce", *(f"({number})" for number, _ in enumerate(planes, 1))]
    rows = [names]
    for size in campaign.main.sweep:
        times = [measured.sweep.get(size) for _, measured in planes]
        rows.append([_size(size), *("" if each is None else _time(each) for each in times)])
    legend = [f"({number}) {name}" for number, (name, _) in enumerate(planes, 1)]
    return "\n".join([*aligned(rows, right=range(len(names))), *legend])


def _found(found: Found) -> str:
    gain = found.start_seconds / found.best_seconds
    part = f" ({_share(found.part)} of them)" if found.part < 1 else ""
    lines = [f"gradients {_way(found)}: {_time(found.start_seconds)} for a step's gradients{part}"]
    name, values = _first_axis(found)
    fastest = min(seconds for _, seconds in values)
    now, best = getattr(found.start, name), getattr(found.best, name)
    width = max(len(_shown(name, value)) for value, _ in values)
    for value, seconds in values:
        bar = "#" * max(1, round(_BAR * fastest / seconds))
        marks = [
            mark
            for mark, at in (("now", now), ("best", best))
            if at == value and (mark == "now" or found.best != found.start)
        ]
        note = f"  <- {', '.join(marks)}" if marks else ""
        lines.append(f"  {_shown(name, value):>{width}}  {bar:<{_BAR}} {_time(seconds):>9}{note}")
    lines.insert(1, f"  {_label(name)}:")
    if found.best == found.start:
        lines.append("  nothing was clearly faster than the settings of the start")
    else:
        changed = [f.name for f in fields(Setup) if getattr(found.best, f.name) != getattr(found.start, f.name)]
        text = ", ".join(f"{_label(each)} {_shown(each, getattr(found.best, each))}" for each in changed)
        lines.append(f"  best: {text}: {_time(found.best_seconds)}, {100 * (gain - 1):.0f} % faster")
    if fastest < found.best_seconds:
        lines.append("  (shorter times above were not confirmed by more samples)")
    return "\n".join(lines)


def _other(campaign: Campaign, name: str, measured: Measured) -> str:
    text = f"{name}: {_compared(measured.found[0].start_seconds, campaign.main.found[0].best_seconds)}"
    again = campaign.again
    if again is None or again.variant.name != name:
        return text
    taken = (
        "chosen" if campaign.chosen is not None else f"not taken, as it is not {_percent(OTHER_PLANE)} % faster twice"
    )
    text += f"; once more: {_compared(again.seconds, again.own_seconds)}"
    return f"{text} than the job's own planes ({_time(again.own_seconds)}): {taken}"


def _wires(campaign: Campaign) -> list[str]:
    """Return a table of the values of ``--wire``, and what to do about the fastest; nothing if none was measured."""
    wires, lossy = campaign.main.wires, campaign.lossy
    if not wires:
        return []
    full = wires["full"]
    rows = [
        [f"  {wire}", _time(seconds) if wire == "full" else _compared(seconds, full)] for wire, seconds in wires.items()
    ]
    lines = ["--wire, the form in which gradients cross between hosts; all but full change results a little:"]
    width = max(len(wire) for wire, _ in rows)
    lines += [f"{wire:<{width}}  {text}" for wire, text in rows]
    if lossy and "wire" not in campaign.settings:
        lines.append(f"  {lossy} is clearly faster; with --allow-lossy it is among the settings to use")
    return ["\n".join(lines)]


def _compared(seconds: float, own: float) -> str:
    """Format a time, compared with the job's own."""
    ratio = max(seconds, own) / min(seconds, own)
    return f"{_time(seconds)}, {_percent(ratio)} % {'slower' if seconds > own else 'faster'}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f}"


def _conclusion(campaign: Campaign) -> str:
    found = _file_settings(campaign.settings)
    lines = ["Settings to use:", *(f"  {key}: {value}" for key, value in found.items())]
    if not found:
        lines = ["The job's settings are best as they are."]
    return "\n".join([*lines, *_reservation(campaign)])


def _reservation(campaign: Campaign) -> list[str]:
    """Return a caveat if so few gradients could be sent that the conclusion may not hold for a whole step."""
    least = min(found.part for found in campaign.main.found)
    if least >= _ENOUGH:
        return []
    return [
        f"This was found with {_share(least)} of a step's gradients, for which there was time; a whole step may behave "
        "differently. Measure for longer: --seconds"
    ]


def _share(part: float) -> str:
    """Describe the first part of something, in percent."""
    return "less than the first 1 %" if part < 0.01 else f"the first {100 * part:.0f} %"


# Values.


def _planes(campaign: Campaign) -> list[tuple[str, Measured]]:
    own = _PLANES.get(campaign.main.plane, campaign.main.plane)
    return [(own, campaign.main), *((variant.name, measured) for variant, measured in campaign.others)]


def _first_axis(found: Found) -> tuple[str, list[tuple[Any, float]]]:
    """Return the setting that was varied first, and the times with its values; for the best value, the final
    choice's."""
    name = "gradient_bucket" if found.sent.in_buckets else "fusion_threshold"
    values: dict[Any, float] = {}
    for setup, seconds in found.tried:
        values.setdefault(getattr(setup, name), seconds)
    # These two were compared alternately; the best may differ in other settings, too.
    values[getattr(found.best, name)] = found.best_seconds
    if found.best == found.start or getattr(found.best, name) != getattr(found.start, name):
        values[getattr(found.start, name)] = found.start_seconds
    return name, sorted(values.items())


def _found_values(found: Found) -> dict[str, Any]:
    return {
        "in_buckets": found.sent.in_buckets,
        "part": found.part,
        "start": asdict(found.start),
        "start_seconds": found.start_seconds,
        "best": asdict(found.best),
        "best_seconds": found.best_seconds,
        "tried": [{**asdict(setup), "seconds": seconds} for setup, seconds in found.tried],
    }


def _again_values(again: Again) -> dict[str, Any]:
    return {"name": again.variant.name, "own_seconds": again.own_seconds, "seconds": again.seconds}


def _file_settings(settings: Mapping[str, int | float | str]) -> dict[str, str]:
    """Return settings by key of the configuration file, with values in its units."""
    declared = declarations()
    found = {}
    for name, value in settings.items():
        setting = declared[name]
        assert setting.yaml is not None
        text = f"{float(value) / setting.scale:g}" if setting.scale != 1 else str(value)
        found[setting.yaml] = f"{value:g}" if isinstance(value, float) else text
    return found


def _label(name: str) -> str:
    return (declarations()[name].flag or name).removeprefix("--")


def _shown(name: str, value: Any) -> str:
    if name == "cycle_time":
        return f"{value * 1000:g}"
    return f"{value / declarations()[name].scale:g}"


def _way(found: Found) -> str:
    return "in buckets, as PyTorch's DistributedOptimizer sends them" if found.sent.in_buckets else "one by one"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.2f} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.0f} us"
    )


# The picture.


def _line_plot(title: str, lines: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Draw the points of several lines over named places; the vertical axis begins at 0."""
    places = max((points for _, points in lines), key=len)
    highest = max(value for _, points in lines for _, value in points) * 1.1
    step = _WIDTH / max(1, len(places) - 1)

    def at(number: int, value: float) -> str:
        return f"{_LEFT + number * step:.1f},{_TOP + _HEIGHT * (1 - value / highest):.1f}"

    drawn = [f'<text x="{_LEFT}" y="{_TOP - 20}" font-weight="bold">{escape(title)}</text>']
    for quarter in range(5):
        value, y = highest * quarter / 4, _TOP + _HEIGHT * (1 - quarter / 4)
        drawn.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number, (place, _) in enumerate(places):
        x = _LEFT + number * step
        drawn.append(f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 20}" text-anchor="middle">{escape(place)}</text>')
    for number, (name, points) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(at(place, value) for place, (_, value) in enumerate(points))
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in path.split():
            across, down = point.split(",")
            drawn.append(f'<circle cx="{across}" cy="{down}" r="3" fill="{colour}"/>')
        y = _TOP + 16 * (number + 1)
        drawn.append(f'<text x="{_LEFT + 12}" y="{y}" fill="{colour}">{escape(name)}</text>')
    return "\n".join(drawn)
