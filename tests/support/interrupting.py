"""Ctrl-C at any line of the library, one after the other."""

from __future__ import annotations

import linecache
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import hvdgloo

_FOLDER = str(Path(hvdgloo.__file__).parent)

_TIMES = 2
"""The number of a line's runs in a call that are interrupted: a loop's third turn hardly differs from its second."""

Place = tuple[str, str, int, int]
"""A file, a function in it, a line, and which of its runs."""


@dataclass
class Line:
    """A line at which a call is interrupted.

    Attributes:
        place: Ctrl-C comes before it; None if it does not come.
        known: every place that calls have reached. It grows, since which thread runs the engine is chance.
    """

    place: Place | None
    known: dict[Place, None] = field(repr=False)

    def __str__(self) -> str:
        if self.place is None:
            return "none"
        file, function, line, run = self.place
        return f"{Path(file).relative_to(_FOLDER)}:{line} ({function}, run {run})"


def lines(stride: int = 1) -> Iterator[Line]:
    """Yield no line, then each ``stride``-th of those that ``interrupted_at`` has met by then."""
    known: dict[Place, None] = {}
    yield Line(None, known)
    index = 0
    places: list[Place] = []
    while True:
        places.extend(list(known)[len(places) :])
        if index >= len(places):
            break
        yield Line(places[index], known)
        index += stride
    assert len(places) > 10, "hardly any line was run"


def at_each_line(trial: Callable[[Line], None], stride: int = 1) -> None:
    """Try it with Ctrl-C at each of ``lines``."""
    for line in lines(stride):
        trial(line)


def interrupted_at(line: Line, call: Callable[[], Any]) -> bool:
    """Call something on the main thread, and have Ctrl-C come before a line of the library that runs in it.

    Returns:
        whether it came, and raised.
    """
    came = False
    runs: Counter[tuple[str, str, int]] = Counter()

    def within(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal came
        if event == "line" and not came:
            at = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
            runs[at] += 1
            if runs[at] > _TIMES:
                return within
            if linecache.getline(at[0], at[2]).lstrip().startswith("with "):
                return within  # also traced just before __exit__ is called, where Python never runs a handler
            place = (*at, runs[at])
            line.known[place] = None
            if place == line.place:
                came = True
                signal.raise_signal(signal.SIGINT)
        return within

    def look(frame: FrameType, event: str, argument: object) -> Any:
        return within if frame.f_code.co_filename.startswith(_FOLDER) and not came else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert not came, "Ctrl-C came, and was lost"
    return False
