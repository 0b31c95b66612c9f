"""Copies that are made while the next backward pass runs, until an optimizer steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hvdgloo._backends import gpu
from hvdgloo.torch.elastic import _steps
from hvdgloo.torch.elastic._copies import Saved, transfer

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _executor() -> ThreadPoolExecutor:
    """Return the thread that makes all copies: one is enough, since memory limits them."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(1, thread_name_prefix="hvdgloo-commit")
        return _pool


class Behind:
    """Copies that a thread makes. Parameters and optimizers' state change only in steps, and these wait for it.

    Args:
        saved: with copies that have a place, and no contents yet.
        end: called once with whether the copies are whole: nothing was written into what they are of.
    """

    def __init__(self, saved: Sequence[Saved], end: Callable[[bool], None]) -> None:
        self._saved = saved
        self._copies = [each for part in saved for each in part.later]
        self._end: Callable[[bool], None] | None = end
        self._ending = threading.RLock()  # whichever thread steps first ends it
        devices = {device for each in self._copies if (device := gpu.of(each.live)) is not None}
        self._ready = {device: gpu.record(device) for device in devices}
        self._done: dict[torch.device, Any] = {}
        self._future = _executor().submit(self._copy)
        _steps.wait_before(self)

    def wait(self) -> None:
        """Return once what is copied may be written: a GPU's later work waits by itself."""
        with self._ending:
            if self._end is None:
                return
            is_whole = False
            try:
                is_whole = self._future.result()
            finally:
                if self._future.done():  # not if the wait was interrupted
                    self._finish(is_whole)

    def settle(self) -> None:
        """Return once the copies can be read, on the host, too."""
        self.wait()
        for device in self._done:
            gpu.settle(device)

    def _finish(self, is_whole: bool) -> None:
        for device, done in self._done.items():
            gpu.wait(done, device)
        for each in self._copies:
            is_whole = is_whole and each.live._version == each.version
            each.is_later = False
        end, self._end = self._end, None
        _steps.wait_no_more(self)
        if end is not None:
            end(is_whole)

    def _copy(self) -> bool:
        for device, ready in self._ready.items():
            gpu.use_own_stream(device)
            gpu.wait(ready, device)
        transfer([(each.kept, each.live) for each in self._copies])
        self._done = {device: gpu.record(device) for device in self._ready}
        return all(part.has_its_samples() for part in self._saved)
