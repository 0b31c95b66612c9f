"""Counters of a process's own collectives and training steps: totals since it began.

The engine's threads and the program's write here in every operation, so there is no lock, and almost no clock is read
only for this. Each total has one writer at a time: submissions are under the Member's lock, operations are executed by
one thread, and a program ends its steps one after another. A reader sees totals that are at most an operation apart.

Durations are in seconds, points in time are ``time.monotonic()``'s.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hvdgloo._observe.lateness import LatenessBook
    from hvdgloo._observe.progress import Progress

AGREEMENT = "agreement"
"""The plane of small tensors that travel with the negotiation."""

_MOST_NOTES = 64

EARLY_SECONDS, EARLY_TIMES = 0.1, 64
"""Seconds between the first times at which logged numbers are kept, so that trainings of a few seconds have curves, and
the number of these times."""

_MOST_EARLY = 512  # numbers, at all these times


class Awaited(Protocol):
    """An operation that a thread waits for.

    Attributes:
        name: of its tensor.
        ordered: time at which it was given its place in the order; 0 before.
    """

    @property
    def name(self) -> str: ...

    @property
    def ordered(self) -> float: ...


class Trace(Protocol):
    """A timeline, which takes phases that have ended; times are by its ``now``."""

    def now(self) -> float: ...

    def phase(
        self, tensor: str, name: str, begin: float, end: float, args: Mapping[str, Any] | None = None
    ) -> None: ...


class Traffic:
    """Totals of one data plane for one process set, as in ``samples.Flow``.

    Args:
        plane: name of the data plane.
        process_set: number of the process set.

    Attributes:
        form: name of the form in which values were encoded last; empty if none were.
        rounding: sums of squares of what encoding has lost and of what was encoded, in samples.
    """

    __slots__ = (
        "_since",
        "_under_way",
        "bytes",
        "form",
        "operations",
        "plane",
        "process_set",
        "rounding",
        "seconds",
        "wire_bytes",
    )

    def __init__(self, plane: str, process_set: int) -> None:
        self.plane = plane
        self.process_set = process_set
        self.operations = 0
        self.bytes = 0
        self.seconds = 0.0
        self.wire_bytes = 0
        self.form = ""
        self.rounding = 0.0, 0.0
        self._under_way = 0
        self._since = 0.0

    def begun(self, now: float) -> None:
        """Count a bucket that was handed to the plane."""
        if not self._under_way:
            self._since = now
        self._under_way += 1

    @property
    def error(self) -> float:
        """The relative error of encoded values."""
        lost, whole = self.rounding
        return math.sqrt(lost / whole) if whole else 0.0

    def ended(self, now: float, operations: int, nbytes: int, wire_bytes: int = 0) -> None:
        """Count a bucket of ``operations`` tensors that the plane finished.

        Args:
            wire_bytes: size of these tensors in the form in which they crossed between hosts; 0 if they did not.
        """
        self.operations += operations
        self.bytes += nbytes
        self.wire_bytes += wire_bytes
        self._under_way -= 1
        if not self._under_way:
            self.seconds += now - self._since

    def dropped(self) -> None:
        """Forget the buckets under way, which will not finish: their engine ended."""
        self._under_way = 0


class Counters:
    """One process's totals. They outlive its engines, of which there is one at a time.

    Attributes:
        latest: time of the last submission or end of a step; 0 if there was none.
        first: time of the first submission in this step; 0 if there was none.
        asleep: True while the reader sleeps until something happens, and wants to be woken by ``wake``.
        blocked_in: operation that the program has waited for since ``blocked_since``; None if it does not wait.
        negotiation, queue, data, copy, wire: see ``samples.Causes``.
        waiting, communicating: time in which the program was blocked for operations that not all ranks had submitted,
            and for those that all had.
        steps, step_seconds, step_waiting, step_communicating, before_first, last_step: see ``samples.Steps``.
        outer_steps, outer_bytes, outer_seconds, outer_every, outer_ended: see ``samples.OuterSteps``.
        traffic: by plane and process set.
        lateness: on rank 0 of several.
        notes: time (since 1970), kind and text of each ``samples.Note`` that is still to be sent.
        on_step: called with ``steps`` whenever a step has ended.
        timeline: trace that is being written; None if there is none.
        logged: number by name, as the program logged it last; replaced, never changed.
        progress: progress of the training, as far as the program tells it.
        early: what was logged first: each time (since 1970), and the numbers then. Until it is complete, the last entry
            is the latest.
        saves: for each kind of ``samples.Saves`` their number, and the end of the last one.
    """

    __slots__ = (
        "_communicating_before",
        "_step_began",
        "_waiting_before",
        "asleep",
        "before_first",
        "blocked_in",
        "blocked_since",
        "communicating",
        "copy",
        "data",
        "early",
        "first",
        "last_step",
        "lateness",
        "latest",
        "logged",
        "negotiation",
        "notes",
        "on_step",
        "outer_bytes",
        "outer_ended",
        "outer_every",
        "outer_seconds",
        "outer_steps",
        "progress",
        "queue",
        "saves",
        "step_communicating",
        "step_seconds",
        "step_waiting",
        "steps",
        "timeline",
        "traffic",
        "waiting",
        "wake_reader",
        "wire",
    )

    def __init__(self) -> None:
        self.latest = self.first = 0.0
        self.asleep = False
        self.wake_reader: Callable[[], None] = _nothing
        self.blocked_in: Awaited | None = None
        self.blocked_since = 0.0
        self.negotiation = self.queue = self.data = self.copy = self.wire = 0.0
        self.waiting = self.communicating = 0.0
        self.steps = 0
        self.step_seconds = self.step_waiting = self.step_communicating = 0.0
        self.before_first = self.last_step = 0.0
        self.outer_steps = self.outer_bytes = self.outer_every = 0
        self.outer_seconds = self.outer_ended = 0.0
        self.traffic: dict[tuple[str, int], Traffic] = {}
        self.lateness: LatenessBook | None = None
        self.notes: deque[tuple[float, str, str]] = deque(maxlen=_MOST_NOTES)
        self.on_step: Callable[[int], None] | None = None
        self.timeline: Trace | None = None
        self.logged: Mapping[str, float] = {}
        self.progress: Progress | None = None
        self.early: list[tuple[float, Mapping[str, float]]] = []
        self.saves: dict[str, tuple[int, float]] = {}
        self._step_began = 0.0
        self._waiting_before = self._communicating_before = 0.0

    def engine_begins(self, *, coordinates: bool) -> None:
        """Prepare for another engine that writes from now on.

        Args:
            coordinates: True if it is rank 0's, of several. Lateness starts again: ranks that were late before belong
                to another job or epoch.
        """
        for traffic in self.traffic.values():
            traffic.dropped()
        self.blocked_in = None
        self._step_began = 0.0  # a step in which the ranks change says nothing about any step
        self.lateness = None
        if coordinates:
            from hvdgloo._observe.lateness import LatenessBook  # the other ranks do not need it

            self.lateness = LatenessBook()

    def wake(self) -> None:
        """Wake the reader."""
        self.asleep = False
        self.wake_reader()

    def note(self, kind: str, text: str) -> None:
        """Queue a ``samples.Note``; callable from any thread."""
        self.notes.append((time.time(), kind, text))
        self.wake()

    @property
    def newest_note(self) -> tuple[float, str, str] | None:
        """The last of ``notes``; None if there are none."""
        try:
            return self.notes[-1]
        except IndexError:  # a reader may take them at any time
            return None

    def carried(self, plane: str, process_set: int) -> Traffic:
        """Return the totals of a plane for a process set, to be added to."""
        traffic = self.traffic.get((plane, process_set))
        if traffic is None:
            traffic = self.traffic[plane, process_set] = Traffic(plane, process_set)
        return traffic

    def unblocked(self, ordered: float, now: float) -> None:
        """Count the wait for ``blocked_in``, which ended.

        Args:
            ordered: time at which the operation was given its place in the order; 0 if it was not.
            now: current time.
        """
        self.blocked_in = None
        since = self.blocked_since
        if ordered <= since:
            if ordered:
                self.communicating += now - since
            else:
                self.waiting += now - since
        else:
            turn = min(ordered, now)
            self.waiting += turn - since
            self.communicating += now - turn

    def blocked(self, now: float) -> tuple[float, float]:
        """Return ``waiting`` and ``communicating`` up to ``now``, including a wait that has not ended."""
        awaited, since = self.blocked_in, self.blocked_since
        if awaited is None:
            return self.waiting, self.communicating
        turn = min(max(awaited.ordered, since), now) if awaited.ordered else now
        return self.waiting + turn - since, self.communicating + now - turn

    def step(self) -> None:
        """Count a training step that ended."""
        now = time.monotonic()
        began = self._step_began
        if began:
            self.last_step = now - began
            self.step_seconds += now - began
            self.step_waiting += self.waiting - self._waiting_before
            self.step_communicating += self.communicating - self._communicating_before
            if self.first:
                self.before_first += self.first - began
        self._waiting_before, self._communicating_before = self.waiting, self.communicating
        self._step_began = self.latest = now
        self.first = 0.0
        self.steps += 1
        if self.lateness is not None:
            self.lateness.end_round()
        if self.asleep:
            self.wake()
        if self.on_step is not None:
            self.on_step(self.steps)

    def count_outer_steps(self, count: int, nbytes: int, seconds: float, every: int) -> None:
        """Count outer steps; see ``Context.count_outer_steps``."""
        if count:
            self.outer_ended = time.time()
        self.outer_every = every
        self.outer_bytes += nbytes
        self.outer_seconds += seconds
        self.outer_steps += count

    def count_save(self, kind: str) -> None:
        """Count a save that ended; see ``samples.Saves``."""
        count, _ = self.saves.get(kind, (0, 0.0))
        self.saves[kind] = count + 1, time.time()
        self.latest = time.monotonic()
        if self.asleep:
            self.wake()

    def log(
        self,
        values: Mapping[str, float],
        step: int | None = None,
        steps: int | None = None,
        epoch: int | None = None,
        epochs: int | None = None,
    ) -> None:
        """Keep numbers that the program logs, and its progress; see ``progress.Progress.after``."""
        if values:
            self.logged = {**self.logged, **values}
            if not self.early_is_complete:
                self._keep_early()
        if not (step is steps is epoch is epochs is None):
            from hvdgloo._observe.progress import Progress  # which programs that log nothing do not need

            before = Progress() if self.progress is None else self.progress
            self.progress = before.after(step, steps, epoch, epochs, self.steps)
        self.latest = time.monotonic()
        if self.asleep:
            self.wake()

    @property
    def early_is_complete(self) -> bool:
        """True if ``early`` changes no more."""
        times = len(self.early)
        return times >= EARLY_TIMES or times * len(self.logged) > _MOST_EARLY

    def _keep_early(self) -> None:
        now, early = time.time(), self.early
        if len(early) > 1 and now - early[-2][0] < EARLY_SECONDS:
            early[-1] = now, self.logged
        else:
            early.append((now, self.logged))

    @property
    def operations(self) -> int:
        """Number of tensors that were exchanged."""
        return sum(traffic.operations for traffic in [*self.traffic.values()])

    @property
    def bytes(self) -> int:
        """Size of these tensors on this rank."""
        return sum(traffic.bytes for traffic in [*self.traffic.values()])


def _nothing() -> None:
    """Do nothing: no reader sleeps."""
