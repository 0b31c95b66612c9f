"""The surroundings in which a job is launched: its output, signals, results, transport and observer."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol, TextIO

from hvdgloo.runner.observing.job_observer import JobObserver
from hvdgloo.runner.signals import Outside
from hvdgloo.runner.transport.base import Spawner


class Results(Protocol):
    """Receiver of what tasks return, piece by piece."""

    def add(self, rank: int, data: bytes) -> None: ...

    def clear(self) -> None:
        """Discard everything received: all workers will be started again."""


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a job: destination of its output, signals, observer. See ``hvdgloo.runner.launch.launch``."""

    stdout: TextIO
    stderr: TextIO
    quiet: bool
    news: bool
    signals: tuple[signal.Signals, ...]
    results: Results | None
    spawner: Spawner | None
    fork: bool
    outside: Outside
    job_observer: JobObserver
