"""The monitored barrier of torch.distributed, which names the ranks that have not called it.

The ranks meet in the group's store rather than on its data plane: it may be a group's first call, and a rank that is
missing from it leaves the group as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hvdgloo.torch.distributed._store import FIRST_LOOK, LAST_LOOK

_TELLING_SECONDS = 2.0
"""More than rank 0 needs to tell the others of the result."""

_RESULT = "result"


class MonitoredBarriers:
    """One rank's part in the monitored barriers of a group.

    Args:
        store: torch's, with the group's prefix.
        rank, size: within the group.
        check: called during a wait; raises an error if some rank can never come.
    """

    def __init__(self, store: Store, rank: int, size: int, check: Callable[[], None]) -> None:
        self._store, self._rank, self._size, self._check = store, rank, size, check
        self._calls = 0
        self._last_passed = 0

    def wait(self, timeout: timedelta | float, wait_all_ranks: bool) -> None:
        """Wait until all ranks have called it.

        Args:
            timeout: for all ranks together.
            wait_all_ranks: True to name all missing ranks instead of the first.

        Raises:
            DistBackendError: ranks are missing. Rank 0 names them in gloo's words; the others refer to it.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        deadline = time.monotonic() + seconds
        self._calls += 1
        store = PrefixStore(f"monitored/{self._calls}", self._store)
        if self._rank:
            self._report(store, deadline + _TELLING_SECONDS)
            return
        missing = [rank for rank in range(1, self._size) if not self._arrives(store, f"rank{rank}", deadline)]
        milliseconds = f"{1000 * seconds:.0f} ms"
        if not missing:
            store.set(_RESULT, "")
            self._forget_earlier()
            return
        if wait_all_ranks and len(missing) > 1:
            text = f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {milliseconds}"
        else:
            text = f"Rank {missing[0]} failed to pass monitoredBarrier in {milliseconds}"
        store.set(_RESULT, text)
        raise dist.DistBackendError(f"hvdgloo: Rank 0 timed out in monitoredBarrier after {milliseconds}: {text}")

    def _forget_earlier(self) -> None:
        """Remove the keys of earlier calls from the store: all ranks have ended them, since they made this one."""
        for call in range(max(1, self._last_passed), self._calls):
            store = PrefixStore(f"monitored/{call}", self._store)
            with contextlib.suppress(NotImplementedError):  # there are stores that keep all
                for key in (_RESULT, *(f"rank{rank}" for rank in range(1, self._size))):
                    store.delete_key(key)
        self._last_passed = self._calls

    def _report(self, store: Store, deadline: float) -> None:
        """Report this rank to rank 0, and wait for the result."""
        store.set(f"rank{self._rank}", "")
        if not self._arrives(store, _RESULT, deadline):
            result = "rank 0 did not come within the timeout"
        else:
            result = bytes(store.get(_RESULT)).decode()
        if result:
            raise dist.DistBackendError(
                f"hvdgloo: Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0: {result}"
            )

    def _arrives(self, store: Store, key: str, deadline: float) -> bool:
        pause = FIRST_LOOK
        while not store.check([key]):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._check()
            time.sleep(min(pause, left))
            pause = min(2 * pause, LAST_LOOK)
        return True
