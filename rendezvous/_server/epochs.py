"""The epochs of a job at the server: the waiting, the clock and the answers around a pure decision about its workers.

``Epochs`` is the common part of both kinds of jobs; ``hvdgloo.rendezvous._server.fixed`` has the jobs whose workers may
not change, and ``hvdgloo.rendezvous._server.elastic`` the elastic ones.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._membership.assignment import Assignment, topology_of
from hvdgloo.rendezvous._server.pauses import Waiters
from hvdgloo.rendezvous._worker_info import WorkerInfo

logger = logging.getLogger(__name__)


class EpochFailedError(Exception):
    """The epoch did not start; the text says which workers registered and which did not."""


class StoppingError(Exception):
    """The server is being stopped."""


@dataclass(frozen=True)
class NotYet:
    """The caller's timeout expired first: asking again continues the wait.

    Attributes:
        reason: reason of the wait, in words.
        details: JSON values that the client is told as well.
    """

    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Epochs(ABC):
    """The epochs of one job. Thread-safe.

    Args:
        start_timeout: seconds without a further worker after which a start fails.
        clock: monotonic seconds.

    Attributes:
        last_failure: reason of the last failed start of a fixed job; empty if none has failed.
        on_formed: called with the number of each epoch before its members get their replies; under the lock. Set by
            the server at its start.
    """

    def __init__(self, start_timeout: float, clock: Callable[[], float]) -> None:
        self.start_timeout = start_timeout
        self.last_failure = ""
        self.on_formed: Callable[[int], None] = lambda epoch: None
        self._clock = clock
        self._lock = threading.Lock()
        self._waiters = Waiters(self._lock)
        self._changed = threading.Condition(self._lock)
        self._changes = 0
        self._timer = threading.Condition(self._lock)  # wakes the clock's thread
        self._wakes_at = -math.inf
        self._connections: Counter[str] = Counter()  # by client
        self._topology: tuple[int, bytes] = (-1, b"")  # of the newest epoch
        self._closed = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Keep the time on a thread of its own, until ``close``."""
        self._thread = threading.Thread(target=self._keep_time, name="hvdgloo-rendezvous-clock", daemon=True)
        self._thread.start()

    def close(self, reason: str) -> None:
        """Release all waiters with a StoppingError, and end the thread."""
        with self._lock:
            self._release(reason)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait_for_change(self, seen: int, timeout: float) -> int:
        """Wait until workers arrive or leave, or an epoch changes in another way, after the last call.

        Args:
            seen: result of the last call; -1 returns at once.
            timeout: seconds.

        Returns:
            a number that grows with every change; ``seen`` if there was none in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout)
            return self._changes

    def wake(self) -> None:
        """Let ``wait_for_change`` return, after another event that may be worth reporting."""
        with self._lock:
            self._note_change()

    def connected(self, client: str) -> None:
        """Count a client's connection. The client is present until its last connection ends."""
        with self._lock:
            self._connections[client] += 1
            self._client_came(client)

    def disconnected(self, client: str) -> None:
        """Count a connection of a client that has ended."""
        with self._lock:
            self._connections[client] -= 1
            if self._connections[client] <= 0:
                del self._connections[client]
                self._client_left(client)

    @property
    def connected_clients(self) -> int:
        """Number of clients that have a connection."""
        return len(self._connections)

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Return the job's part of ``/v1/status``, as JSON values."""

    # Below, the caller has the lock.

    def _client_came(self, client: str) -> None:  # noqa: B027 - a fixed job waits for a worker's request
        """Note that a client, perhaps a worker's, has a connection."""

    @abstractmethod
    def _client_left(self, client: str) -> None:
        """Note that a client has no connection left."""

    @abstractmethod
    def _deadline(self) -> float:
        """Return the time at which to call ``_pass_time``; infinite if time alone changes nothing."""

    @abstractmethod
    def _pass_time(self, now: float) -> None:
        """Decide what is due."""

    def _pack(self, assignment: Assignment, infos: Mapping[str, WorkerInfo]) -> bytes:
        """Return the packed topology of an epoch, which is made once."""
        if self._topology[0] != assignment.epoch:
            self.on_formed(assignment.epoch)
            self._topology = assignment.epoch, messages.pack_topology(topology_of(assignment, infos))
        return self._topology[1]

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _wake_by(self, when: float) -> None:
        """Have the clock's thread look at what is due at this time. A deadline that moves away does not wake it."""
        if when < self._wakes_at:
            self._timer.notify()

    def _check_open(self) -> None:
        if self._closed:
            raise StoppingError(self._closed)

    def _release(self, reason: str) -> None:
        self._closed = reason
        self._waiters.release()
        self._timer.notify()

    def _clock_failed(self, reason: str) -> None:
        self.last_failure = reason
        self._release(reason)
        self._note_change()

    def _keep_time(self) -> None:
        with self._lock:
            try:
                while not self._closed:
                    now, self._wakes_at = self._clock(), self._deadline()
                    if now < self._wakes_at:
                        self._timer.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
                    else:
                        self._pass_time(now)
            except Exception as error:  # without the clock no wait would end
                logger.exception("the clock of the rendezvous server")
                self._clock_failed(f"the rendezvous server has failed: {error!r}")
