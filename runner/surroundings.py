"""The surroundings in which a job is launched: its output, signals, results and transport."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from hvdgloo.runner.signals import COMMAND_LINE_SIGNALS, Outside, no_outside_system
from hvdgloo.runner.transport.base import Spawner


class Results(Protocol):
    """Receiver of what tasks return, piece by piece."""

    def add(self, rank: int, data: bytes) -> None: ...

    def clear(self) -> None:
        """Discard everything received: all workers will be started again."""


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a job.

    Attributes:
        stdout, stderr: receive the workers' output.
        quiet: suppress the launcher's own notices,
        news: except for those about workers that were lost, have joined, or are restarted.
        signals: signals to pass on to the workers, if this is the main thread.
        results: receives the results of tasks.
        spawner: starts agents; by default chosen from the hosts. A given one may start several on one machine.
        fork: this process exists for this job alone, and has loaded nothing that a fork might break.
        outside: watches another system in which agents live, and calls its argument if the job cannot go on.
    """

    stdout: TextIO
    stderr: TextIO
    quiet: bool = False
    news: bool = True
    signals: Sequence[signal.Signals] = COMMAND_LINE_SIGNALS
    results: Results | None = None
    spawner: Spawner | None = None
    fork: bool = False
    outside: Outside = no_outside_system
