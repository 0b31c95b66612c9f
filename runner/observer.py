"""Where what comes from workers goes: to the console, to files, to the receiver of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo.runner.console.console import Console
from hvdgloo.runner.console.startup_view import LiveDisplay, StartDisplay
from hvdgloo.runner.job.spec import LaunchSpec

_LAST_WORDS = 0.5  # seconds that a blocked terminal may delay the end


class Results(Protocol):
    """Receives what tasks return, piece by piece."""

    def add(self, rank: int, data: bytes) -> None: ...

    def clear(self) -> None:
        """All workers will be started again: what has come is void."""


class Observer:
    """Passes output to the console, steps to the start-up view, and results to their receiver.

    Attributes:
        display: what is shown now of those who are waited for: hosts, then workers.
    """

    def __init__(self, console: Console, display: StartDisplay, results: Results | None) -> None:
        self.output = console.output
        self.notice = console.notice
        self.news = console.news
        self.step = display.step
        self.culprit = console.culprit
        self.interrupted = console.interrupted
        self._console = console
        self.display: LiveDisplay = display
        self._results = results

    def tick(self) -> float | None:
        return min((when for when in (self._console.tick(), self.display.tick()) if when is not None), default=None)

    def suspend(self) -> None:
        self.display.suspend()

    @property
    def congested(self) -> bool:
        return self._console.congested

    def result(self, rank: int, data: bytes) -> None:
        if self._results is not None:
            self._results.add(rank, data)


@contextmanager
def open_console(
    spec: LaunchSpec,
    stdout: TextIO,
    stderr: TextIO,
    quiet: bool,
    news: bool,
    rank_of: Callable[[int], int] = lambda number: number,
) -> Iterator[Console]:
    """The console of a job, for as long as that lasts.

    Args:
        quiet, news, rank_of: see ``Console``.
    """
    console = Console(
        stdout=stdout,
        stderr=stderr,
        timestamps=spec.timestamps,
        interactive=spec.stdin_rank,
        shown=spec.log_ranks,
        prefix=spec.prefix,
        quiet=quiet,
        news=news,
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
