"""Where what comes from workers goes: to the console, to files, to the receiver of results."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO

from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo.runner.console.console import Console
from hvdgloo.runner.console.startup_view import LiveDisplay, StartDisplay
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.show.showing import Showing
from hvdgloo.runner.signals import Outside
from hvdgloo.runner.transport.base import Spawner

_LAST_WORDS = 0.5  # seconds that a blocked terminal may delay the end


class Results(Protocol):
    """Receives what tasks return, piece by piece."""

    def add(self, rank: int, data: bytes) -> None: ...

    def clear(self) -> None:
        """All workers will be started again: what has come is void."""


@dataclass(frozen=True)
class Surroundings:
    """What a job is run in: where its output goes, what may end it, who looks on. See ``hvdgloo.runner.launch.launch``.

    Attributes:
        showing: for those who look on.
    """

    stdout: TextIO
    stderr: TextIO
    quiet: bool
    news: bool
    signals: tuple[signal.Signals, ...]
    results: Results | None
    spawner: Spawner | None
    fork: bool
    outside: Outside
    showing: Showing


class Observer:
    """Passes output to the console, steps to the start-up view, results to their receiver, and all that is worth seeing
    to those who look at the job.

    Attributes:
        display: what is shown now of those who are waited for: hosts, then workers.
        progress: what is shown while nobody is waited for.
    """

    def __init__(self, console: Console, display: StartDisplay, results: Results | None, showing: Showing) -> None:
        self.progress: LiveDisplay | None = None
        self.step = display.step
        self.culprit = console.culprit
        self.interrupted = console.interrupted
        self._console = console
        self.display: LiveDisplay = display
        self._results = results
        self._showing = showing

    def output(self, number: int, stream: int, data: bytes) -> None:
        self._console.output(number, stream, data)
        self._showing.output(number, stream, data)

    def notice(self, text: str) -> None:
        self._console.notice(text)
        self._showing.event("warning", text)

    def news(self, text: str) -> None:
        self._console.news(text)
        self._showing.event("elastic", text)

    def tick(self) -> float | None:
        display = self.display.tick()
        if display is None and self.progress is not None:
            display = self.progress.tick()
        times = (self._console.tick(), display, self._showing.tick())
        return min((when for when in times if when is not None), default=None)

    @contextmanager
    def running(self, progress: LiveDisplay | None) -> Iterator[None]:
        """As long as this lasts, the job's progress is shown whenever nobody is waited for.

        Args:
            progress: shows it; None if it is not wanted.
        """
        self.progress = progress
        try:
            yield
        finally:
            if progress is not None:
                progress.close()

    def suspend(self) -> None:
        self.display.suspend()
        if self.progress is not None:
            self.progress.suspend()

    @property
    def congested(self) -> bool:
        return self._console.congested

    def result(self, rank: int, data: bytes) -> None:
        if self._results is not None:
            self._results.add(rank, data)


@contextmanager
def open_console(
    spec: LaunchSpec, around: Surroundings, rank_of: Callable[[int], int] = lambda number: number
) -> Iterator[Console]:
    """The console of a job, for as long as that lasts; ``rank_of`` is as there."""
    console = Console(
        stdout=around.stdout,
        stderr=around.stderr,
        timestamps=spec.timestamps,
        interactive=spec.stdin_rank,
        shown=spec.log_ranks,
        prefix=spec.prefix,
        quiet=around.quiet,
        news=around.news,
        backlog=spec.backlog,
        rank_of=rank_of,
    )
    try:
        yield console
    finally:
        # Also where an error ends the job: the list of a start is taken away, and notices are shown, before it is told.
        console.wait_until_written(_LAST_WORDS)
        console.close()


def expect(console: Console, spec: LaunchSpec, np: int, *, again: bool = False) -> None:
    """Prepare for the output of ``np`` workers; ``again`` if they have been started before."""
    if spec.output_directory is not None:
        reserve_descriptors(2 * np, "this launcher", f"the output files of {np} workers")
    console.expect(np, spec.output_directory, again=again)
