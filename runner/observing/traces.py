"""Traces of some steps of a job, ordered by an observer: requested from all ranks, and merged."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from hvdgloo._observe.merging import merge
from hvdgloo._observe.trace_control import BusyError, Trace
from hvdgloo._platform.files import PRIVATE, create
from hvdgloo.errors import ConfigError
from hvdgloo.runner.protocol.frames import Traced, TraceSteps, Tracing

PATIENCE = 120.0
"""Seconds after which ranks that have not handed in their traces are left out."""


@dataclass
class _Order:
    """One order.

    Attributes:
        trace: the trace as readers see it.
        until: time at which missing traces are given up, on the monotonic clock.
        hosts: number of hosts that were asked.
        asked: host to the number of its workers that trace.
        files: rank to the file with the received part of its trace.
        done: ranks whose traces are complete.
        closed: True if nothing more is taken for it.
    """

    trace: Trace
    until: float
    hosts: int
    asked: dict[str, int] = field(default_factory=dict)
    files: dict[int, IO[bytes]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    closed: bool = False


class Traces:
    """All traces of a job; see ``hvdgloo._observe.trace_control``.

    Orders are given on any thread; agents' traces and ticks arrive on the supervisor's.

    Args:
        order: passes an order on to all agents, and returns their number; 0 if the job is not running.
        tell: receives a line for the job's observers.
    """

    def __init__(self, order: Callable[[TraceSteps], int], tell: Callable[[str], None]) -> None:
        self._order = order
        self._tell = tell
        self._lock = threading.Lock()
        self._all: list[Trace] = []
        self._current: _Order | None = None
        self._merging: threading.Thread | None = None
        self._folder = ""

    # Called by the page.

    def trace(self, steps: int) -> Trace:
        """Have all ranks trace their next steps. Raises BusyError if that is not possible now."""
        with self._lock:
            if self._current is not None:
                raise BusyError(f"trace {self._current.trace.number} is being made; wait until it is ready")
            if not self._folder:
                try:
                    self._folder = tempfile.mkdtemp(prefix="hvdgloo-traces-")
                except OSError as error:
                    raise BusyError(f"there is no directory for traces: {error}") from None
            number = len(self._all) + 1
            hosts = self._order(TraceSteps(number, steps))
            if not hosts:
                raise BusyError("the job is not running, so there are no steps to be traced")
            trace = Trace(number, steps, "tracing", f"tracing the next {_steps(steps)}")
            self._all.append(trace)
            self._current = _Order(trace, time.monotonic() + PATIENCE, hosts)
        self._tell(f"trace {number}: {trace.text}")
        return trace

    def traces(self) -> list[Trace]:
        """Return all traces, in ascending order."""
        with self._lock:
            return list(self._all)

    def path(self, number: int) -> str:
        """Return the path of the merged file. Raises KeyError for an unknown trace, BusyError if it is not ready."""
        with self._lock:
            if not 1 <= number <= len(self._all):
                raise KeyError(number)
            trace = self._all[number - 1]
        if trace.state != "ready":
            raise BusyError(trace.text)
        return self._merged(number)

    # Called by the supervisor's thread.

    def handed_in(self, host: str, frame: Tracing | Traced) -> None:
        """Take the number of workers that an agent asked, or a piece of a rank's trace."""
        with self._lock:  # ``trace`` may not have noted its order yet
            order = self._current
        if order is None or order.closed or frame.number != order.trace.number:
            return  # it was given up
        if isinstance(frame, Tracing):
            order.asked[host] = frame.workers
        elif frame.rank not in order.done:
            try:
                self._write(order, frame)
            except OSError as error:  # a full disk is no reason to end the job
                self._over(order, "failed", f"the ranks' traces cannot be kept: {error}")
                return
        self._judge(order)

    def host_lost(self) -> None:
        """Expect nothing more from a lost host."""
        order = self._current
        if order is not None and not order.closed:
            order.hosts = max(1, order.hosts - 1)
            self._judge(order)

    @property
    def deadline(self) -> float | None:
        """Time at which ``tick`` has something to do, on the monotonic clock."""
        order = self._current
        return None if order is None or order.closed else order.until

    def tick(self) -> None:
        """Finish an order whose time is up."""
        order = self._current
        if order is not None and not order.closed and time.monotonic() >= order.until:
            self._finish(order)

    def close(self) -> None:
        """Remove all files: the job is over."""
        if self._merging is not None:
            self._merging.join()
        if self._current is not None:
            self._over(self._current, "failed", "the job ended before all ranks had traced their steps")
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # Inside.

    def _judge(self, order: _Order) -> None:
        """Merge the received traces if no more are expected."""
        if len(order.asked) >= order.hosts and len(order.done) >= sum(order.asked.values()):
            self._finish(order)

    def _write(self, order: _Order, frame: Traced) -> None:
        if frame.rank not in order.files:
            order.files[frame.rank] = os.fdopen(create(self._part(order, frame.rank), PRIVATE), "wb", buffering=0)
        order.files[frame.rank].write(frame.data)
        if frame.last:
            order.files[frame.rank].close()
            order.done.add(frame.rank)

    def _finish(self, order: _Order) -> None:
        if not order.done:
            why = (
                f"no rank sent a trace within {PATIENCE:g} s; check that they still train"
                if any(order.asked.values())
                else "no worker can be asked for a trace: either none uses hvdgloo, or all have HVDGLOO_OBSERVE=0"
            )
            self._over(order, "failed", why)
            return
        order.closed = True
        # A thousand ranks have written hundreds of megabytes, and the supervisor has agents to listen to.
        self._merging = threading.Thread(target=self._merge, args=(order,), name="hvdgloo-trace", daemon=True)
        self._merging.start()

    def _merge(self, order: _Order) -> None:
        number = order.trace.number
        missing = sum(order.asked.values()) - len(order.done)
        try:
            merge([self._part(order, rank) for rank in sorted(order.done)], self._merged(number))
            size = os.path.getsize(self._merged(number))
        except (ConfigError, OSError) as error:
            self._over(order, "failed", f"the ranks' traces cannot be merged: {error}")
            return
        ranks = f"{len(order.done)} rank{'s' if len(order.done) > 1 else ''}"
        late = f"; {missing} more did not send theirs" if missing > 0 else ""
        self._over(order, "ready", f"{_steps(order.trace.steps)} of {ranks}{late}", size)

    def _over(self, order: _Order, state: str, text: str, size: int = 0) -> None:
        number = order.trace.number
        order.closed = True
        for rank, file in order.files.items():
            file.close()
            if os.path.exists(self._part(order, rank)):
                os.unlink(self._part(order, rank))
        with self._lock:
            self._all[number - 1] = Trace(number, order.trace.steps, state, text, size)
            self._current = None
        self._tell(f"trace {number} {'is ready' if state == 'ready' else 'has failed'}: {text}")

    def _part(self, order: _Order, rank: int) -> str:
        return os.path.join(self._folder, f"{order.trace.number}.{rank}.json")

    def _merged(self, number: int) -> str:
        return os.path.join(self._folder, f"{number}.json")


def _steps(number: int) -> str:
    return f"{number} step{'s' if number != 1 else ''}"
