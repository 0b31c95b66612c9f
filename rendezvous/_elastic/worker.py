"""What an elastic job knows of one worker."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from hvdgloo.rendezvous._elastic.assignment import NO_STATE, Candidate
from hvdgloo.rendezvous._elastic.events import Fate


class Stage(enum.Enum):
    """Where a worker is."""

    STARTING = "its process has been started, and it has not called init() yet"
    ARRIVED = "it waits in init()"
    ALONE = "it goes on by itself until it is at elastic.run, while others are in training"
    STANDBY = "it waits at elastic.run"
    MEMBER = "it belongs to the current epoch"
    RETURNED = "it belonged to the current epoch, and waits for the next one"
    FINISHED = "it has come to the end of its training"
    DISMISSED = "it was told that it is in no further epoch"


PENDING = frozenset({Stage.ARRIVED, Stage.STANDBY, Stage.RETURNED})
"""Stages in which a worker waits for an answer."""


@dataclass
class Worker:
    """One worker whose process is, as far as is known, alive.

    Attributes:
        id: of this process; never used twice.
        host, slot: where it is.
        host_name: for messages.
        place: newcomers are in ascending order of this.
        rank, epoch: its last rank, and the epoch in which it had it; None and -1 for a newcomer.
        up: it is connected with the other members of its epoch.
        synced: it has been in ``elastic.run`` with the job's state.
        serial, digest: of its newest commit.
        pid: for messages.
        out: why it will be in no further epoch; empty as long as it may be.
        fate: what it was, or is to be, told about that.
        stopped: it is being ended.
        leaving: it has said that it will not be there much longer.
        end_by: when it is ended unless it has come back, or has ended by itself, until then; and ``end_reason``.
        ready_at: since when it waits at ``elastic.run``.
    """

    id: str
    host: str
    slot: int
    place: tuple[int, int]
    machine: str = ""
    stage: Stage = Stage.STARTING
    rank: int | None = None
    epoch: int = -1
    up: bool = False
    synced: bool = False
    serial: int = NO_STATE
    digest: str = ""
    pid: int = 0
    out: str = ""
    fate: Fate = Fate.REMOVED
    stopped: bool = False
    leaving: bool = False
    host_name: str = ""
    end_by: float = math.inf
    end_reason: str = ""
    ready_at: float = math.inf

    @property
    def pending(self) -> bool:
        return self.stage in PENDING

    @property
    def fresh(self) -> bool:
        """Whether it has not been in an epoch yet."""
        return self.rank is None

    def __str__(self) -> str:
        """As in messages: ``rank 3 on host h2 (process 4711)``."""
        who = f"rank {self.rank}" if self.rank is not None else "a new worker"
        return f"{who} on host {self.host_name}" + (f" (process {self.pid})" if self.pid else "")

    def candidate(self) -> Candidate:
        serial = NO_STATE if self.fresh else self.serial
        return Candidate(
            self.id, self.host, self.slot, self.rank, self.place, serial, self.digest, self.host_name, self.machine
        )
