"""The epoch of a job of a fixed size at the server: the requests of its workers around ``FixedMembership``.

Every worker that registers waits here until the last one registers, the epoch's deadline passes, the server stops, or
its own timeout expires. The deadline belongs to the epoch, so all waiting workers learn at the same time and in the
same words that one is missing, and no late worker starts to wait alone.

After a failed start, an epoch with a launcher stays failed: the launcher ends the job. Without a launcher it starts
again, since the workers' starter (Kubernetes, Slurm) will start them again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._membership.fixed import FixedMembership, State
from hvdgloo.rendezvous._server.epochs import EpochFailedError, Epochs, NotYet
from hvdgloo.rendezvous._server.pauses import Steps
from hvdgloo.rendezvous._worker_info import WorkerInfo


class FixedEpochs(Epochs):
    """The only epoch of a job whose workers may not change: epoch 0, which is open from the start.

    Args:
        size, hosts: as for ``FixedMembership``.

    Raises:
        ValueError: as ``FixedMembership`` does.
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
        self._begin = partial(FixedMembership, 0, size=size, hosts=hosts, start_timeout=start_timeout)
        self._current = self._begin()

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
                        "rank": current.assignment.ranks.get(client, info.rank),
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
            if not current.launched:
                self._current = self._begin()
        self._wake_by(current.deadline)
        self._note_change()

    def _answer(self, current: FixedMembership, client: str) -> bytes | NotYet:
        if current.failure:
            raise EpochFailedError(current.failure)
        rank = current.assignment.ranks.get(client)
        if rank is not None:
            return messages.pack_placed(rank, self._pack(current.assignment, current.workers))
        self._check_open()
        return NotYet(current.summary(), {"idle": current.idle(self._clock())})
