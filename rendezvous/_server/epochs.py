"""Epochs in which workers register: the waiting around the pure Membership.

Every worker that registers waits here until the last one registers, the epoch's deadline passes, the server stops, or
its own timeout expires. The deadline belongs to the epoch, so all waiting workers learn at the same time and in the
same words that one is missing, and no late worker starts to wait alone. The deadline moves with each worker that
registers, as long as there are more than ever before: a hundred workers on two cores import one after the other, and
the last may register long after the first. But a worker that is restarted again and again does not keep the others
waiting.

After a failed start, an epoch with a launcher stays failed: the launcher ends the job. Without a launcher it starts
again, since the workers' starter (Kubernetes, Slurm) will start them again.
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
    """No epoch of this number was opened; the text says which exist."""


class EpochFailedError(Exception):
    """The epoch did not start; the text says which workers registered and which did not."""


class StoppingError(Exception):
    """The server is being stopped."""


@dataclass(frozen=True)
class NotYet:
    """The caller's timeout expired first: registering again continues the wait.

    Attributes:
        summary: the workers that have registered, in words.
        idle: seconds since the number of workers last reached a new maximum.
    """

    summary: str
    idle: float


@dataclass(frozen=True)
class Placed:
    """The caller's rank, and the packed topology, which is the same bytes for all."""

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
        """Wake one waiting thread, which wakes the next one: a thousand threads woken at once would compete for the
        interpreter.
        """
        for latches in self.waiting.values():
            for latch in latches:
                latch.release()
                return


class Epochs:
    """All epochs of one server. Thread-safe.

    Args:
        start_timeout: seconds without a further worker after which an epoch fails.
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
                raise ValueError(f"epoch {epoch} is already open")
            self._rounds[epoch] = _Round(membership)

    def register(self, epoch: int, client: str, info: WorkerInfo, *, timeout: float) -> Steps[Placed | NotYet]:
        """Admit a worker and wait for the others.

        If its client hangs up meanwhile, the worker loses its place, so that a restarted one finds it free.

        Args:
            epoch: number of the epoch.
            client: id of the worker's client; the same client gets the same answer again.
            info: the worker's description of itself.
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
            # The deadline has moved if others registered meanwhile.
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
        """Free the places of a client without connections, in every epoch that has not started."""
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
        """Wait until workers arrive or leave, or an epoch fails, after the last call.

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

    def last_failure(self) -> str:
        """Return the reason of the last failed attempt; empty if none has failed."""
        with self._lock:
            return self._last_failure

    def status(self, connected: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Return the epochs' part of ``/v1/status``, as JSON values; ``connected`` tells if a client is connected."""
        with self._lock:
            return [self._describe(epoch, current, connected) for epoch, current in sorted(self._rounds.items())]

    def workers_in(self) -> dict[int, tuple[int, int]]:
        """Return (registered workers, expected workers) by epoch."""
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
            # All waiters are gone; none was left to declare the failure.
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
            f"{membership.summary()}. Look at the missing workers' output; if they only need longer, raise the start "
            "timeout"
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
        """Remove a worker, so that its place is free for one started in its stead."""
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
