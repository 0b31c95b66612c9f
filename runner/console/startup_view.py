"""The view of a start: a live list on a terminal, plain lines in a log, nothing if the start is quick.

On a terminal, the list appears only after a while, is redrawn when a host makes progress and once a second, and
vanishes when all hosts are ready. It stays below other output. Its lines are cut to the terminal's current width every
time, so the window may be resized; and it is removed before Ctrl-Z stops the launcher.

In a log, there is a line after some seconds, and then at growing intervals; with ``--verbose``, one for every step of
every host.

Once the workers have started, those that have not called ``hvd.init()`` are shown in the same way: frameworks take
seconds to import, and minutes on a busy machine. A log gets one line about them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hvdgloo.runner.console.console import Window
from hvdgloo.runner.console.progress import Backoff, Progress, Stage, first_report, seconds

SHOW_AFTER = 2.0
"""Seconds of start-up after which the list appears."""

INIT_LINE_AFTER = 5.0
"""Seconds after the workers' start at which a log reports the number of workers in ``hvd.init()``."""

_REDRAW = 1.0  # seconds between redraws where only the time has changed
_CALM = 0.1  # minimum seconds between redraws


class Surface(Protocol):
    """The methods of a Console that the display needs."""

    def notice(self, text: str) -> None: ...
    def window(self) -> Window | None: ...
    def below(self, lines: Sequence[str]) -> None: ...
    def wait_until_written(self, timeout: float) -> None: ...


class Source(Protocol):
    """The subject of a wait. Times are on the display's clock."""

    def over(self, now: float) -> bool:
        """Tell whether the wait is over."""

    def screen(self, now: float, width: int, height: int, *, colour: bool) -> list[str]:
        """Return the live view: at most ``height`` lines, none wider than ``width``."""

    def line(self, now: float) -> str:
        """Return the state in one line, for a log; empty if there is nothing to report."""

    def done(self, now: float) -> str:
        """Return the final line for a log that had a ``line``."""


class LiveDisplay:
    """A view of a wait, until it is over or ``close`` is called.

    Args:
        source: the subject of the wait.
        surface: the place where it is shown.
        lines: the times of lines in a log.
        environ: tells whether the terminal supports colours (TERM, NO_COLOR).
        verbose: lines instead of a live view.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        source: Source,
        surface: Surface,
        lines: Backoff,
        *,
        environ: Mapping[str, str],
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self._source = source
        self._surface = surface
        self._verbose = verbose
        self._clock = clock
        self._dumb = environ.get("TERM", "") in ("", "dumb")
        self._colour = not environ.get("NO_COLOR")
        self._lines = lines
        self._next_drawing = now + SHOW_AFTER
        self._last_drawing = now
        self._shown = False
        self._said = False
        self._closed = False

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tick(self) -> float | None:
        """Show what is due; return the time of the next call."""
        now = self._clock()
        if self._closed or self._source.over(now):
            self._hide()
            return None
        window = None if self._verbose or self._dumb else self._surface.window()
        if window is not None:
            if now >= self._next_drawing:
                self._draw(now, window)
            return self._next_drawing
        self._hide()
        if self._lines.due(now) and (line := self._source.line(now)):
            self._surface.notice(line)
            self._said = True
        return self._lines.next

    def suspend(self) -> None:
        """Leave the terminal to others while the launcher is stopped. The view reappears when next due."""
        self._hide()
        self._surface.wait_until_written(0.5)

    def close(self) -> None:
        """End the view, whether or not the wait succeeded."""
        self._closed = True
        self._hide()
        now = self._clock()
        if self._said and self._source.over(now) and (text := self._source.done(now)):
            # A user who saw a line about the wait is told that it is over.
            self._surface.notice(text)

    def _draw(self, now: float, window: Window) -> None:
        # The last row stays free: that is where the cursor is.
        rows = self._source.screen(now, window.width, max(1, window.height - 1), colour=self._colour)
        self._surface.below(rows)
        self._shown = True
        self._last_drawing = now
        self._next_drawing = now + _REDRAW

    def _hide(self) -> None:
        if self._shown:
            self._shown = False
            self._surface.below([])


class StartDisplay(LiveDisplay):
    """A view of the hosts' progress, until all are ready or ``close`` is called.

    Args:
        hosts: in order; their progress is read from them.
        surface, environ, verbose, clock: as for ``LiveDisplay``. With ``verbose`` there is a line for each step.
        doing: beginning of the headline, before the number of hosts.
    """

    def __init__(
        self,
        hosts: Sequence[Stage],
        surface: Surface,
        *,
        environ: Mapping[str, str],
        verbose: bool = False,
        doing: str = "starting on",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self._progress = Progress(hosts, now, doing)
        lines = Backoff(now, first_report(verbose))
        super().__init__(self._progress, surface, lines, environ=environ, verbose=verbose, clock=clock)

    def step(self, host: Stage) -> None:
        """Show that a host has made progress, or that there is news about it."""
        if self._closed:
            return
        if self._verbose:
            more = f" ({host.detail})" if host.detail else ""
            elapsed = seconds(self._progress.elapsed(self._clock()))
            self._surface.notice(f"{host.name}: {host.step.value} after {elapsed}{more}")
        if self._shown:
            self._next_drawing = min(self._next_drawing, self._last_drawing + _CALM)
