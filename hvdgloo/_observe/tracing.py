"""Traces of the next steps, ordered while the job runs.

A trace begins where a step ends, so that it has whole steps, and is written by the engine's Timeline.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hvdgloo._observe import samples
from hvdgloo._observe.counters import Counters
from hvdgloo.errors import ConfigError

LONGEST_SECONDS = 60.0
"""Seconds that a trace may take, and that a step may last before tracing begins in the middle of it."""

PATIENCE = 2.0
"""Seconds, and steps (``_STEPS``) of the last one's length, after which a step that does not end is not waited for."""

_STEPS = 3

STEPLESS_SECONDS = 3.0
"""Seconds that a trace takes where no steps end."""


class StepTracer:
    """Traces one rank's next steps; for the Reporter's thread.

    Args:
        counters: of this process, which count its steps.
        rank: this rank, which is part of the file's name.
        start: begins to trace into a file, next to any other trace; returns False if the rank's part of the job has
            ended. Raises ConfigError if the file cannot be written.
        stop: ends that trace; the file is complete then.
        wake: has the thread call ``advance``; callable from any thread.
    """

    def __init__(
        self,
        counters: Counters,
        rank: int,
        start: Callable[[str], bool],
        stop: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._counters, self._rank = counters, rank
        self._start, self._stop, self._wake = start, stop, wake
        self._order: samples.TraceOrder | None = None
        self._tracing = False
        self._next_step = 0  # number of steps at which there is something to do
        self._deadline = 0.0

    def order(self, order: samples.TraceOrder, now: float) -> None:
        """Trace the next steps from now on; while a trace is out, another one is refused."""
        if self._order is not None:
            self._counters.note("trace", f"rank {self._rank} has not finished trace {self._order.number} yet")
            return
        self._order = order
        counters = self._counters
        waits = min(LONGEST_SECONDS, max(PATIENCE, _STEPS * counters.last_step)) if counters.steps else 0.0
        self._await(counters.steps + 1, now + waits)

    def advance(self, now: float) -> float | None:
        """Do what is due. Returns the time at which the next thing is due; None if nothing is."""
        order = self._order
        if order is None:
            return None
        if self._counters.steps >= self._next_step or now >= self._deadline:
            if self._tracing:
                self._end(order)
            else:
                self._begin(order, now)
        return None if self._order is None else self._deadline

    def close(self) -> None:
        """End the trace, since this rank's part of the job ends."""
        if self._order is not None and self._tracing:
            self._end(self._order)
        if self._counters.on_step == self._stepped:  # not the hook of this process's next job
            self._counters.on_step = None

    def _await(self, step: int, deadline: float) -> None:
        self._next_step, self._deadline = step, deadline
        self._counters.on_step = self._stepped

    def _stepped(self, steps: int) -> None:
        if steps >= self._next_step:
            self._wake()

    def _begin(self, order: samples.TraceOrder, now: float) -> None:
        try:
            if not self._start(self._path(order, "part")):
                raise ConfigError("its part of the job has ended")
        except ConfigError as error:
            self._give_up(order, error)
            return
        self._tracing = True
        seconds = LONGEST_SECONDS
        if self._counters.steps < self._next_step:
            seconds = STEPLESS_SECONDS
            if self._rank == 0:  # once is enough
                text = (
                    f"rank 0 ends no steps, so trace {order.number} is of {seconds:g} s and not of {order.steps} steps"
                )
                self._counters.note("trace", text)
        self._await(self._counters.steps + order.steps, now + seconds)

    def _end(self, order: samples.TraceOrder) -> None:
        self._stop()
        try:
            os.rename(self._path(order, "part"), self._path(order, "json"))
        except OSError as error:
            self._give_up(order, error)
        self._rest()

    def _give_up(self, order: samples.TraceOrder, error: Exception) -> None:
        self._counters.note("trace", f"rank {self._rank} cannot write trace {order.number}: {error}")
        self._rest()

    def _rest(self) -> None:
        self._order, self._tracing = None, False
        self._counters.on_step = None

    def _path(self, order: samples.TraceOrder, suffix: str) -> str:
        return os.path.join(order.folder, f"trace.{order.number}.{self._rank}.{suffix}")
