"""The state of one worker of an elastic job."""

from __future__ import annotations

import enum
import math

import msgspec

from hvdgloo.rendezvous._elastic.events import Fate
from hvdgloo.rendezvous._membership.assignment import NO_STATE, Candidate


class Stage(enum.Enum):
    """A worker's stage."""

    STARTING = "its process has been started, and it has not called init() yet"
    ARRIVED = "it waits in init()"
    ALONE = "it goes on by itself until it is at elastic.run, while others are in training"
    STANDBY = "it waits at elastic.run"
    MEMBER = "it belongs to the current epoch"
    RETURNED = "it belonged to the current epoch, and waits for the next one"
    FINISHED = "it has finished its training"
    DISMISSED = "it was told that it is in no further epoch"


PENDING = frozenset({Stage.ARRIVED, Stage.STANDBY, Stage.RETURNED})
"""Stages in which a worker waits for an answer."""


class Worker(msgspec.Struct):
    """A worker whose process is alive as far as is known.

    Attributes:
        id: id of this process; never used twice.
        host, slot: its host and slot.
        host_name: the host's name in messages.
        place: sort key among new workers.
        rank, epoch: its last rank and epoch; None and -1 for a new worker.
        up: True if it is connected with the other members of its epoch.
        synced: True if it was in ``elastic.run`` with the job's state.
        serial, digest: serial number and digest of its newest commit.
        pid: id of its process, for messages.
        out: why it will be in no further epoch; empty as long as it may be.
        fate: fate that it was, or will be, told.
        stopped: True if it is being ended.
        leaving: True if it announced that it will leave.
        end_by, end_reason: time at which it is ended unless it has returned or ended by then, and the reason.
        ready_at: time since which it has waited at ``elastic.run``.
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
        """True if it has not been in an epoch yet."""
        return self.rank is None

    def __str__(self) -> str:
        """Describe the worker for messages: ``rank 3 on host h2 (process 4711)``."""
        who = f"rank {self.rank}" if self.rank is not None else "a new worker"
        return f"{who} on host {self.host_name}" + (f" (process {self.pid})" if self.pid else "")

    def candidate(self) -> Candidate:
        serial = NO_STATE if self.fresh else self.serial
        return Candidate(
            self.id, self.host, self.slot, self.rank, self.place, serial, self.digest, self.host_name, self.machine
        )
