"""Calls of a process group: how they are carried out, whatever the collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from hvdgloo._backends import base
from hvdgloo._backends.base import Backend
from hvdgloo._backends.shm.calls import Call
from hvdgloo._backends.shm.small import Patience, SmallCollectives
from hvdgloo._platform import interrupts
from hvdgloo.torch.distributed import _tensors
from hvdgloo.torch.distributed._queue import Operation, OperationQueue
from hvdgloo.torch.distributed._tensors import Finish
from hvdgloo.types import ReduceOp

Options = Any
"""One of torch's classes of options, or None."""


class Finished(Work):
    """Result of a synchronous operation, which ended before it returned."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


FINISHED = Finished()


class Defaults:
    """The options of a call that gives none: pybind has overloads such as ``allreduce(tensor, op)``."""

    def __init__(self, op: Any = dist.ReduceOp.SUM, root: int = 0, timeout: timedelta | None = None) -> None:
        self.reduceOp, self.rootRank, self.timeout = op, root, timeout
        self.asyncOp = True


class GroupCalls:
    """Common parts of a group's collectives.

    Args:
        queue: of the group.
        rank, size: within the group.
        seconds: after which a call fails that gives no timeout of its own.
    """

    def __init__(self, queue: OperationQueue, rank: int, size: int, seconds: float) -> None:
        self._queue, self._own_rank, self._own_size, self._seconds = queue, rank, size, seconds
        self._sequence = 0
        self._coalescing = False
        self._last: Work = FINISHED

    def _timeout_of(self, opts: Options) -> float:
        given = getattr(opts, "timeout", None)
        return self._seconds if given is None or given < timedelta(0) else given.total_seconds()

    def _add(
        self,
        call: Call,
        start: Callable[[Backend], base.Work],
        finish: Finish | None,
        result: Any,
        opts: Options,
        nbytes: int | None = None,
    ) -> Work:
        self._sequence += 1
        asynchronous = getattr(opts, "asyncOp", True)
        operation = Operation(self._queue, call, start, finish, result, self._timeout_of(opts), "", nbytes)
        if self._coalescing:
            self._last = operation
        return self._queue.add(operation, waits=not asynchronous)

    def _at_once(
        self,
        call: Call,
        nbytes: int,
        opts: Options,
        do: Callable[[SmallCollectives, Patience], None],
        finish: Finish | None = None,
    ) -> bool:
        """Carry out a small call of a caller that waits for it, if nothing else of the group is under way.

        Args:
            nbytes: that each rank gives.
            do: makes the call, and is handed a function that waits.
            finish: copies results to where they belong.

        Returns:
            False if the call has to take the usual way.
        """
        queue = self._queue
        connection = queue.connection
        if connection is None or connection.small is None or getattr(opts, "asyncOp", True):
            return False
        if not connection.small.fits(nbytes) or not queue.carrying_out.acquire(blocking=False):
            return False
        held = interrupts.hold()
        try:
            if queue.waiting or queue.failure is not None:
                return False
            self._sequence += 1
            assert connection.calls is not None
            begun = time.monotonic()
            connection.calls.begin(call, begun)
            do(connection.small, queue.wait_small(call, self._timeout_of(opts), begun))
            if connection.calls.mismatch():
                connection.check_calls()
            if finish is not None:
                finish()
            if queue.record is not None:
                queue.record.ended_at_once(call, nbytes, begun)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the caller gets it
            raise queue.fail(call, failure, others_know=True) from None
        except BaseException as interrupt:
            queue.fail(call, RuntimeError(f"interrupted by {type(interrupt).__name__}"))
            raise
        finally:
            queue.carrying_out.release()
            interrupts.release(held)
        return True

    def barrier(self, opts: Options = None, timeout: timedelta | None = None) -> Work:
        opts = opts or Defaults(timeout=timeout)
        call = Call("barrier")
        if self._at_once(call, 0, opts, lambda small, wait: small.barrier(wait)):
            return FINISHED
        here = torch.zeros(1, dtype=torch.uint8, device="cpu")
        buffer = _tensors.numbers(here)
        return self._add(call, lambda backend: backend.allreduce(buffer, ReduceOp.MAX), None, [here], opts)

    # Calls within torch.distributed._coalescing_manager begin one by one.

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = True

    def _end_coalescing(self, device: torch.device) -> Work:
        self._coalescing, last, self._last = False, self._last, FINISHED
        return last  # the others have ended before it
