"""The timeline: a trace in Chrome's event format, for chrome://tracing and ui.perfetto.dev.

Every tensor has a row ("process") of its own, on which the phases of each collective follow and enclose each other::

    NEGOTIATE_ALLREDUCE  (rank 0: a tick for every rank that comes)
    ALLREDUCE
        QUEUE  MEMCPY_IN_FUSION_BUFFER  GLOO_ALLREDUCE  MEMCPY_OUT_FUSION_BUFFER

The file is a complete JSON array at every moment, even if the process is killed or the disk is full: events are written
into space left before the closing bracket, and when that is used up, a copy with more of it replaces the file. (A
program that reads it in pieces while it grows gets some or none of what is new.) Events are formatted and written by a
thread of their own: the engine only notes times.

Source: "Trace Event Format", the Chromium project's document of that name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdgloo._engine.messages import Request, Response
from hvdgloo._platform.files import replacing
from hvdgloo._platform.queues import take_within
from hvdgloo._platform.writable import INCOMPLETE, make_directory_of
from hvdgloo.errors import ConfigError

if TYPE_CHECKING:
    from hvdgloo._engine.fusion import Bucket
    from hvdgloo._engine.submission import Submission

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 5.0
_GATHER_SECONDS = 0.03
"""Events that arrive within this time are written at once: a program may read an operation's 0.1 s after its end."""

_CLOSE = b"\n]\n"
_PAGE = 4096
_CAPACITY = 1 << 16
_COPY = 1 << 20
_BATCH = 4096
"""The largest number of events that are written at once."""
_RESERVE = 256
"""Bytes that are kept free at a trace's end, for the event that says why it is incomplete."""


class Timeline:
    """One rank's trace.

    Args:
        path: of the file, which is overwritten.
        rank: of the process that writes it.
        clock_offset: seconds to add to this rank's clock to get rank 0's.
        mark_cycles: also show when rank 0 orders operations.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str, rank: int, clock_offset: float = 0.0, *, mark_cycles: bool = False) -> None:
        self.path = path
        self.mark_cycles = mark_cycles
        self._start = time.perf_counter()
        self._file = -1
        self._end = self._capacity = 0
        self._begun = False
        try:
            make_directory_of(path)
            self._move(_CAPACITY)
        except OSError as error:
            raise ConfigError(f"the timeline cannot be written to {path}: {error.strerror or error}") from None
        self._rows: dict[str, int] = {}
        self._first_arrival: dict[tuple[int, str], float] = {}
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._closed = False
        epoch = {
            "start_time_since_epoch_in_micros": int((time.time() + clock_offset) * 1e6),
            "rank": rank,
            "clock_offset_in_micros": int(clock_offset * 1e6),
        }
        self._write(
            [
                _metadata(0, "process_name", {"name": "", **epoch}),
                _metadata(0, "process_sort_index", {"sort_index": -1}),
            ]
        )
        self._thread = threading.Thread(target=self._run, name="hvdgloo-timeline", daemon=True)
        self._thread.start()

    # What the engine calls. Times are by ``now``.

    @staticmethod
    def now() -> float:
        """Seconds on the clock that phases are measured by."""
        return time.perf_counter()

    def ordered(self, batch: Sequence[tuple[Response, Submission]]) -> None:
        """Operations have been given their places in the order, and wait for the data plane."""
        now = self.now()
        for response, operation in batch:
            if operation.times:
                for row in _rows(response):
                    self._negotiated(row, response, operation.times[0], now)
            operation.times = (operation.times[0] if operation.times else now, now)

    def inlined(self, response: Response, operation: Submission) -> None:
        """An operation's result came with its order."""
        now = self.now()
        if operation.times:
            (row,) = _rows(response)
            self._negotiated(row, response, operation.times[0], now)
            name = response.request.collective.name
            self.phase(row, name, now, now, _facts(response, 0))
            self.phase(row, f"INLINE_{name}", now, now)

    def executed(
        self,
        bucket: Bucket,
        batch: Sequence[tuple[Response, Submission]],
        name: str,
        times: Sequence[float],
        packed: bool,
    ) -> None:
        """A bucket's results are in place.

        Args:
            name: the name of what the backend did.
            times: when it was begun, when its tensors' fences had been waited for, when the backend was called, and
                when that had finished.
            packed: its tensors were copied into a buffer and out of it.
        """
        now = self.now()
        begun, fenced, sent, done = times
        waited = any(batch[part.operation][1].ready is not None for part in bucket.parts)
        for part in bucket.parts:
            response, operation = batch[part.operation]
            row = _rows(response)[max(0, part.tensor)]
            ordered = operation.times[1] if len(operation.times) > 1 else begun
            self.phase(row, response.request.collective.name, ordered, now, _facts(response, part.tensor))
            self.phase(row, "QUEUE", ordered, begun)
            if waited:
                self.phase(row, "WAIT_FOR_DATA", begun, fenced)
            if packed:
                self.phase(row, "MEMCPY_IN_FUSION_BUFFER", fenced, sent)
            if part.tensor >= 0:
                self.phase(row, name, sent, done)
            if packed:
                self.phase(row, "MEMCPY_OUT_FUSION_BUFFER", done, now)

    def arrived(self, rank: int, request: Request) -> None:
        """Rank 0: a rank has submitted something."""
        at = self.now()
        for row in _rows(Response(request)):
            self._first_arrival.setdefault((request.process_set, row), at)
            self.phase(row, str(rank), at, at)

    def settled(self, request: Request, *, executed_here: bool) -> None:
        """Rank 0: an operation was given its place in the order, or an error."""
        if not executed_here:
            for row in _rows(Response(request)):
                self._first_arrival.pop((request.process_set, row), None)

    def _negotiated(self, row: str, response: Response, submitted: float, now: float) -> None:
        begin = min(submitted, self._first_arrival.pop((response.request.process_set, row), submitted))
        self.phase(row, f"NEGOTIATE_{response.request.collective.name}", begin, now)

    def phase(self, tensor: str, name: str, begin: float, end: float, args: Mapping[str, Any] | None = None) -> None:
        """A phase that has ended."""
        event = {"name": name, "ph": "X", "ts": self._micros(begin), "dur": round((end - begin) * 1e6, 3)}
        self._put(event, tensor, args)

    def cycle(self, at: float) -> None:
        """Rank 0 has ordered what was ready."""
        if self.mark_cycles and not self._closed:
            self._queue.put({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": self._micros(at)})

    def close(self) -> None:
        """Write what is left. Later events are dropped; may be called twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(_JOIN_SECONDS)

    def _micros(self, at: float) -> float:
        return round((at - self._start) * 1e6, 3)

    def _put(self, event: dict[str, Any], tensor: str, args: Mapping[str, Any] | None) -> None:
        if self._closed:
            return
        event["tensor"] = tensor
        if args:
            event["args"] = dict(args)
        self._queue.put(event)

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                batch = [self._queue.get()]
                # Events that arrive together are written together: fewer writes.
                until = time.monotonic() + _GATHER_SECONDS
                while batch[-1] is not None and len(batch) < _BATCH and (left := until - time.monotonic()) > 0:
                    try:
                        batch.append(take_within(self._queue, left))
                    except queue.Empty:
                        break
                events = [event for event in batch if event is not None]
                if events:
                    self._write([written for event in events for written in self._placed(event)])
                if None in batch:
                    with contextlib.suppress(OSError):  # on a full disk the space that is left stays: all is written
                        self._move(self._end)
                    return
        except OSError as error:
            logger.warning("the timeline %s ends here: %s", self.path, error)
            self._closed = True
            with contextlib.suppress(OSError):
                self._mark_incomplete(error.strerror or str(error))
        finally:
            os.close(self._file)

    def _mark_incomplete(self, reason: str) -> None:
        """Say so in the trace itself, in space that it has already; for its readers, and for the launcher."""
        event = {"name": INCOMPLETE + reason, "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": self._micros(self.now())}
        text = f",\n{json.dumps(event, separators=(',', ':'))}".encode()
        if len(text) <= _RESERVE:
            os.pwrite(self._file, text, self._capacity - len(text))

    def _placed(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """An event with its row's number, preceded by the row's name if the row is new."""
        tensor = event.pop("tensor", None)
        if tensor is None:
            return [event]
        row = self._rows.get(tensor)
        new = row is None
        if row is None:
            row = self._rows[tensor] = len(self._rows) + 1
        event.update(pid=row, tid=0)
        if not new:
            return [event]
        return [
            _metadata(row, "process_name", {"name": tensor}),
            _metadata(row, "process_sort_index", {"sort_index": row}),
            event,
        ]

    def _write(self, events: list[dict[str, Any]]) -> None:
        """Put events into the space before the closing bracket; no write of several crosses the end of a page.

        A kill, or a full disk, ends a write between two pages, and would leave half an event.
        """
        piece = b""
        for event in events:
            text = (b",\n" if self._begun else b"") + json.dumps(event, separators=(",", ":")).encode()
            self._begun = True
            if piece and (self._end % _PAGE + len(piece) + len(text) > _PAGE):
                self._put_down(piece)
                piece = b""
            piece += text
        if piece:
            self._put_down(piece)

    def _put_down(self, piece: bytes) -> None:
        if self._end % _PAGE + len(piece) > _PAGE:
            self._end += -self._end % _PAGE  # spaces remain where the event would have begun
        if self._end + len(piece) > self._capacity - _RESERVE:
            self._move(2 * self._capacity + len(piece))
        try:
            os.pwrite(self._file, piece, self._end)
        except OSError:
            os.pwrite(self._file, b" " * len(piece), self._end)  # erase the part that has been written
            raise
        self._end += len(piece)

    def _move(self, capacity: int) -> None:
        """Replace the file by a copy with room for ``capacity`` bytes before the closing bracket."""
        kept = -1
        try:
            with replacing(self.path) as file:
                position = 0
                while self._file >= 0 and position < self._end:
                    data = os.pread(self._file, min(_COPY, self._end - position), position)
                    file.write(data)
                    position += len(data)
                file.write((b"[" if not self._end else b"") + b" " * (capacity - max(1, self._end)) + _CLOSE)
                kept = os.dup(file.fileno())  # by its name it could be another program's file a moment later
        except OSError:
            if kept >= 0:
                os.close(kept)
            raise
        old, self._file = self._file, kept
        if old >= 0:
            os.close(old)
        self._end, self._capacity = max(1, self._end), capacity


class Timelines:
    """Several that are written at once; each is told the same, as if it were the only one."""

    now = staticmethod(Timeline.now)

    def __init__(self, *timelines: Timeline) -> None:
        self._all = timelines

    def ordered(self, batch: Sequence[tuple[Response, Submission]]) -> None:
        for each in self._all:
            each.ordered(batch)

    def inlined(self, response: Response, operation: Submission) -> None:
        for each in self._all:
            each.inlined(response, operation)

    def executed(
        self,
        bucket: Bucket,
        batch: Sequence[tuple[Response, Submission]],
        name: str,
        times: Sequence[float],
        packed: bool,
    ) -> None:
        for each in self._all:
            each.executed(bucket, batch, name, times, packed)

    def arrived(self, rank: int, request: Request) -> None:
        for each in self._all:
            each.arrived(rank, request)

    def settled(self, request: Request, *, executed_here: bool) -> None:
        for each in self._all:
            each.settled(request, executed_here=executed_here)

    def phase(self, tensor: str, name: str, begin: float, end: float, args: Mapping[str, Any] | None = None) -> None:
        for each in self._all:
            each.phase(tensor, name, begin, end, args)

    def cycle(self, at: float) -> None:
        for each in self._all:
            each.cycle(at)


def _rows(response: Response) -> list[str]:
    """The names of an operation's rows, one for each tensor."""
    request = response.request
    if len(request.tensors) < 2:
        return [request.name]
    return [f"{request.name}[{index}]" for index in range(len(request.tensors))]


def _facts(response: Response, tensor: int) -> dict[str, Any]:
    if tensor < 0:
        return {}
    spec = response.request.tensors[tensor]
    return {"dtype": str(spec.dtype), "shape": list(spec.shape), "bytes": response.sizes[tensor]}


def _metadata(row: int, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": row, "tid": 0, "args": dict(args)}
