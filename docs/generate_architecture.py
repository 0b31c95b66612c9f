"""Draw docs/images/architecture.svg from the table of tests/architecture/test_imports.py, which equals the code.

    python docs/generate_architecture.py

Each box stands for some of the parts that the rules name. An arrow means that its box imports something of the box
below. Arrows that follow from others are left out, as are arrows to the ground, on which everything stands.
"""

from __future__ import annotations

import graphlib
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.architecture.test_imports import GRAPH  # noqa: E402

TARGET = ROOT / "docs/images/architecture.svg"


class Box(NamedTuple):
    """Parts that are drawn as one.

    Attributes:
        title: the main packages.
        text: what they are for, in lines.
        parts: names in ``GRAPH`` without ``hvdgloo.``; with ``*``, all that fit and that no other box names.
        column: the position of its centre, from 0 to 1.
        width: in pixels.
    """

    title: str
    text: tuple[str, ...]
    parts: tuple[str, ...]
    column: float
    width: int = 196


BOXES = (
    Box("spark", ("ranks beside Spark's tasks,", "estimators"), ("spark*",), 0.36),
    Box("ray", ("ranks on a Ray cluster",), ("ray",), 0.48),
    Box("hvdgloo-run, hvdgloo-rendezvous", ("flags, doctor, tune",),
        ("_commands", "runner.cli", "runner.doctor", "runner.tuning", "rendezvous._cli", "*.__main__"), 0.86, 270),
    Box("run", ("jobs from Python",), ("run",), 0.66, 150),
    Box("torch, tensorflow, keras, jax, mxnet, numpy", ("front-ends: tensors, optimizers, callbacks",),
        ("torch*", "_torch_backend", "tensorflow*", "keras", "jax", "mxnet", "numpy"), 0.17, 330),
    Box("_training", ("gradients on their way", "through an optimizer"), ("_training",), 0.17),
    Box("elastic, common", ("states that survive", "a change of workers"), ("elastic", "common"), 0.17),
    Box("_collectives", ("each operation once,", "for all front-ends"), ("_collectives",), 0.17),
    Box("_job", ("one worker's membership of a job:", "init() to shutdown()"), ("_job",), 0.17, 230),
    Box("_engine", ("which operation is next,", "on all ranks alike"), ("_engine",), 0.17),
    Box("_backends", ("how bytes travel: shared", "memory, Gloo, NCCL"), ("_backends",), 0.17),
    Box("runner", ("the launcher: starts a job,", "supervises it, shows output"),
        ("runner", "runner.*"), 0.72, 230),
    Box("runner.agent", ("on each host: starts", "and ends workers"), ("runner.agent",), 0.86),
    Box("runner.protocol, network, processes", ("what launcher and agents share",),
        ("runner.protocol", "runner.network", "runner.processes", "as_horovod"), 0.84, 290),
    Box("_observe.page, _observe.top", ("a job's live page, report,", "and terminal view"),
        ("_observe.page", "_observe.top", "rendezvous._job_observer", "rendezvous._console"), 0.53, 210),
    Box("rendezvous", ("where workers meet: ranks, keys,", "epochs of elastic jobs"), ("rendezvous*",), 0.66, 230),
    Box("_observe", ("counters, samples,", "stragglers"), ("_observe",), 0.42),
)  # fmt: skip

GROUND = ("config", "_net", "_platform")
"""Parts on which everything stands, drawn as one bar. ``data`` is a name of Horovod's that imports nothing."""

_GROUND_TEXT = "_net: framed, signed messages and sockets · _platform: the machine · config: the settings"
_LEFT_OUT = {"data", "spark.data"}
_WIDTH, _MARGIN, _ROW, _HEIGHT = 1040, 16, 96, 56
_STYLE = """
  text { font-family: "DejaVu Sans", Verdana, sans-serif; text-anchor: middle; fill: #1f2933 }
  .title { font-size: 12.5px; font-weight: bold }
  .text { font-size: 11px; fill: #52606d }
  .box { fill: #ffffff; stroke: #486581; stroke-width: 1.2 }
  .ground { fill: #e4e7eb; stroke: #486581; stroke-width: 1.2 }
  .arrow { fill: none; stroke: #829ab1; stroke-width: 1.2; marker-end: url(#head) }
"""


def members(boxes: tuple[Box, ...] = BOXES, graph: Mapping[str, set[str]] = GRAPH) -> dict[str, str]:
    """Return the title of the box in which each part of the graph is; the ground's is empty.

    Raises:
        ValueError: a part has no box, or a box names a part that does not exist.
    """
    names = {name.removeprefix("hvdgloo.") for name in graph}
    placed = dict.fromkeys(GROUND, "") | {name: box.title for box in boxes for name in box.parts if name in names}
    for box in boxes:
        for pattern in (name for name in box.parts if "*" in name):
            before, _, after = pattern.partition("*")
            for name in names - set(placed) - _LEFT_OUT:
                if name.startswith(before) and name.endswith(after):
                    placed[name] = box.title
    unknown = {name for box in boxes for name in box.parts if "*" not in name} - names
    if unknown or names - set(placed) - _LEFT_OUT:
        raise ValueError(
            f"BOXES lacks {sorted(names - set(placed) - _LEFT_OUT)}, and has unknown parts {sorted(unknown)}"
        )
    return placed


def arrows() -> dict[str, set[str]]:
    """Return which boxes each box imports, without what follows from others, and without the ground."""
    placed = members()
    direct: dict[str, set[str]] = {box.title: set() for box in BOXES}
    for part, targets in GRAPH.items():
        source = placed.get(part.removeprefix("hvdgloo."))
        if source:
            direct[source] |= {placed[target] for target in targets if placed.get(target)} - {source}
    reach: dict[str, set[str]] = {}
    for title in graphlib.TopologicalSorter(direct).static_order():  # raises CycleError
        reach[title] = set().union(*({below} | reach[below] for below in direct[title]))
    return {
        title: {below for below in targets if not any(below in reach[other] for other in targets - {below})}
        for title, targets in direct.items()
    }


def rows(below: Mapping[str, set[str]]) -> dict[str, int]:
    """Return each box's row, from 0 at the bottom: one above the highest box that it imports."""
    found: dict[str, int] = {}
    for title in graphlib.TopologicalSorter(below).static_order():
        found[title] = max((found[other] + 1 for other in below[title]), default=0)
    return found


def text() -> str:
    """Return the picture."""
    below = arrows()
    row = rows(below)
    top = max(row.values())
    centre = {box.title: round(_MARGIN + box.column * (_WIDTH - 2 * _MARGIN)) for box in BOXES}
    upper = {title: _MARGIN + (top - level) * _ROW for title, level in row.items()}
    ground = _MARGIN + (top + 1) * _ROW
    height = ground + 34 + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        "<title>The parts of hvdgloo, and which of them imports which</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#829ab1"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#f5f7fa"/>',
    ]
    for title in centre:
        for other in sorted(below[title]):
            x, y = centre[title], upper[title] + _HEIGHT
            to_x, to_y = centre[other], upper[other]
            bend = (to_y - y) // 2
            lines.append(f'<path class="arrow" d="M{x},{y} C{x},{y + bend} {to_x},{to_y - bend} {to_x},{to_y - 2}"/>')
    for box in BOXES:
        x, y = centre[box.title], upper[box.title]
        lines.append(
            f'<rect class="box" x="{x - box.width // 2}" y="{y}" width="{box.width}" height="{_HEIGHT}" rx="6"/>'
        )
        lines.append(f'<text class="title" x="{x}" y="{y + 18}">{escape(box.title)}</text>')
        for number, line in enumerate(box.text):
            lines.append(f'<text class="text" x="{x}" y="{y + 34 + 14 * number}">{escape(line)}</text>')
    bar = _WIDTH - 2 * _MARGIN
    lines.append(f'<rect class="ground" x="{_MARGIN}" y="{ground}" width="{bar}" height="34" rx="6"/>')
    lines.append(f'<text class="text" x="{_WIDTH // 2}" y="{ground + 21}">{escape(_GROUND_TEXT)}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
