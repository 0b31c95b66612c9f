"""Reports of a rank's counters: at most one sample per interval, none if nothing changed or the job is not observed.

The reporter sleeps while the rank does nothing, and is woken by the next submission. While the rank works, it takes a
sample once per interval; an unchanged one is repeated now and then, for its processor time and memory. Its thread is
``hvdgloo._job.reporting``'s, which imports this only when the job has begun.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hvdgloo._net.event_loop import WakeUp
from hvdgloo._observe import samples
from hvdgloo._observe.counters import Counters
from hvdgloo._observe.outlets import Outlet
from hvdgloo._observe.resources import cpu_seconds, resident_bytes
from hvdgloo._observe.tracing import StepTracer

REPEAT_SECONDS = 5.0
"""Seconds after which a working rank repeats an unchanged sample."""

IDLE_SECONDS = 10.0
"""Seconds without a submission, and steps (``_IDLE_STEPS``) of the last one's length, after which a rank is idle."""

_IDLE_STEPS = 3

LOOK_SECONDS = 30.0
"""Seconds between an idle rank's looks for a new observer, which it has sent nothing to yet."""

OVERDUE_SECONDS = 1.0
"""Seconds after which an operation that some ranks have not submitted is reported."""

_Selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)  # epoll's would be one more descriptor

_MOST_MISSING = 16
_MOST_TEXT = 4096
_SETTINGS_EVERY = 30
"""Samples from one with the settings to the next, since one may be lost."""


class RankInEpoch(NamedTuple):
    """A rank in an epoch of its job."""

    rank: int
    size: int
    epoch: int


class Subject(Protocol):
    """The rank that is reported on; any thread may call."""

    @property
    def place(self) -> RankInEpoch: ...

    def planes(self) -> Sequence[samples.Plane]:
        """Return the data planes that are open."""
        ...

    def gpu(self) -> int:
        """Return the index of its GPU on the host; -1 for none."""
        ...

    def settings(self) -> dict[str, Any] | None:
        """Return the settings as a file for ``--config-file`` has them; None on ranks other than 0."""
        ...

    def oldest_pending(self) -> tuple[str, float]:
        """Return the operation waited for longest, and since when; see ``Engine``."""
        ...

    def missing(self, least: float) -> tuple[Sequence[samples.Missing], Sequence[tuple[int, str]]]:
        """Return, on rank 0, the operations that have waited at least ``least`` seconds for other ranks, and the stacks
        of late ranks."""
        ...

    def start_trace(self, path: str) -> bool:
        """Trace operations into a file; False if this rank's part of the job has ended. Raises ConfigError."""
        ...

    def stop_trace(self) -> None:
        """End that trace; its file is complete then."""
        ...


class Reporter:
    """Reports on one rank.

    Args:
        counters: counters of this process.
        subject: everything else about the rank.
        outlet: takes the samples; the Reporter owns it from now on.
        interval: least number of seconds between two samples.
        wake_up: ends its waits; the caller closes it.
    """

    def __init__(self, counters: Counters, subject: Subject, outlet: Outlet, interval: float, wake_up: WakeUp) -> None:
        self._counters, self._outlet, self._interval = counters, outlet, interval
        self._sampler = Sampler(counters, subject)
        self._wake_up = wake_up
        rank = subject.place.rank
        self._tracer = StepTracer(counters, rank, subject.start_trace, subject.stop_trace, self._wake_up.wake)
        self._closed = False
        self._told: samples.Sample | None = None  # the last sample that was taken
        self._listener: object = None
        self._told_at = float("-inf")
        self._noted: object = None  # the newest note at the last look

    def end(self) -> None:
        """Have ``run`` send a last sample and return; callable from any thread."""
        self._closed = True
        self._wake_up.wake()

    def run(self) -> None:
        """Report, until ``end`` is called."""
        self._counters.wake_reader = self._wake_up.wake
        try:
            due = time.monotonic()
            while not self._closed:
                now = time.monotonic()
                if now >= due:
                    due = now + (self._interval if self._look(now) else LOOK_SECONDS)
                due = self._sleep(due)
            self._look(time.monotonic(), last=True)
        finally:
            self._counters.asleep = False
            self._tracer.close()
            self._outlet.close()

    def _sleep(self, due: float) -> float:
        """Wait until a time, an order, the end, or (where nothing is going on) the next submission; returns when to
        look next."""
        counters, latest = self._counters, self._sampler.latest
        idle = due - time.monotonic() > self._interval
        if idle:
            counters.asleep = True
            # Something was submitted or noted before ``asleep`` was set, so nothing woke this thread. Notes stay in
            # their queue while the job is not observed.
            if counters.latest != latest or counters.newest_note is not self._noted:
                counters.asleep = False
                return time.monotonic()
        traced = self._tracer.advance(time.monotonic())
        until = due if traced is None else min(due, traced)
        with _Selector() as selector:
            selector.register(self._wake_up, selectors.EVENT_READ)
            if self._outlet.fileno() >= 0:
                selector.register(self._outlet.fileno(), selectors.EVENT_READ)
            selector.select(max(0.0, until - time.monotonic()))
        self._wake_up.clear()
        for order in self._outlet.orders():
            self._tracer.order(order, time.monotonic())
        if idle and not counters.asleep:
            return max(time.monotonic(), self._told_at + self._interval)
        counters.asleep = False
        return due

    def _look(self, now: float, *, last: bool = False) -> bool:
        """Send what is new; return False if the rank is idle."""
        self._noted = self._counters.newest_note
        if not self._outlet.is_open():
            self._told = None  # the next observer knows nothing
            return self._sampler.works(now)
        if self._outlet.listener != self._listener:
            self._told, self._listener = None, self._outlet.listener
        sample = self._sampler.sample(now, settings=self._told is None, last=last)
        for note in self._sampler.notes():
            self._outlet.send(samples.CODEC.encode(note))
        if last or self._has_changed(sample) or (sample.doing != "idle" and now >= self._told_at + REPEAT_SECONDS):
            data = samples.CODEC.encode(sample)
            if len(data) <= samples.LIMIT and self._outlet.send(data):
                self._told, self._told_at = sample, now
        return sample.doing != "idle" and (sample.doing != "starting" or self._sampler.works(now))

    def _has_changed(self, sample: samples.Sample) -> bool:
        told = self._told
        return told is None or _gist(told) != _gist(sample)


def _gist(sample: samples.Sample) -> tuple[object, ...]:
    """Return the fields that change only if something happens."""
    missing = [(each.name, each.count) for each in sample.missing]
    steps, operations = sample.steps.count, sample.operations
    own = sample.logged, sample.progress, sample.saves
    return steps, operations, sample.doing, sample.pending, sample.planes, missing, sample.epoch, sample.rank, own


class Sampler:
    """Makes samples, one after another.

    Attributes:
        latest: ``Counters.latest`` as of the last one.
    """

    def __init__(self, counters: Counters, subject: Subject) -> None:
        self._counters, self._subject = counters, subject
        self._before = time.monotonic(), *counters.blocked(time.monotonic())
        self._made = 0
        self._settings: dict[str, Any] | None = None
        self.latest = -1.0

    def works(self, now: float) -> bool:
        """Return whether something was submitted lately, or is waited for."""
        counters = self._counters
        self.latest = counters.latest
        lately = max(IDLE_SECONDS, _IDLE_STEPS * counters.last_step)
        if counters.latest and now - counters.latest < lately:
            return True
        return counters.blocked_in is not None or bool(self._subject.oldest_pending()[0])

    def notes(self) -> list[samples.Note]:
        """Take the notes that were queued since the last call."""
        rank, notes = self._subject.place.rank, self._counters.notes
        taken = [notes.popleft() for _ in range(len(notes))]
        return [samples.Note(rank, at, kind, text) for at, kind, text in taken]

    def sample(self, now: float, *, settings: bool, last: bool = False) -> samples.Sample:
        """Take a sample.

        Args:
            now: current time.
            settings: include the settings even if they did not change.
            last: the rank's part of the job is over.
        """
        counters, subject = self._counters, self._subject
        place = subject.place
        name, since = subject.oldest_pending()
        traffic = [*counters.traffic.values()]
        missing, stacks = subject.missing(OVERDUE_SECONDS) if place.rank == 0 else ((), ())
        doing = "ended" if last else self._doing(now)
        progress = counters.progress if place.rank == 0 else None
        current = subject.settings()
        settings = settings or current != self._settings or self._made % _SETTINGS_EVERY == 0
        self._settings = current
        self._made += 1
        early = [*counters.early] if place.rank == 0 and (settings or last or not counters.early_is_complete) else []
        return samples.Sample(
            place.rank,
            place.size,
            place.epoch,
            os.getpid(),
            time.time(),
            operations=sum(each.operations for each in traffic),
            bytes=sum(each.bytes for each in traffic),
            steps=samples.Steps(
                counters.steps,
                counters.step_seconds,
                counters.step_waiting,
                counters.step_communicating,
                counters.before_first,
                counters.last_step,
            ),
            causes=samples.Causes(counters.negotiation, counters.queue, counters.data, counters.copy, counters.wire),
            flows=[
                samples.Flow(
                    each.plane,
                    each.process_set,
                    each.operations,
                    each.bytes,
                    each.seconds,
                    each.wire_bytes,
                    each.error,
                    each.form,
                )
                for each in traffic
            ],
            doing=doing,
            pending=name,
            pending_seconds=now - since if name and since else 0.0,
            cpu_seconds=cpu_seconds(),
            memory=resident_bytes(),
            gpu=subject.gpu(),
            planes=subject.planes(),
            settings=current if settings else None,
            lateness=None if counters.lateness is None else counters.lateness.totals(),
            missing=missing[:_MOST_MISSING],
            stacks=[(rank, text[:_MOST_TEXT]) for rank, text in stacks[:_MOST_MISSING]],
            outer=samples.OuterSteps(
                counters.outer_steps,
                counters.outer_bytes,
                counters.outer_seconds,
                counters.outer_every,
                counters.outer_ended,
            ),
            logged=[*counters.logged.items()] if place.rank == 0 else (),
            progress=None if progress is None else progress.sample(counters.steps),
            saves=[samples.Saves(kind, *each) for kind, each in [*counters.saves.items()]] if place.rank == 0 else (),
            early=samples.Early([at for at, _ in early], [dict(values) for _, values in early]) if early else None,
        )

    def _doing(self, now: float) -> str:
        """Return what the rank did for most of the time since the last call."""
        counters = self._counters
        waiting, communicating = counters.blocked(now)
        before, *blocked = self._before
        self._before = now, waiting, communicating
        waiting, communicating = waiting - blocked[0], communicating - blocked[1]
        computing = now - before - waiting - communicating
        works = self.works(now)
        if waiting > max(communicating, computing):
            return "waiting"
        if communicating > computing:
            return "communicating"
        if works:
            return "computing"
        return "idle" if counters.latest else "starting"
