"""Where workers gather: the waiting around the pure Membership.

Every worker that registers waits here until the last one has come, the epoch's deadline has passed, the server stops,
or its own timeout expires. The deadline belongs to the epoch: so all waiting workers learn of one that never comes at
the same moment and in the same words, and no late one starts to wait alone. It moves with each worker that comes, as
long as more are in than ever before: a hundred workers on two cores import one after the other, and the last may come
long after the first. But one that is started again and again does not keep the others waiting.

After a failed start, an epoch with a launcher stays failed: the launcher ends the job. Without a launcher it gathers
anew, since whatever starts the workers (Kubernetes, Slurm) will start them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._server.membership import Membership, NotAcceptedError
from hvdgloo.rendezvous._server.pauses import Pause, Steps
from hvdgloo.rendezvous._store import Latch
from hvdgloo.rendezvous._worker_info import WorkerInfo


class UnknownEpochError(Exception):
    """No epoch of this number has been opened; the text says which there are."""


class EpochFailedError(Exception):
    """The epoch did not start; the text says who came and who did not."""


class StoppingError(Exception):
    """The server is being stopped."""


@dataclass(frozen=True)
class NotYet:
    """The caller's timeout expired first: registering again continues the wait.

    Attributes:
        summary: who is in.
        idle: seconds since more workers were in than ever before.
    """

    summary: str
    idle: float


@dataclass(frozen=True)
class Placed:
    """The answer: the caller's rank, and the packed topology, which is the same bytes for all."""

    rank: int
    topology: bytes


@dataclass
class _Round:
    """One attempt to gather an epoch's workers."""

    membership: Membership
    started: float | None = None
    deadline: float = 0.0
    most: int = 0
    waiting: dict[str, list[Latch]] = field(default_factory=dict)
    topology: bytes | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    completed_after: float = 0.0
    failure: str = ""

    @property
    def state(self) -> str:
        return "failed" if self.failure else "complete" if self.topology is not None else "gathering"

    def placed(self, client: str) -> Placed | None:
        return None if self.topology is None else Placed(self.ranks[client], self.topology)

    def release(self) -> None:
        """Let one of those that wait go on, and it the next one: a thousand threads that are woken at once would
        compete for the interpreter.
        """
        for latches in self.waiting.values():
            for latch in latches:
                latch.release()
                return


class Epochs:
    """All epochs of one server. Thread-safe.

    Args:
        start_timeout: seconds without a further worker after which an epoch has failed.
        clock: monotonic seconds.
    """

    def __init__(self, start_timeout: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.start_timeout = start_timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._changes = 0
        self._rounds: dict[int, _Round] = {}
        self._closed = ""
        self._last_failure = ""

    def open(self, epoch: int, *, size: int | None = None, hosts: Sequence[tuple[str, int]] | None = None) -> None:
        """Let workers register for an epoch.

        Raises:
            ValueError: it is open already, or has no workers.
        """
        membership = Membership(epoch, size=size, hosts=hosts)
        with self._lock:
            if epoch in self._rounds:
                raise ValueError(f"epoch {epoch} has been opened before")
            self._rounds[epoch] = _Round(membership)

    def register(self, epoch: int, client: str, info: WorkerInfo, *, timeout: float) -> Steps[Placed | NotYet]:
        """Admit a worker and wait for the others.

        If its client hangs up meanwhile, the worker loses its place, so that a restarted one finds it free.

        Args:
            epoch: which.
            client: id of the worker's client; the same client gets the same answer again.
            info: the worker.
            timeout: seconds to wait here.

        Raises:
            UnknownEpochError, EpochFailedError, StoppingError, NotAcceptedError: as each of them says.
        """
        latch = Latch()
        with self._lock:
            current = self._join(epoch, client, info)
            placed = current.placed(client)
            if placed is not None:
                return placed
            current.waiting.setdefault(client, []).append(latch)
        gone = False

        def hang_up() -> None:
            nonlocal gone
            gone = True
            latch.release()

        until = self._clock() + timeout
        try:
            # The deadline has moved if others have come meanwhile.
            while not (yield Pause(latch, min(until, current.deadline) - self._clock(), hang_up)):
                if self._clock() >= min(until, current.deadline):
                    break
        finally:
            with self._lock:
                self._stop_waiting(current, client, latch, gone)
        with self._lock:
            placed = current.placed(client)
            if placed is not None:
                return placed
            if not current.failure and self._clock() >= current.deadline:
                self._fail(epoch, current, self._too_late(current))
            if current.failure:
                raise EpochFailedError(current.failure)
            if self._closed:
                raise StoppingError(self._closed)
            return NotYet(current.membership.summary(), self._clock() - (current.deadline - self.start_timeout))

    def client_left(self, client: str) -> None:
        """A client has no connection left: it loses its place in every epoch that has not started."""
        with self._lock:
            for current in self._rounds.values():
                if current.topology is None and client not in current.waiting:
                    self._leave(current, client)

    def close(self, reason: str) -> None:
        """Release all waiters with a StoppingError."""
        with self._lock:
            self._closed = reason
            for current in self._rounds.values():
                current.release()

    def wait_for_change(self, seen: int, timeout: float) -> int:
        """Wait until workers have come or gone, or an epoch has failed, since the caller last looked.

        Args:
            seen: what the last call returned; -1 returns at once.
            timeout: seconds.

        Returns:
            a number that grows with every change; ``seen`` if there was none in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout)
            return self._changes

    def wake(self) -> None:
        """Let ``wait_for_change`` return: something else has happened that a watcher may want to report."""
        with self._lock:
            self._note_change()

    def last_failure(self) -> str:
        """Why the last failed attempt did not succeed; empty if none has failed."""
        with self._lock:
            return self._last_failure

    def status(self, connected: Callable[[str], bool]) -> list[dict[str, Any]]:
        """What ``/v1/status`` shows of the epochs, as JSON values; ``connected`` says which clients are."""
        with self._lock:
            return [self._describe(epoch, current, connected) for epoch, current in sorted(self._rounds.items())]

    def workers_in(self) -> dict[int, tuple[int, int]]:
        """Epoch to (workers that are in, workers that should come)."""
        with self._lock:
            return {e: (r.membership.arrived, r.membership.size) for e, r in self._rounds.items()}

    def _join(self, epoch: int, client: str, info: WorkerInfo) -> _Round:
        if self._closed:
            raise StoppingError(self._closed)
        current = self._rounds.get(epoch)
        if current is None:
            known = ", ".join(str(number) for number in sorted(self._rounds)[-8:])
            raise UnknownEpochError(f"there is no epoch {epoch}; open: {known}")
        if current.started is not None and not current.topology and self._clock() >= current.deadline:
            # All waiters have gone; none was left to say that it failed.
            self._fail(epoch, current, self._too_late(current))
            current = self._rounds[epoch]
        if current.failure:
            raise EpochFailedError(current.failure)
        membership = current.membership
        membership.join(client, info)
        self._note_change()
        if current.started is None:
            current.started = self._clock()
            current.most = 0
        if membership.arrived > current.most:
            current.most = membership.arrived
            current.deadline = self._clock() + self.start_timeout
        if membership.complete and current.topology is None:
            self._complete(epoch, current)
        return current

    def _complete(self, epoch: int, current: _Round) -> None:
        try:
            topology, ranks = current.membership.topology()
        except ValueError as error:
            self._fail(epoch, current, f"epoch {epoch} cannot start: {error}")
            raise EpochFailedError(current.failure) from None
        current.ranks = ranks
        current.topology = messages.pack_topology(topology)
        current.completed_after = self._clock() - (current.started or 0.0)
        current.release()

    def _fail(self, epoch: int, current: _Round, text: str) -> None:
        current.failure = self._last_failure = text
        current.release()
        self._note_change()
        if current.membership.hosts is None and self._rounds.get(epoch) is current:
            self._rounds[epoch] = _Round(Membership(epoch, size=current.membership.size))

    def _too_late(self, current: _Round) -> str:
        membership = current.membership
        return (
            f"epoch {membership.epoch} did not start: no further worker came for {self.start_timeout:g} s, and "
            f"{membership.summary()}. Look at what the missing workers printed; if they only need longer, raise the "
            "start timeout"
        )

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _stop_waiting(self, current: _Round, client: str, latch: Latch, gone: bool) -> None:
        latches = current.waiting.get(client, [])
        if latch in latches:
            latches.remove(latch)
        if not latches:
            current.waiting.pop(client, None)
            if gone:
                self._leave(current, client)
        if self._closed or current.state != "gathering":
            current.release()

    def _leave(self, current: _Round, client: str) -> None:
        """Remove a worker, so that one started in its stead finds its place free."""
        if not current.failure and current.membership.leave(client):
            self._note_change()
            if current.membership.arrived == 0:
                current.started = None  # the epoch's time starts with the first worker that stays

    def _describe(self, epoch: int, current: _Round, connected: Callable[[str], bool]) -> dict[str, Any]:
        membership = current.membership
        expected: dict[str, int] = {}
        for name, slots in membership.hosts or ():
            expected[name] = expected.get(name, 0) + slots
        description: dict[str, Any] = {
            "epoch": epoch,
            "state": current.state,
            "expected": membership.size,
            "arrived": membership.arrived,
            "summary": current.failure or membership.summary(),
            "hosts": [
                {"name": name, "arrived": arrived, "expected": expected.get(name)}
                for name, arrived in membership.arrived_by_host().items()
            ],
            "missing_ranks": membership.missing_ranks(),
            "workers": [
                {
                    "rank": current.ranks.get(each.client, each.info.rank),
                    "index": each.info.index,
                    "host": each.info.host_name,
                    "pid": each.info.pid,
                    "address": each.info.address,
                    "port": each.info.port,
                    "connected": connected(each.client),
                }
                for each in membership.registrations
            ],
        }
        if current.topology is not None:
            description["gathered_in_s"] = round(current.completed_after, 3)
        elif current.started is not None and not current.failure:
            description["fails_in_s"] = round(max(0.0, current.deadline - self._clock()), 1)
        return description


__all__ = [
    "EpochFailedError",
    "Epochs",
    "NotAcceptedError",
    "NotYet",
    "Placed",
    "StoppingError",
    "UnknownEpochError",
]
