"""Comparison of calls between ranks that share no memory, and reports of failed operations.

Between hosts a rank that fails knows little: Gloo's connections end, whichever rank was the first to fail. So a rank
whose operation has failed reports its latest calls, and which processes of its host have ended, through the group's
store, and reads the others' reports. Nothing is exchanged as long as all goes well, unless TORCH_DISTRIBUTED_DEBUG asks
for a comparison before each operation.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hvdgloo._backends.base import Backend, Work
from hvdgloo._backends.shm.calls import Call, different
from hvdgloo.errors import BackendError, HvdglooError
from hvdgloo.torch.distributed._store import LAST_LOOK, TorchStore
from hvdgloo.types import Buffer

ALL_ALIKE = "all ranks of a group must call the same collectives in the same order"

_KEPT = 64
"""Calls that are kept. Between hosts a rank may be ahead of others by what its connections hold."""

_ANSWER_SECONDS = 1.0
"""Seconds that the other ranks have to report after one has failed, which makes the others fail."""

_STORE_SECONDS = 2.5
"""More than twice that. A store whose host has lost its power does not answer."""


class Failures:
    """One rank's calls, and its exchange of reports.

    Args:
        store: torch's, with the group's prefix.
        rank, size: within the group.
        describe: names ranks of the group.
    """

    def __init__(self, store: TorchStore, rank: int, size: int, describe: Callable[[Sequence[int]], str]) -> None:
        self._store, self._rank, self._size, self._describe = store, rank, size, describe
        self._calls: deque[Call] = deque(maxlen=_KEPT)
        self._number = 0

    def begin(self, call: Call) -> None:
        """Record a call."""
        self._calls.append(call)
        self._number += 1

    def explain(self, own: str, ended: Sequence[int]) -> str:
        """Report that this rank's operation has failed.

        Args:
            own: why, as far as this rank knows.
            ended: ranks whose processes have ended, as far as this rank knows.

        Returns:
            the reason, as far as all ranks know.
        """
        found = [own]
        asking = threading.Thread(target=self._ask, args=(own, ended, found), name="hvdgloo failure", daemon=True)
        asking.start()
        asking.join(_STORE_SECONDS)
        return found[-1]

    def _ask(self, own: str, ended: Sequence[int], found: list[str]) -> None:
        with suppress(HvdglooError, RuntimeError, ValueError):  # of the store, which may have ended with its process
            deadline = time.monotonic() + _ANSWER_SECONDS
            # A process that reported a failure and ended then is not the cause of this one.
            ended = [rank for rank in ended if not self._store.has(f"failed{rank}")]
            reports = {self._rank: self._report(ended)}
            self._store.set(f"failed{self._rank}", json.dumps(reports[self._rank]).encode())
            reason = own if ended else ""
            while not reason and len(reports) < self._size and time.monotonic() < deadline:
                for rank in self._lacking(reports, "failed"):
                    reports[rank] = json.loads(self._store.get_many([f"failed{rank}"], timeout=0)[0])
                reason = self._reason(reports)
                if not reason:
                    time.sleep(LAST_LOOK)
            silent = [rank for rank in range(self._size) if rank not in reports]
            if not reason and silent:
                reason = (
                    f"{own}; no answer from {self._describe(silent)}: ended, unreachable, or busy with something else"
                )
            if reason:
                found.append(reason)
            self._store.set(f"read{self._rank}", b"")
            # This process often has the store, which ends with it: the others must have read, and may have begun to
            # wait for silent ranks later.
            awaited = set(range(self._size)).difference(*(report["ended"] for report in reports.values()))
            if time.monotonic() >= deadline:
                awaited, deadline = awaited.intersection(reports), deadline + _ANSWER_SECONDS
            heard = {self._rank}
            while self._rank == 0 and not heard >= awaited and time.monotonic() < deadline:
                heard.update(self._lacking(heard, "read"))
                time.sleep(LAST_LOOK)

    def _lacking(self, known: Container[int], key: str) -> list[int]:
        """Return the other ranks whose key is in the store, and which are not known yet."""
        others = (rank for rank in range(self._size) if rank != self._rank and rank not in known)
        return [rank for rank in others if self._store.has(f"{key}{rank}")]

    def _report(self, ended: Sequence[int]) -> dict[str, Any]:
        first = self._number - len(self._calls) + 1
        return {"first": first, "calls": [call.packed(0) for call in self._calls], "ended": list(ended)}

    def _reason(self, reports: dict[int, dict[str, Any]]) -> str:
        """Return why all fail, if some reports tell."""
        ended = sorted({rank for report in reports.values() for rank in report["ended"]})
        if ended:
            return f"{self._describe(ended)} has ended"
        known: dict[int, tuple[int, list[int]]] = {}
        found: list[tuple[int, str]] = []
        for rank, report in reports.items():
            for number, call in enumerate(report["calls"], report["first"]):
                other, theirs = known.setdefault(number, (rank, list(call)))
                if theirs != list(call):
                    found.append(
                        (number, different(other, Call.unpacked(*theirs), rank, Call.unpacked(call[0], call[1])))
                    )
        return f"{min(found)[1]}; {ALL_ALIKE}" if found else ""


class Compared:
    """An operation that begins once all ranks have made the same call, as a Work.

    Args:
        backend: of all ranks.
        rank, size: within the group.
        start: begins the operation.

    Raises:
        BackendError: on completion, if some rank made another call.
    """

    def __init__(self, backend: Backend, rank: int, size: int, call: Call, start: Callable[[Backend], Work]) -> None:
        self._backend, self._rank, self._call, self._start = backend, rank, call, start
        own = Buffer.of_array(np.array(call.packed(0), np.uint64).view(np.uint8))
        self._packed = np.zeros((size, 2), np.uint64)
        whole = Buffer.of_array(self._packed.view(np.uint8).reshape(-1))
        self._comparing = backend.allgather(own, whole, [own.nbytes] * size)
        self._work: Work | None = None

    def completes_within(self, timeout: float) -> bool:
        if self._work is None:
            if not self._comparing.completes_within(timeout):
                return False
            self._compare()
            self._work = self._start(self._backend)
        return self._work.completes_within(timeout)

    def _compare(self) -> None:
        for rank, packed in enumerate(self._packed.tolist()):
            theirs = Call.unpacked(*packed)
            if theirs != self._call:
                raise BackendError(f"{different(self._rank, self._call, rank, theirs)}; {ALL_ALIKE}")
