"""Messages between the workers of an elastic job and its rendezvous server, in msgpack as all their messages."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from hvdgloo._net.codec import Codec, Count, Message

_LONGEST = 4096
_MOST_WORKERS = 1 << 17

_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_LONGEST)]
_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-1)]


class CurrentEpoch(Message, frozen=True):
    """A worker's present epoch, which it adds to its requests because a restarted server knows nothing.

    Attributes:
        epoch: number of the epoch.
        rank: this worker's rank.
        size: number of the epoch's members.
        synced: True if this worker had the job's state in it.
        info: ``WorkerInfo.to_dict()``.
    """

    epoch: Count
    rank: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WORKERS)]
    synced: bool = False
    info: dict[str, Any] = {}


class Register(Message, frozen=True):
    """A worker's request for the epoch after its last one. It gets one reply, at once or later.

    Repeating the request, as clients do whose connection or poll ended, changes nothing.

    Attributes:
        worker: its id.
        after: its last epoch; -1 if it has not been a member yet.
        ready: True once it has reached ``elastic.run``; False in ``init()``.
        serial, digest: serial number and digest of its newest commit; -1 if it has none.
        error: why it left the epoch; empty if a change of hosts is the reason.
        accused: ranks of that epoch that it cannot reach, or that did not answer.
        stood: seconds since it began to wait for others in that epoch.
        info: ``WorkerInfo.to_dict()``.
    """

    worker: _Id
    after: _Number = -1
    ready: bool = False
    serial: _Number = -1
    digest: _Text = ""
    error: _Text = ""
    accused: Annotated[Sequence[Count], msgspec.Meta(max_length=_MOST_WORKERS)] = ()
    stood: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    info: dict[str, Any] = {}


class Formed(Message, frozen=True, tag=0):
    """The reply to a member of an epoch.

    Attributes:
        rank: this worker's rank.
        topology: packed topology of the epoch.
        root: rank that has the newest state.
        everyone: True if all members have that state.
        new: ranks of the members that have not been in an epoch before.
    """

    rank: Count
    topology: bytes
    root: Count
    everyone: bool
    new: Annotated[list[Count], msgspec.Meta(max_length=_MOST_WORKERS)]


class Alone(Message, frozen=True, tag=1):
    """The reply to a worker that arrived while others are in training: the place that it will probably get.

    Attributes:
        rank, size, local_rank, local_size, cross_rank, cross_size: as in ``hvd.*``.
    """

    rank: Count
    size: Count
    local_rank: Count
    local_size: Count
    cross_rank: Count
    cross_size: Count


class Dismissed(Message, frozen=True, tag=2):
    """The reply to a worker that will be in no further epoch. It is signed, since it ends the worker's process.

    Attributes:
        fate: value of a ``Fate``.
        reason: reason in words.
    """

    fate: str
    reason: str


Reply: TypeAlias = Formed | Alone | Dismissed


class Progress(enum.Enum):
    """A worker's progress in its epoch."""

    UP = "up"
    SYNCED = "synced"
    FINISHED = "finished"
    LEAVING = "leaving"


class Report(Message, frozen=True):
    """A worker's report of its progress.

    Attributes:
        epoch: epoch that the report is about; -1 where that makes no difference.
        current: the worker's epoch; None if it is in none.
    """

    worker: _Id
    progress: Progress
    epoch: _Number
    current: CurrentEpoch | None


class Listen(Message, frozen=True):
    """A worker's request for news.

    Attributes:
        since: number of the last news that it received; -1 if it received none.
        current: the worker's epoch; None if it is in none.
    """

    worker: _Id
    since: _Number
    current: CurrentEpoch | None


class News(Message, frozen=True):
    """Changes for the workers in training.

    Attributes:
        number: grows with every change of the other fields.
        serial: grows with every change of ``update``.
        update: change at the next commit, as the sum of 1 (workers are removed) and 2 (workers are added); 0 for none,
            also after an announcement was withdrawn.
        voided: highest epoch that was given up; -1 if none was.
        reason: why that epoch was given up.
        epoch: epoch for whose members ``update`` holds; -1 if nothing was ever announced.
    """

    number: Count
    serial: Count
    update: Count
    voided: _Number
    reason: str
    epoch: _Number = -1


REGISTER: Codec[Register] = Codec(Register, "question of a worker")
REPLY: Codec[Reply] = Codec(Reply, "answer to a worker")
REPORT: Codec[Report] = Codec(Report, "report of a worker")
LISTEN: Codec[Listen] = Codec(Listen, "request for news")
NEWS: Codec[News] = Codec(News, "news for workers")
