"""Observations of workers and of their host, collected here and passed on once a second.

Workers send datagrams to a Unix socket, whose path they find in ``HVDGLOO_OBSERVER``. It exists only while there are
observers of the job: before that, each attempt fails at once, and costs next to nothing. The datagrams are not parsed
here.

The socket is in a directory of this agent's, which only this user can enter. It also contains the workers' own sockets,
named after their processes, which receive requests for traces, and the finished traces.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any

from hvdgloo._platform.runtime import AGENT_SOCKET, agent_folder, remove_stale
from hvdgloo.errors import ConfigError
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import CHUNK, Frame, Observe, Observed, Traced, TraceSteps, Tracing

if TYPE_CHECKING:
    from hvdgloo.runner.agent.measuring import Meter

OBSERVER_VARIABLE = "HVDGLOO_OBSERVER"

INTERVAL = 1.0
"""Seconds between two frames with observations, and between two samples of the host while workers are busy."""

IDLE_INTERVAL = 10.0
"""Seconds between two samples of the host while no worker reports anything."""

TRACE_TIME = 120.0
"""Seconds to wait for a worker's trace."""

_MOST = 4 * 1024 * 1024  # bytes of observations that are kept while the stream to the launcher is full
_OVERHEAD = 64  # bytes of memory that each of them takes beside its own
_MARK = 1024 * 1024  # bytes that wait to be sent, beyond which nothing that can wait is added
_BUFFER = 1024 * 1024  # bytes that the kernel keeps for us
_AT_ONCE = 256  # datagrams that are read before other descriptors have their turn
_TRACE = re.compile(r"trace\.([0-9]+)\.([0-9]+)\.json")


class Observing:
    """The collector of this host's observations.

    Args:
        selector: the agent's.
        channel: to the launcher.

    Attributes:
        handlers: frame type to handler.
    """

    def __init__(self, selector: selectors.BaseSelector, channel: FrameChannel) -> None:
        self._selector = selector
        self._channel = channel
        self._folder = ""
        self._socket: socket.socket | None = None
        self._meter: Meter | None = None
        self._waiting: list[bytes] = []
        self._held = 0  # bytes that wait
        self._sent = self._measured = -INTERVAL
        self._busy = False  # a worker has reported something since the host was looked at
        self._traces_until = self._searched = 0.0
        self._trace: tuple[int, int, IO[bytes]] | None = None  # that is being passed on: number, rank, file
        self.handlers: dict[type[Frame], Callable[[Any], None]] = {
            Observe: self._on_observe,
            TraceSteps: self._on_trace_steps,
        }

    def attend(self, agent_id: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Prepare for observing, once the agent knows its id; return the variable that tells its workers where to
        report.

        The variable is empty if there is no private directory: then nothing can be observed.
        """
        try:
            self._folder = agent_folder(agent_id, environ)
        except ConfigError:
            return {OBSERVER_VARIABLE: ""}
        return {OBSERVER_VARIABLE: os.path.join(self._folder, AGENT_SOCKET)}

    @property
    def deadline(self) -> float | None:
        """Time at which ``tick`` must be called, on the monotonic clock."""
        times = []
        has_room = self._channel.pending <= _MARK  # else the loop turns when the launcher has taken something
        if self._waiting and has_room:
            times.append(self._sent + INTERVAL)
        if self._meter is not None:
            times.append(self._measured + (INTERVAL if self._busy else IDLE_INTERVAL))
        if self._traces_until and has_room:
            times.append(self._searched + INTERVAL if self._trace is None else time.monotonic())
        return min(times, default=None)

    def tick(self) -> None:
        """Do what is due. The agent calls this in each turn of its loop."""
        if self._socket is None:
            return
        now = time.monotonic()
        if self._meter is not None and now >= self._measured + (INTERVAL if self._busy else IDLE_INTERVAL):
            self._measured, self._busy = now, False
            self._take(self._meter.sample())
        if now >= self._sent + INTERVAL:
            self._pass_on(now)
        if self._traces_until and (self._trace is not None or now >= self._searched + INTERVAL):
            self._pass_on_traces(now)

    def close(self) -> None:
        """Pass on the remaining observations, and remove the directory."""
        if self._socket is None:
            return
        self._on_datagrams()
        self._pass_on(time.monotonic())
        self._selector.unregister(self._socket)
        self._socket.close()
        self._socket = None
        if self._trace is not None:
            self._trace[2].close()
            self._trace = None
        if self._meter is not None:
            self._meter.close()
            self._meter = None
        shutil.rmtree(self._folder, ignore_errors=True)

    # Workers' reports.

    def _on_observe(self, frame: Observe) -> None:
        if not self._folder:
            return
        if self._socket is None:
            try:
                self._listen()
            except OSError:
                return  # no more files, or no room for any: the job itself goes on
        if frame.host and self._meter is None:
            from hvdgloo.runner.agent.measuring import Meter  # not imported for jobs without observers

            self._meter = Meter()
            self._measured, self._busy = time.monotonic(), True

    def _listen(self) -> None:
        remove_stale(os.path.dirname(self._folder))
        os.makedirs(self._folder, 0o700, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            listener.bind(os.path.join(self._folder, AGENT_SOCKET))
        except OSError:
            listener.close()
            raise
        self._socket = listener
        self._selector.register(listener, selectors.EVENT_READ, self._on_datagrams)

    def _on_datagrams(self) -> None:
        from hvdgloo._observe.samples import LIMIT  # not imported for jobs without observers

        assert self._socket is not None
        for _ in range(_AT_ONCE):
            try:
                data = self._socket.recv(LIMIT + 1)
            except OSError:
                return
            self._busy = True
            if 0 < len(data) <= LIMIT:
                self._take(data)

    def _take(self, data: bytes) -> None:
        size = len(data) + _OVERHEAD
        if self._held + size <= _MOST:  # otherwise the next one says it again
            self._waiting.append(data)
            self._held += size

    def _pass_on(self, now: float) -> None:
        if not self._waiting or self._channel.pending > _MARK:
            return
        self._channel.send(Observed(self._waiting))
        self._waiting, self._held, self._sent = [], 0, now

    # Traces.

    def _on_trace_steps(self, frame: TraceSteps) -> None:
        from hvdgloo._observe.samples import ORDERS, TraceOrder

        asked = 0
        if self._socket is not None:
            order = ORDERS.encode(TraceOrder(frame.number, frame.steps, self._folder))
            for name in filter(str.isdigit, self._names()):
                try:
                    self._socket.sendto(order, os.path.join(self._folder, name))
                except OSError:
                    continue  # it has ended
                asked += 1
        if asked:
            self._traces_until = time.monotonic() + TRACE_TIME
        self._channel.send(Tracing(frame.number, asked))

    def _pass_on_traces(self, now: float) -> None:
        """Send traces that workers have completed, as fast as the launcher takes them."""
        while self._channel.pending <= _MARK and not self._channel.lost:
            if self._trace is None and not self._next_trace():
                self._searched = now
                if now >= self._traces_until:
                    self._traces_until = 0.0
                return
            assert self._trace is not None
            number, rank, file = self._trace
            data = file.read(4 * CHUNK)
            if not data:
                file.close()
                self._trace = None
            self._channel.send(Traced(number, rank, data, not data))

    def _next_trace(self) -> bool:
        for name in self._names():
            found = _TRACE.fullmatch(name)
            if found is not None:
                path = os.path.join(self._folder, name)
                try:
                    file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed when it has been passed on
                    os.unlink(path)
                except OSError:
                    continue  # it was removed by a cleanup
                self._trace = int(found[1]), int(found[2]), file
                return True
        return False

    def _names(self) -> list[str]:
        """Return the names in the directory; none if it is gone, because a system removes a user's runtime directory
        when the last session ends, while jobs continue."""
        try:
            return os.listdir(self._folder)
        except OSError:
            return []


def remove_leftovers(agent_id: str, environ: Mapping[str, str]) -> None:
    """Remove the directory of an agent that could not do so itself."""
    try:
        shutil.rmtree(agent_folder(agent_id, environ), ignore_errors=True)
    except ConfigError:
        pass  # there never was any
