"""Whom a supervisor tells what: its observer, who takes what comes from workers, and those who look at the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdgloo.runner.protocol.frames import Frame, Observe
from hvdgloo.runner.supervise.host_state import HostState


class SupervisionObserver(Protocol):
    """Receives what comes from the workers. None of these may block."""

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
class Seat:
    """Where a worker is, and which rank it has."""

    number: int
    rank: int
    host: str
    local_rank: int


class Audience(Protocol):
    """What is told about a job. None of these may block.

    Attributes:
        observe: what agents are told with their start; None while nobody looks at the job.
    """

    observe: Observe | None

    def host(self, name: str, state: str, reason: str = "") -> None:
        """A host is "up", is "left out" for the time being, was "lost", or has "left" the job."""

    def placed(self, epoch: int, seats: Sequence[Seat]) -> None:
        """These workers form an epoch of the job; one of a fixed size has only one."""

    def spawned(self, number: int, pid: int) -> None:
        """A worker was started as this process of its host."""

    def ended(self, number: int, status: int | None, reason: str) -> None:
        """A worker has ended: ``status`` is as in ``JobOutcome``. It was stopped if ``reason`` is empty."""

    def reported(self, host: str, frame: Frame) -> None:
        """An agent has passed on what was observed on its host, or traces of its workers."""


class Nobody:
    """No audience."""

    observe: Observe | None = None

    def host(self, name: str, state: str, reason: str = "") -> None: ...
    def placed(self, epoch: int, seats: Sequence[Seat]) -> None: ...
    def spawned(self, number: int, pid: int) -> None: ...
    def ended(self, number: int, status: int | None, reason: str) -> None: ...
    def reported(self, host: str, frame: Frame) -> None: ...
