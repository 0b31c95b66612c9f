"""The interfaces that a supervisor reports to: its own observer, and the observers of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdgloo.runner.protocol.frames import Frame, Observe
from hvdgloo.runner.supervise.host_state import HostState


class SupervisionObserver(Protocol):
    """The receiver of data from the workers. None of its methods may block."""

    def output(self, rank: int, stream: int, data: bytes) -> None: ...
    def result(self, rank: int, data: bytes) -> None: ...
    def notice(self, text: str) -> None: ...
    def news(self, text: str) -> None: ...
    def step(self, host: HostState) -> None: ...
    def suspend(self) -> None: ...
    def interrupted(self) -> None: ...
    def tick(self) -> float | None: ...
    def culprit(self, rank: int) -> int | None: ...
    @property
    def congested(self) -> bool: ...


@dataclass(frozen=True)
class PlacedWorker:
    """A worker's host and rank."""

    number: int
    rank: int
    host: str
    local_rank: int


class JobObservers:
    """The observers of a job; these are none. None of the methods may block.

    Attributes:
        observe: sent to agents when they start; None while the job has no observers.
    """

    observe: Observe | None = None

    def host(self, name: str, state: str, reason: str = "") -> None:
        """Report that a host is "up", is "left out" for the time being, was "lost", or has "left" the job."""

    def placed(self, epoch: int, workers: Sequence[PlacedWorker]) -> None:
        """Report the workers that form an epoch of the job; a job of a fixed size has only one epoch."""

    def spawned(self, number: int, pid: int) -> None:
        """Report that a worker was started as this process of its host."""

    def ended(self, number: int, status: int | None, reason: str) -> None:
        """Report that a worker has ended: ``status`` is as in ``JobOutcome``. It was stopped if ``reason`` is empty."""

    def reported(self, host: str, frame: Frame) -> None:
        """Report an agent's observations of its host, or its workers' traces."""
