"""The job's progress, in one line below everything else on a terminal while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hvdgloo._observe import words
from hvdgloo._observe.view import Job, Snapshot, Straggler, Update
from hvdgloo.runner.console.progress import cut, seconds

WAITING_AFTER = 5.0
"""Seconds of waiting after which the line names the ranks and operations: without it, a job that hangs would show this
only with the stall report, a minute later.
"""

_NAMED = 3  # operations, and ranks that wait for one
_LONGEST = 40  # characters of an operation's name


class Reader(Protocol):
    """The source of news of the job: ``hvdgloo._observe.observatory.Subscription``."""

    def next(self, timeout: float = 0.0) -> Update | Snapshot | None: ...
    def waiting(self, least: float) -> dict[int, str]: ...


class RunProgress:
    """The line, for a ``LiveDisplay``.

    Args:
        reader: subscribes to news of the job; returns None as long as no rank has reported anything.
        now: time at which workers were started, on the clock of all other times.
    """

    def __init__(self, reader: Callable[[], Reader | None], now: float | None = None) -> None:
        self._subscribe = reader
        self._reader: Reader | None = None
        self._started = time.monotonic() if now is None else now
        self._job = Job()
        self._stragglers: list[Straggler] = []

    def over(self, now: float) -> bool:
        """Return False: the job's end closes the display."""
        return False

    def screen(self, now: float, width: int, height: int, *, colour: bool) -> list[str]:
        """Return the live view: one line, or none before any rank has made progress."""
        if self._reader is None:
            self._reader = self._subscribe()
        while self._reader is not None and (news := self._reader.next()) is not None:
            self._job = news.job
            if news.stragglers is not None:
                self._stragglers = news.stragglers
            if isinstance(news, Snapshot):
                break  # it has everything
        text = self._text()
        return [cut(f"{text}, {seconds(now - self._started)}", width)][:height] if text else []

    def line(self, now: float) -> str:
        """Return nothing for a log."""
        return ""

    def done(self, now: float) -> str:
        """Return nothing for a log."""
        return ""

    def _text(self) -> str:
        job = self._job
        parts = self._place()
        ranks = f"{job.size} rank{'s' if job.size != 1 else ''}"
        if self._reader is not None and (waiting := self._reader.waiting(WAITING_AFTER)):
            return f"{', '.join([ranks, *parts])}: {_described(waiting)}"
        if job.progress is not None:
            parts += words.left(job.progress.remaining)
        if job.steps and job.steps_per_second:
            parts.append(f"{words.number(job.steps_per_second)} steps/s")
        elif job.bytes_per_second and not job.steps:
            parts.append(f"{words.size(job.bytes_per_second)}/s")
        return f"{', '.join([ranks, *parts])}{self._slowest()}" if parts else ""

    def _place(self) -> list[str]:
        """Return the progress as the program tells it with ``hvd.log``; otherwise the number of steps."""
        job = self._job
        if told := job.progress:
            known = words.progress(told.step, told.steps, told.epoch, told.epochs, told.share)
            if told.step is not None or told.epoch is not None:
                return known
        return [f"{job.steps:,} step{'s' if job.steps != 1 else ''}"] if job.steps else []

    def _slowest(self) -> str:
        if not self._stragglers:
            return ""
        first = self._stragglers[0]
        each = first.unit.removesuffix("s")
        return f", slowest: rank {first.rank} ({first.host}), {words.duration(first.seconds)} in each {each}"


def _described(waiting: Mapping[int, str]) -> str:
    """Say which ranks wait for which operation."""
    by_name: dict[str, list[int]] = {}
    for rank, name in waiting.items():
        by_name.setdefault(name, []).append(rank)
    groups = [(ranks, name) for name, ranks in by_name.items() if name]
    groups += [(ranks, name) for name, ranks in by_name.items() if not name]
    parts: list[str] = []
    for ranks, name in groups[:_NAMED]:
        verb = "" if parts else " wait" if len(ranks) > 1 else " waits"
        parts.append(f"{_ranks(ranks)}{verb} for {name[:_LONGEST] or 'nothing'}")
    more = len(groups) - _NAMED
    return ", ".join(parts) + (f", and others for {more} more" if more > 0 else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks"
    named = [str(rank) for rank in ranks]
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named[:-1])} and {named[-1]}"
