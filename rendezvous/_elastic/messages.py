"""What the workers of an elastic job and its rendezvous server say to each other, in msgpack as all their messages."""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeAlias

import msgspec

from hvdgloo._net.codec import Codec, Count, Message

_LONGEST = 4096
_MOST_WORKERS = 1 << 17

_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_LONGEST)]
_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-1)]


class CurrentEpoch(Message, frozen=True):
    """What a worker says of the epoch that it is in, with everything else: a server that was restarted knows nothing.

    Attributes:
        epoch: its number.
        rank, size: of this worker, and of the epoch.
        synced: this worker has had the job's state in it.
        info: ``WorkerInfo.to_dict()``.
    """

    epoch: Count
    rank: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WORKERS)]
    synced: bool
    info: dict[str, Any]


class Register(Message, frozen=True):
    """A worker asks for the epoch after the last one that it was in; the fields are those of ``events.Registered``.

    Attributes:
        info: ``WorkerInfo.to_dict()``.
    """

    worker: _Id
    after: _Number
    ready: bool
    serial: _Number
    digest: _Text
    error: _Text
    accused: Annotated[list[Count], msgspec.Meta(max_length=_MOST_WORKERS)]
    stood: Annotated[float, msgspec.Meta(ge=0)]
    info: dict[str, Any]


class Formed(Message, frozen=True, tag=0):
    """The answer to a member of an epoch.

    Attributes:
        rank: of this worker.
        topology: of the epoch, packed.
        root: the rank that has the newest state.
        everyone: all members have that state.
        new: the ranks of those who have not been in an epoch before.
    """

    rank: Count
    topology: bytes
    root: Count
    everyone: bool
    new: Annotated[list[Count], msgspec.Meta(max_length=_MOST_WORKERS)]


class Alone(Message, frozen=True, tag=1):
    """The answer to a worker that has come while others are in training: the place that it will probably get.

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
    """The answer to a worker that is in no further epoch. It is signed, as it ends the worker's process.

    Attributes:
        fate: a ``Fate``'s value.
        reason: in words.
    """

    fate: str
    reason: str


Reply: TypeAlias = Formed | Alone | Dismissed


class Progress(enum.Enum):
    """What a worker reports."""

    UP = "up"
    SYNCED = "synced"
    FINISHED = "finished"
    LEAVING = "leaving"


class Report(Message, frozen=True):
    """A worker says how far it is.

    Attributes:
        epoch: what is reported of; -1 where that makes no difference.
        current: the worker's epoch; None if it is in none.
    """

    worker: _Id
    progress: Progress
    epoch: _Number
    current: CurrentEpoch | None


class Listen(Message, frozen=True):
    """A worker asks for news.

    Attributes:
        since: the number of the last ones that it has heard; -1 if it has heard none.
        current: the worker's epoch; None if it is in none.
    """

    worker: _Id
    since: _Number
    current: CurrentEpoch | None


class News(Message, frozen=True):
    """What has changed for those that are in training.

    Attributes:
        number: grows with every change of the other fields.
        serial: grows with every change of ``update``.
        update: what would change at the next commit, as the sum of 1 (workers are removed) and 2 (workers are added);
            0 for nothing, also where something was announced and is withdrawn.
        voided: the highest epoch that will not come about; -1 if none.
        reason: why it does not.
        epoch: the one for whose members ``update`` holds; -1 if nothing was ever announced.
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
