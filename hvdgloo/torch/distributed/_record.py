"""Counts of the operations of this process's groups, and their events in its timeline.

An operation costs some additions. Several threads may count at the same time: each addition is a single step of the
interpreter's, or nearly, and what a rare coincidence loses is one operation of a total.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdgloo._backends.shm.calls import Call, Calls
from hvdgloo._job import process
from hvdgloo._observe.counters import Counters, Traffic
from hvdgloo._observe.lateness import SHORTEST

if TYPE_CHECKING:
    from hvdgloo._observe import samples

PREFIX = "dist."
"""Beginning of the names under which the counters have torch.distributed's operations."""

_MOST_RANKS = 16

_LEAST_LATENESS = round(SHORTEST * 1e6)
"""Microseconds for which the first rank must have waited for the last one, for that to count: small operations would
otherwise take longer for this."""

_traffic: dict[str, Traffic] = {}
"""Totals of this process by kind of operation."""

_open: dict[Record, None] = {}
"""The records of all open groups; the reporter's thread reads them."""


class Awaited(Protocol):
    """An operation that is waited for, from ``began`` on; see ``counters.Awaited``."""

    began: float

    @property
    def name(self) -> str: ...

    @property
    def ordered(self) -> float: ...


class Place(Protocol):
    """A group's connection.

    Attributes:
        calls: of all ranks; None where they are not compared.
        numbers: each rank's number among all of the job's.
        plane: the data plane, and why it is used.
    """

    @property
    def calls(self) -> Calls | None: ...

    @property
    def numbers(self) -> Sequence[int]: ...

    @property
    def plane(self) -> str: ...


class Record:
    """The counts of one queue of operations.

    Args:
        counters: of the process.

    Attributes:
        awaited: operation that takes longer; None if there is none.
        place: the queue's connection, once there is one.
    """

    def __init__(self, counters: Counters, label: str) -> None:
        self.counters, self._label = counters, label
        self.awaited: Awaited | None = None
        self.place: Place | None = None
        self._calls: Calls | None = None
        _open[self] = None

    def connected(self, place: Place) -> None:
        """Note the queue's connection."""
        self.place, self._calls = place, place.calls

    def close(self) -> None:
        """Stop to show what is awaited; the totals stay."""
        self.no_longer_awaited()
        _open.pop(self, None)

    def waits(self, awaited: Awaited, *, blocks: bool) -> None:
        """Note an operation that takes longer.

        Args:
            blocks: True if the program waits for it.
        """
        self.awaited = awaited
        counters = self.counters
        if blocks and counters.blocked_in is None:
            counters.blocked_since = awaited.began
            counters.blocked_in = awaited

    def no_longer_awaited(self) -> None:
        """Forget that operation."""
        awaited, self.awaited = self.awaited, None
        blocked_in: object = self.counters.blocked_in
        if awaited is not None and blocked_in is awaited:
            self.counters.blocked_in = None

    def ended(self, call: Call, kind: str, nbytes: int, begun: float, queued: float = 0.0) -> float:
        """Count an operation that has ended.

        Args:
            kind: its name.
            nbytes: of this rank's tensors.
            begun: time at which this rank began it.
            queued: seconds for which it was in the queue before.

        Returns:
            the time at which all ranks had come, as far as that is known.
        """
        now = time.monotonic()
        counters = self.counters
        came = begun
        if self._calls is not None:
            arrivals = self._calls.arrivals()
            if arrivals is not None:
                late, waited, most = arrivals
                if waited:
                    came = min(begun + waited * 1e-6, now)
                    counters.negotiation += came - begun
                if most >= _LEAST_LATENESS and counters.lateness is not None and self.place is not None:
                    counters.lateness.came_last(self.place.numbers[late], most * 1e-6)
        traffic = _traffic.get(kind) or self._carried(kind)
        traffic.operations += 1
        traffic.bytes += nbytes
        traffic.seconds += now - came
        counters.wire += now - came
        counters.latest = now
        if not counters.first:
            counters.first = begun
        if self.awaited is not None:
            self.no_longer_awaited()
        if counters.asleep:
            counters.wake()
        if counters.timeline is not None:
            self._trace(call, kind, nbytes, begun, queued, came, now)
        return came

    def ended_at_once(self, call: Call, nbytes: int, begun: float) -> None:
        """Count an operation that has ended in the call of the program."""
        came = self.ended(call, call.kind, nbytes, begun)
        counters = self.counters
        if came > begun:
            counters.waiting += came - begun
        counters.communicating += counters.latest - came

    def _carried(self, kind: str) -> Traffic:
        traffic = _traffic[kind] = self.counters.carried(PREFIX + kind, 0)
        return traffic

    def _trace(self, call: Call, kind: str, nbytes: int, begun: float, queued: float, came: float, now: float) -> None:
        timeline = self.counters.timeline
        if timeline is None:
            return
        shift = timeline.now() - time.monotonic()
        row, name = self._label, kind.upper()
        if queued > 0:
            timeline.phase(row, "QUEUE", begun - queued + shift, begun + shift)
        args = {"call": str(call), "bytes": nbytes} if kind == call.kind else {"bytes": nbytes}
        timeline.phase(row, name, begun + shift, now + shift, args)
        if came > begun:
            timeline.phase(row, f"WAIT_FOR_RANKS_{name}", begun + shift, came + shift)


class ProcessGroups:
    """All groups of this process, see ``group_reporting.Groups``."""

    def oldest_pending(self) -> tuple[str, float]:
        awaited = [each for record in list(_open) if (each := record.awaited) is not None]
        oldest = min(awaited, key=lambda each: each.began, default=None)
        return ("", 0.0) if oldest is None else (oldest.name, oldest.began)

    def planes(self) -> Sequence[samples.Plane]:
        from hvdgloo._observe import samples

        places = [place for record in list(_open) if (place := record.place) is not None]
        largest = max(places, key=lambda place: len(place.numbers), default=None)
        why = "" if largest is None else largest.plane
        return [samples.Plane(PREFIX + kind, 0, "cpu", why) for kind in list(_traffic)]

    def missing(self, least: float) -> Sequence[samples.Missing]:
        from hvdgloo._observe import samples

        now = time.monotonic()
        found = []
        for record in list(_open):
            awaited, place = record.awaited, record.place
            if awaited is None or now - awaited.began < least or place is None or place.calls is None:
                continue
            absent = [place.numbers[rank] for rank in place.calls.absent()]
            if absent:
                found.append(samples.Missing(awaited.name, now - awaited.began, absent[:_MOST_RANKS], len(absent)))
        return found


class Steps:
    """Training steps: each is a ``step()`` of the first optimizer that the process uses. With ``hvd.init()`` hvdgloo's
    own optimizers count them."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._optimizer: weakref.ref[Any] | None = None
        self._hook = register_optimizer_step_post_hook(self._ended)

    def _ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or process.is_initialized():
            return
        counted = None if self._optimizer is None else self._optimizer()
        if counted is None:
            self._optimizer = weakref.ref(optimizer)
        elif counted is not optimizer:
            return  # a step of several optimizers is counted once
        self._counters.step()

    def close(self) -> None:
        """Stop counting."""
        self._hook.remove()


_steps: Steps | None = None
_number: int | None = None
"""This process's rank in its first group, which has all ranks."""


def own_number(rank: int) -> int:
    """Return this process's rank in the group of all ranks; ``rank`` if there is none."""
    return rank if _number is None else _number


def begin(rank: int, size: int) -> Counters | None:
    """Have this process's operations shown, if anything is to be counted.

    Args:
        rank, size: of the group that is made.
    """
    global _number, _steps
    if _number is None:
        _number = rank
    counters = process.groups_begin(ProcessGroups(), rank, size)
    if counters is not None and _steps is None:
        _steps = Steps(counters)
    return counters


def end() -> None:
    """Send the last report, since no group is left."""
    global _number, _steps
    _number = None
    process.groups_ended()
    if _steps is not None:
        _steps.close()
        _steps = None


def after_fork_in_child() -> None:
    """Leave reports and timeline to the process that this one was forked from."""
    global _number
    process.groups_after_fork_in_child()
    _number = None
    _open.clear()
