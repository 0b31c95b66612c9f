"""Report of a job: the page with everything that was observed, in one file that needs no server; and as JSON."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Iterable

import msgspec

from hvdgloo._observe import view
from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.page.files import files
from hvdgloo._platform.files import PRIVATE, replacing

_RANKS = 64
"""Most ranks whose curves are kept: in larger jobs, stragglers and ranks that failed or stalled come first."""
_LINES = 5000
_LEAST_LINES = 20
"""Lines that are kept of each rank, however many ranks there are."""

_STYLE = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">\n?')
_SCRIPT = re.compile(r'<script src="static/([^"]+)" defer></script>\n?')
_ICON = re.compile(r'<link rel="icon" href="static/([^"]+)">')
_REMARKABLE = {view.STATES.index(state) for state in ("stalled", "lost", "failed")}


class Recording(msgspec.Struct):
    """Contents of a report. ``series`` is by rank, ``lines`` are the last ones of each rank."""

    snapshot: view.Snapshot
    series: dict[int, view.Series]
    lines: list[view.OutputLine]


def write(observatory: Observatory, path: str) -> list[str]:
    """Write what was observed of a job as one HTML file, and as JSON next to it, readable for this user only.

    Args:
        observatory: the job's observatory.
        path: path of either file; ``.html`` and ``.json`` are added where it ends with neither.

    Returns:
        The paths of the HTML and the JSON file.

    Raises:
        OSError: a file cannot be written. Files that existed before are then still whole.
    """
    page, data = paths(path)
    recording = record(observatory)
    as_json = msgspec.json.encode(recording)
    _replace(page, _page(recording.snapshot.job, as_json))
    _replace(data, as_json + b"\n")
    return [page, data]


def paths(path: str) -> tuple[str, str]:
    """Return the paths at which ``write`` puts the HTML and the JSON file."""
    stem, extension = os.path.splitext(path)
    if extension.lower() not in (".html", ".htm", ".json"):
        stem, extension = path, ".html"
    if extension.lower() == ".json":
        return stem + ".html", path
    return stem + extension, stem + ".json"


def record(observatory: Observatory) -> Recording:
    """Record the present state of a job."""
    snapshot = observatory.snapshot()
    ranks = snapshot.ranks.rank
    lines = [line for rank in ranks for line in observatory.lines(rank, limit=max(_LEAST_LINES, _LINES // len(ranks)))]
    return Recording(
        snapshot,
        {rank: observatory.series(rank) for rank in _shown(snapshot)},
        sorted(lines, key=lambda line: line.number),
    )


def _shown(snapshot: view.Snapshot) -> list[int]:
    """Choose the ranks whose curves are worth their space."""
    ranks = snapshot.ranks
    remarkable = [straggler.rank for straggler in snapshot.stragglers]
    remarkable += [rank for rank, state in zip(ranks.rank, ranks.state, strict=True) if state in _REMARKABLE]
    known = set(ranks.rank)
    return sorted([rank for rank in dict.fromkeys([*remarkable, *ranks.rank]) if rank in known][:_RANKS])


def _page(job: view.Job, recording: bytes) -> bytes:
    """Build the page's index with everything that it would load included.

    Its policy allows only its own scripts, by their digests, so that a name or a line of output could do no harm even
    if it were taken for markup.
    """
    static = files()
    index = static["index.html"].data.decode()
    scripts = [static[name].data.decode() for name in _SCRIPT.findall(index)]
    styles = [static[name].data.decode() for name in _STYLE.findall(index)]
    # Scripts that were deferred come last. A recording's text stays within its element: its "<" are written otherwise.
    text = recording.decode().replace("<", "\\u003c")
    body = f'<script type="application/json" id="recording">{text}</script>\n' + "".join(
        f"<script>{script}</script>\n" for script in scripts
    )
    policy = (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests(styles)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n' + "".join(
        f"<style>{style}</style>\n" for style in styles
    )
    title = html.escape(f"{job.command} - hvdgloo")
    page = _ICON.sub(lambda found: f'<link rel="icon" href="{_data_url(found[1])}">', _STYLE.sub("", index))
    page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{title}</title>", _SCRIPT.sub("", page), count=1)
    page = page.replace("</head>", head + "</head>", 1)
    before, _, after = page.rpartition("</body>")
    return (before + body + "</body>" + after).encode("utf-8", "replace")


def _data_url(name: str) -> str:
    file = files()[name]
    return f"data:{file.content_type};base64,{base64.b64encode(file.data).decode()}"


def _digests(texts: Iterable[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)


def _replace(path: str, data: bytes) -> None:
    """Write a file at once or not at all, for this user only: a report has everything that the job's ranks printed."""
    with replacing(path, PRIVATE) as file:
        file.write(data)
