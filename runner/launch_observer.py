"""The launcher's observer of its supervisor: it passes on what comes from workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdgloo.runner.console.console import Console
from hvdgloo.runner.console.startup_view import LiveDisplay, StartDisplay
from hvdgloo.runner.observing.job_observer import JobObserver
from hvdgloo.runner.surroundings import Results


class LaunchObserver:
    """Receiver of everything that a supervisor reports: passes output to the console, steps to the start-up view,
    results to their receiver, and output and events to the job's observer.

    Attributes:
        job_observer: the observer of the job.
        display: view of the hosts, and then the workers, that are waited for.
        progress: view of the job's progress, shown while none is waited for.
    """

    def __init__(
        self, console: Console, display: StartDisplay, results: Results | None, job_observer: JobObserver
    ) -> None:
        self.progress: LiveDisplay | None = None
        self.step = display.step
        self.culprit = console.culprit
        self.interrupted = console.interrupted
        self._console = console
        self.display: LiveDisplay = display
        self._results = results
        self.job_observer = job_observer

    def output(self, number: int, stream: int, data: bytes) -> None:
        self._console.output(number, stream, data)
        self.job_observer.output(number, stream, data)

    def notice(self, text: str) -> None:
        self._console.notice(text)
        self.job_observer.event("warning", text)

    def news(self, text: str) -> None:
        self._console.news(text)
        self.job_observer.event("elastic", text)

    def tick(self) -> float | None:
        display = self.display.tick()
        if display is None and self.progress is not None:
            display = self.progress.tick()
        times = (self._console.tick(), display, self.job_observer.tick())
        return min((when for when in times if when is not None), default=None)

    @contextmanager
    def running(self, progress: LiveDisplay | None) -> Iterator[None]:
        """Show the job's progress whenever no host or worker is waited for.

        Args:
            progress: view of the progress; None if it is not wanted.
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
