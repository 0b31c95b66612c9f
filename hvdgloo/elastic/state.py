"""The progress of an elastic program: saved, restored after a failure, and given to workers that join.

**Which worker's state is the newest.** Every save counts, wherever it is called and whatever class defines it: the
number of saves is a worker's *serial*, and workers at the same point of their training have equal ones. When a new
epoch of the job is formed, the worker with the highest serial gives its state to the others; where serials and contents
are equal, nothing needs to travel.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hvdgloo._collectives.agreement import highest
from hvdgloo._job import process
from hvdgloo._job.context import Context
from hvdgloo.elastic._values import copied, digest
from hvdgloo.errors import HostsUpdatedInterrupt, NotInitializedError

__all__ = ["ObjectState", "State"]

T = TypeVar("T")

REMOVED, ADDED = 1, 2
"""The kinds of update of hosts; for both together, their sum."""


class Updates(Protocol):
    """A state's source of what would change if the job's workers met now."""

    def update(self) -> tuple[int, int]:
        """Return the update's number, which grows with each change, and the sum of ``REMOVED`` and ``ADDED`` (or 0)."""


@dataclass
class Progress:
    """A job's knowledge about a state.

    Attributes:
        serial: the number of saves; 0 is the one at construction, -1 stands for none.
        is_shared: this worker has had the job's state, in a sync that came to its end.
        saving: a save is under way; one that it calls (a superclass's) does not count.
        newest: in a sync, the serial that it gives all members.
        root: in a sync, the rank whose state is the newest.
        unchanged: in a sync, all members have that state already, so that nothing needs to travel.
        is_newest: in a sync, this worker's own state is as new as the root's.
    """

    serial: int = -1
    is_shared: bool = False
    saving: bool = False
    newest: int | None = None
    root: int = 0
    unchanged: bool = False
    is_newest: bool = False

    def saved(self) -> None:
        """Count a save that has ended."""
        self.serial = self.serial + 1 if self.newest is None else self.newest + 1

    @contextmanager
    def syncing(self, newest: int, root: int, unchanged: bool) -> Iterator[None]:
        """Surround a sync, in which all members of an epoch get one member's state, and in the end the same serial."""
        self.newest, self.root, self.unchanged = newest, root, unchanged
        self.is_newest = self.is_shared and self.serial == newest
        try:
            yield
            self.serial, self.is_shared = newest + 1, True
        finally:
            self.newest, self.root, self.unchanged, self.is_newest = None, 0, False, False


class State:
    """The progress of an elastic program. Subclasses say how it is saved, restored and sent.

    Args:
        bcast_object: ``hvd.broadcast_object``.
        get_rank: ``hvd.rank``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "save" in vars(cls):
            cls.save = _counted(cls.save)  # type: ignore[method-assign]

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float | None, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._progress = Progress()
        self._updates: Updates | None = None
        self._context: Callable[[], Context] = process.current

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called, in order, whenever the job's workers have changed.

        Every member of every epoch but the first calls them, one that has just joined too, once ``hvd.rank()`` and
        ``hvd.size()`` are the new ones, and before ``sync()``. They may use collectives. What they change on all
        members (a learning rate that follows the job's size) is kept.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset()`` and the reset callbacks, now that the job's workers have changed."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Announce to all workers, at their next commit or check, that hosts are coming or going.

        An elastic job does this by itself; the function is for programs that find out in a way of their own.

        Args:
            timestamp: must be later than the last announcement's to have an effect.
            update_res: the sum of 1 (some are removed) and 2 (some are added).
        """
        self._host_messages.put((timestamp, int(update_res)))

    def _announce(self, update: int) -> None:
        """Let the program see that an update is due. The next check asks the job whether it still is."""
        self._host_messages.put((None, update))

    def commit(self) -> None:
        """Save, so that nothing before is lost to a failure, and check for updates; collective.

        Raises:
            HostsUpdatedInterrupt: hosts are coming or going; ``elastic.run`` deals with it.
        """
        self.save()
        process.group_counters().count_save("commit")
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let the job's workers change here if hosts are coming or going; collective, and cheap.

        Nothing is lost: what has been reached is saved first. All ranks raise, or none.

        Raises:
            HostsUpdatedInterrupt: hosts are coming or going; ``elastic.run`` deals with it.
        """
        told = 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get_nowait()
            if timestamp is not None and timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                told |= update
        number, update = (0, 0) if self._updates is None else self._updates.update()
        # One number for both, so that the highest is the latest of the job's news, with what it says.
        news = number << 2 | update
        try:
            news, told = highest(self._context(), "elastic.updates", (news, told))
        except NotInitializedError:
            if self._updates is not None:
                raise
        update = news & (REMOVED | ADDED) | told
        if update:
            raise HostsUpdatedInterrupt(skip_sync=update == REMOVED)

    def save(self) -> None:
        """Keep a copy of everything, to which ``restore()`` returns."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all workers the state of one, and save it; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a job whose workers have changed. Does nothing unless a subclass needs it."""

    def _digest(self) -> str:
        """Return a digest of the last save; workers with equal serials and digests saved the same values last."""
        return ""

    def _fingerprint(self) -> str:
        """Return a digest of the values now, which may have been changed since the last save (in reset callbacks, for
        example); workers whose last saves were equal still hold the same if these are equal, too."""
        return ""


def _counted(save: Callable[..., T]) -> Callable[..., T]:
    """Wrap a class's ``save()`` so that it counts, unless a subclass's ``save()`` calls it."""

    @functools.wraps(save)
    def saving(self: Any, *args: Any, **kwargs: Any) -> T:
        progress: Progress = self._progress
        if progress.saving:
            return save(self, *args, **kwargs)
        progress.saving = True
        try:
            result = save(self, *args, **kwargs)
        finally:
            progress.saving = False
        progress.saved()
        return result

    return saving


class ObjectState(State):
    """Attributes that are plain Python objects.

    Args:
        bcast_object: ``hvd.broadcast_object``.
        get_rank: ``hvd.rank``.
        kwargs: the attributes and their first values. Only these are saved, restored and sent; others that are set
            later are this worker's own.

    Saving and restoring copies deeply: what is appended to a list after a commit is gone after ``restore()``.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keep a deep copy of the attributes.

        Raises:
            InvalidArgumentError: (a ValueError) one of them can be neither copied nor pickled.
        """
        self._saved_state = copied(self._live())

    def restore(self) -> None:
        """Set the attributes to what was saved last, or to what they were at construction."""
        for name, value in copied(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Give all workers the attributes of one, and save them; collective."""
        if self._saved_state and not self._progress.unchanged:
            root = self._progress.root
            live = self._live()
            # Only what deviates from its default is passed: programs give functions of their own.
            values = self._bcast_object(live, root_rank=root) if root else self._bcast_object(live)
            self._saved_state = dict.fromkeys(values)
            for name, value in values.items():
                setattr(self, name, value)
        self.save()

    def _live(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _digest(self) -> str:
        return digest(self._saved_state)

    def _fingerprint(self) -> str:
        return digest(self._live())
