"""The epochs of a job at the server: the waiting, the clock and the answers around a pure decision about its workers.

``Epochs`` is the common part of both kinds of jobs. ``FixedEpochs`` is a job whose workers may not change: it has a
single epoch, which the pure ``Membership`` decides. ``hvdgloo.rendezvous._server.elastic`` is an elastic one.

Every worker that registers in a fixed job waits here until the last one registers, the epoch's deadline passes, the
server stops, or its own timeout expires. The deadline belongs to the epoch, so all waiting workers learn at the same
time and in the same words that one is missing, and no late worker starts to wait alone.

After a failed start, an epoch with a launcher stays failed: the launcher ends the job. Without a launcher it starts
again, since the workers' starter (Kubernetes, Slurm) will start them again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._server.membership import Membership, NotAcceptedError, State
from hvdgloo.rendezvous._server.pauses import Steps, Waiters
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
        on_formed: called with the number of each epoch of an elastic job before its members get their replies; under
            the lock. Set by the server at its start.
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


class FixedEpochs(Epochs):
    """The only epoch of a job whose workers may not change: epoch 0, which is open from the start.

    Args:
        size, hosts: as for ``Membership``.

    Raises:
        ValueError: as ``Membership`` does.
    """

    def __init__(
        self,
        start_timeout: float,
        *,
        size: int | None = None,
        hosts: Sequence[tuple[str, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(start_timeout, clock)
        self._begin = partial(Membership, 0, size=size, hosts=hosts, start_timeout=start_timeout)
        self._current = self._begin()
        self._topology = b""

    def register(self, client: str, info: WorkerInfo, *, timeout: float) -> Steps[bytes | NotYet]:
        """Admit a worker and wait for the others.

        Args:
            client: id of the worker's client; the same client gets the same answer again.
            info: the worker's description of itself.
            timeout: seconds to wait here.

        Returns:
            the worker's rank and the topology, encoded.

        Raises:
            EpochFailedError, StoppingError, NotAcceptedError: as each of them says.
        """
        with self._lock:
            self._check_open()
            self._pass_time(self._clock())  # the deadline, if the clock's thread has not done so yet
            current = self._current
            current.join(client, info, self._clock())
            self._settle()
            if current.state is not State.GATHERING:
                return self._answer(current, client)
            waiting = self._waiters.wait(client, timeout)
        yield from waiting
        with self._lock:
            return self._answer(current, client)

    def status(self) -> dict[str, Any]:
        """Return the epoch as ``/v1/status`` shows it."""
        with self._lock:
            current, expected = self._current, self._current.expected_by_host()
            description: dict[str, Any] = {
                "epoch": current.epoch,
                "state": current.state.value,
                "expected": current.size,
                "arrived": current.arrived,
                "summary": current.failure or current.summary(),
                "hosts": [
                    {"name": name, "arrived": arrived, "expected": expected.get(name)}
                    for name, arrived in current.arrived_by_host().items()
                ],
                "missing_ranks": current.missing_ranks(),
                "workers": [
                    {
                        "rank": current.ranks.get(client, info.rank),
                        "index": info.index,
                        "host": info.host_name,
                        "pid": info.pid,
                        "address": info.address,
                        "port": info.port,
                        "connected": client in self._connections,
                    }
                    for client, info in current.workers.items()
                ],
            }
            if current.state is State.COMPLETE:
                description["gathered_in_s"] = round(current.gathered_in, 3)
            elif current.deadline < math.inf:
                description["fails_in_s"] = round(max(0.0, current.deadline - self._clock()), 1)
            return {"epochs": [description]}

    def _client_left(self, client: str) -> None:
        if self._current.leave(client):
            self._note_change()

    def _deadline(self) -> float:
        return self._current.deadline

    def _pass_time(self, now: float) -> None:
        if now >= self._current.deadline:
            self._current.pass_time(now)
            self._settle()

    def _settle(self) -> None:
        """Release the workers that wait if the epoch is complete or has failed."""
        current = self._current
        if current.state is not State.GATHERING:
            self._waiters.release()
        if current.failure:
            self.last_failure = current.failure
            if current.hosts is None:
                self._current = self._begin()
        self._wake_by(current.deadline)
        self._note_change()

    def _answer(self, current: Membership, client: str) -> bytes | NotYet:
        if current.failure:
            raise EpochFailedError(current.failure)
        if current.topology is not None and client in current.ranks:
            self._topology = self._topology or messages.pack_topology(current.topology)
            return messages.pack_placed(current.ranks[client], self._topology)
        self._check_open()
        return NotYet(current.summary(), {"idle": current.idle(self._clock())})


__all__ = [
    "EpochFailedError",
    "Epochs",
    "FixedEpochs",
    "NotAcceptedError",
    "NotYet",
    "StoppingError",
]
