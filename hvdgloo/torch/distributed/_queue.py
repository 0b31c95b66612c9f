"""The operations of one group in the order in which the program called them, and the threads that run them.

torch.distributed promises that all ranks call a group's collectives in one order, so nothing is negotiated: operations
go straight to the data plane. The calling thread runs an operation whose call waits. Other operations are run by a
thread of the group's, which starts with the first such call, or by the first thread that waits for them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from hvdgloo._backends import base
from hvdgloo._backends.base import Backend
from hvdgloo._backends.shm.backend import ShmBackend
from hvdgloo._backends.shm.calls import Call
from hvdgloo._backends.shm.small import Patience
from hvdgloo._net.cancelling import TURN
from hvdgloo._platform import interrupts
from hvdgloo.errors import BackendError
from hvdgloo.torch.distributed._connection import Connection
from hvdgloo.torch.distributed._record import Record
from hvdgloo.torch.distributed._tensors import Finish

logger = logging.getLogger(__name__)

Start = Callable[[Backend], base.Work]

_HEAD_START = 0.0002
"""Seconds for which a group's thread leaves an operation to its caller. Most callers come to wait at once, and a switch
between threads takes longer than a small operation."""

_LOOK = 0.001
"""Seconds between looks at a connection that another thread makes."""

_CLOSING_SECONDS = 5.0

_guard = threading.Lock()
"""Between the end of an operation and the making of its future; never held for long."""

_kept: list[Connection] = []
"""A forked child's copies of its parent's connections, which must not be closed."""


class Operation(Work):
    """An operation of a group, as torch.distributed's Work.

    Args:
        queue: of the group.
        call: what all ranks must call alike.
        start: hands the operation to a data plane.
        finish: copies results to where they belong, once the data plane has them.
        result: tensors of the caller's.
        seconds: until it fails, once those before it have ended.
        kind: name under which it is counted; the call's if empty.
        nbytes: of this rank's tensors; by the call if None.

    Attributes:
        submitted, begun: times at which the program called it, and at which it was begun; 0 before.
    """

    def __init__(
        self,
        queue: OperationQueue | None,
        call: Call,
        start: Start | None,
        finish: Finish | None,
        result: Any,
        seconds: float,
        kind: str = "",
        nbytes: int | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.nbytes = kind or call.kind, call.nbytes if nbytes is None else nbytes
        self.submitted, self.begun, self._ordered = time.monotonic(), 0.0, 0.0
        self._queue, self.call, self.seconds = queue, call, seconds
        self.start = start
        self.work: base.Work | None = None
        self.lookout: Lookout | None = None
        self.finish = finish
        self._ended = False
        self.error: Exception | None = None
        self.source = -1
        self._result = result
        self._future: torch.futures.Future[Any] | None = None
        self._to_settle: torch.futures.Future[Any] | None = None  # asked for before the end

    # What torch.distributed calls -------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end.

        Args:
            timeout: of this wait; zero or less for the operation's own. After it the operation is still under way.

        Raises:
            DistBackendError: the operation failed, or the timeout has passed.
        """
        seconds = timeout.total_seconds()
        assert self._queue is not None
        self._queue.wait_for(self, time.monotonic() + seconds if seconds > 0 else None)
        if self.error is not None:
            raise self.error.with_traceback(None)
        return True

    def is_completed(self) -> bool:
        """Return True once the operation has ended, with or without an error."""
        if not self._ended:
            self._wake()  # who polls expects it to go on meanwhile
        return self._ended

    def is_success(self) -> bool:
        """Return True if the operation has ended without an error."""
        return self._ended and self.error is None

    def has_ended(self) -> bool:
        """As ``is_completed``, without consequences."""
        return self._ended

    def exception(self) -> Exception | None:
        """Return the error with which the operation has ended."""
        return self.error

    def result(self) -> Any:
        """Return the tensors that hold the results."""
        return self._result

    def synchronize(self) -> None:
        """Wait for the end, as ``wait`` does."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that hold the results."""
        with _guard:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            ended = self._ended
        if ended:
            self._settle(future)
        else:
            self._wake()
        return future

    def _wake(self) -> None:
        """See to it that the operation goes on without being waited for."""
        assert self._queue is not None
        self._queue.wake()

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return self.source

    # What the counters read ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of what is waited for."""
        return str(self.call)

    @property
    def ordered(self) -> float:
        """Time at which all ranks had come; 0 if that is not known yet."""
        return self._ordered or (self.lookout.ordered if self.lookout is not None else 0.0)

    @ordered.setter
    def ordered(self, at: float) -> None:
        self._ordered = at

    # What the queue calls ---------------------------------------------------------------------------------------------

    def end(self, error: Exception | None) -> None:
        """Take note of the end; ``settle`` tells the future of it."""
        self.start = self.work = self.finish = None
        with _guard:
            self.error, self._ended = error, True
            self._to_settle = self._future

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self._result)

    def settle(self) -> None:
        """Complete the future that the program has asked for. Its callbacks run now, and may call collectives."""
        if self._to_settle is not None:
            self._settle(self._to_settle)


class OperationQueue:
    """The operations of one group.

    Args:
        label: of the group, for messages.
        record: counts what has ended; None to count nothing.
        connect: connects the group's ranks, when its first operation is carried out; is handed that operation's
            timeout in seconds, and a function to poll
            whether to give up.
    """

    def __init__(
        self, label: str, record: Record | None, connect: Callable[[float, Callable[[], bool]], Connection]
    ) -> None:
        self.label, self.record = label, record
        self._connect = connect
        self.connection: Connection | None = None
        self.failure: Exception | None = None
        """The first error, after which no operation can succeed."""
        self._reason_for_later = ""
        self.carrying_out = threading.Lock()
        """Held by the thread that carries out an operation."""
        self.waiting: deque[Operation] = deque()
        self._more = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = self._aborted = False

    def add(self, operation: Operation, *, waits: bool) -> Operation:
        """Add an operation behind all others.

        Args:
            waits: True if its caller waits for it at once, and carries it out.
        """
        self.waiting.append(operation)
        if not waits and not self._begun_here(operation):
            self.wake()
        return operation

    def _begun_here(self, operation: Operation) -> bool:
        """Begin an operation that is the first in the calling thread, so that other ranks need not wait for another.

        Returns:
            True if the operation has ended already.
        """
        if self.connection is None or not self.carrying_out.acquire(blocking=False):
            return False
        held = interrupts.hold()
        try:
            if operation.has_ended() or self.waiting[0] is not operation:
                return operation.has_ended()
            if not self._carry_out(operation, 0.0):
                return False
        finally:
            self.carrying_out.release()
            interrupts.release(held)
        operation.settle()
        return True

    def wake(self) -> None:
        """Have the group's thread carry out what is waiting."""
        if self._thread is None:
            with _guard:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=f"hvdgloo {self.label}", daemon=True)
                    self._thread.start()
        self._more.release()

    def wait_for(self, operation: Operation, deadline: float | None = None) -> None:
        """Carry out operations until one has ended.

        Raises:
            DistBackendError: the deadline on the monotonic clock has passed.
        """
        counters = None if self.record is None else self.record.counters
        if operation.has_ended() or counters is None or counters.blocked_in is not None:
            self._carry_out_until(operation, deadline)
            return
        counters.blocked_since = time.monotonic()
        counters.blocked_in = operation
        try:
            self._carry_out_until(operation, deadline)
        finally:
            counters.unblocked(operation.ordered, time.monotonic())

    def _carry_out_until(self, operation: Operation, deadline: float | None) -> None:
        while not operation.has_ended():
            if not self._connected_by(math.inf if deadline is None else deadline, operation):
                raise self._still_waiting(operation)
            if deadline is None:
                self.carrying_out.acquire()
            elif not self.carrying_out.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise self._still_waiting(operation)
            held = interrupts.hold()
            try:
                if operation.has_ended():
                    return
                first = self.waiting[0]
                if not self._carry_out(first, deadline):
                    raise self._still_waiting(operation)
            finally:
                self.carrying_out.release()
                interrupts.release(held)
            first.settle()

    def _connected_by(self, deadline: float, operation: Operation) -> bool:
        """Leave it to the group's thread to connect the ranks, since this cannot be left half done.

        Returns:
            False if that has neither succeeded nor failed by the deadline.
        """
        if self._is_decided():
            return True
        try:
            self.wake()
            while not self._is_decided():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_LOOK)
        except BaseException as interrupt:
            self._aborted = True
            self.fail(operation.call, BackendError(f"interrupted by {type(interrupt).__name__}"))
            raise
        return True

    def _is_decided(self) -> bool:
        """Tell whether the ranks are connected, or never will be."""
        return self.connection is not None or self.failure is not None

    def _still_waiting(self, operation: Operation) -> Exception:
        return dist.DistBackendError(
            f"hvdgloo: {operation.call} in {self.label} has not ended within this wait's timeout"
        )

    def _work(self) -> None:
        while True:
            self._more.acquire()
            if not self._closed and self.connection is not None:
                time.sleep(_HEAD_START)
            while self.waiting:
                if self._closed:
                    return
                with self.carrying_out:
                    if not self.waiting:
                        break
                    first = self.waiting[0]
                    self._carry_out(first)
                first.settle()
            if self._closed:
                return

    def _carry_out(self, operation: Operation, wait_until: float | None = None) -> bool:
        """Carry out the first operation.

        Returns:
            False if it has not ended by ``wait_until`` on the monotonic clock.
        """
        error: Exception | None = None
        try:
            if self.failure is not None:
                raise BackendError(self._reason_for_later)
            connection = self.connect(operation.seconds)
            if operation.work is None:
                assert operation.start is not None
                operation.begun = time.monotonic()
                operation.work = connection.begin(operation.call, operation.begun, operation.start)
            if not self._wait_for_ranks(operation, connection, wait_until):
                return False
            if operation.finish is not None:
                operation.finish()
            if self.record is not None:
                queued = operation.begun - operation.submitted
                operation.ordered = self.record.ended(
                    operation.call, operation.kind, operation.nbytes, operation.begun, queued
                )
        except Exception as failure:  # noqa: BLE001 - whatever it is, the caller gets it
            error = self.fail(operation.call, failure, others_know=True)
        except BaseException as interrupt:
            # What is half done can be neither repeated nor left to other ranks.
            operation.end(self.fail(operation.call, BackendError(f"interrupted by {type(interrupt).__name__}")))
            self.waiting.popleft()
            raise
        self.waiting.popleft()
        operation.end(error)
        return True

    def _wait_for_ranks(self, operation: Operation, connection: Connection, wait_until: float | None) -> bool:
        work = operation.work
        assert work is not None
        lookout, turn = operation.lookout, 0.0
        while not work.completes_within(turn):
            if wait_until is not None and time.monotonic() >= wait_until:
                return False
            if lookout is None:
                lookout = operation.lookout = Lookout(self, operation.call, operation.seconds, operation.begun)
            elif turn:
                lookout.look(connection)
            turn = TURN
        connection.check_calls()
        return True

    def connect(self, seconds: float) -> Connection:
        """Return the connection of the group's ranks, which the first call makes.

        Args:
            seconds: within which the other ranks must arrive.

        Raises:
            HvdglooError: they could not be connected.
        """
        if self.connection is None:
            self.connection = self._connect(seconds, lambda: self._aborted)
            if self.record is not None:
                self.record.connected(self.connection)
        return self.connection

    def check_peers(self) -> None:
        """Check that no process of the group has ended, as far as the ranks are connected.

        Raises:
            DistBackendError: some process has ended; it names them.
        """
        connection = self.connection
        ended = connection.peers.ended() if connection is not None else []
        if connection is not None and ended:
            raise dist.DistBackendError(f"hvdgloo: {self.label}: {connection.describe(ended)} has ended")

    def fail(self, call: Call, failure: BaseException, *, others_know: bool = False) -> Exception:
        """Take note that an operation has failed: no later one of the group can succeed.

        Args:
            others_know: True if other ranks may know better why.

        Returns:
            the error to raise.
        """
        if self.record is not None:
            self.record.no_longer_awaited()
        text, connection = str(failure) or type(failure).__name__, self.connection
        is_first = self.failure is None
        if is_first and connection is not None:
            connection.backend.abort()
            if others_know and not self._aborted:
                text = connection.explain(text)
        error = dist.DistBackendError(f"hvdgloo: {call} in {self.label}: {text}")
        if is_first:
            self._reason_for_later = f"the group failed before, in {call}: {text}"
            self.failure = error
        return error

    def abort(self) -> None:
        """Make what is under way fail soon; from any thread."""
        self._aborted = True
        connection = self.connection
        if connection is not None:
            connection.backend.abort()

    def close(self) -> None:
        """End the group: what is under way has ended, or fails."""
        self._closed = True
        if self.waiting:
            self.abort()
        if self._thread is not None:
            self._more.release()
            if self._thread is not threading.current_thread():
                self._thread.join(_CLOSING_SECONDS)
        with self.carrying_out:
            if self.record is not None:
                self.record.close()
            closed = BackendError("the group was destroyed")
            while self.waiting:
                self.waiting.popleft().end(self.fail(Call("?"), closed))
            connection, self.connection = self.connection, None
            if self.failure is None:
                self._reason_for_later = "the group was destroyed"
                self.failure = dist.DistBackendError(f"hvdgloo: {self.label} was destroyed")
                if connection is not None:
                    connection.close()
            elif connection is not None:
                connection.close(failed=True)

    def after_fork_in_child(self) -> None:
        """Make every call in a forked child fail: the group is its parent's."""
        connection, self.connection = self.connection, None
        if self.record is not None:
            self.record.close()
        self._reason_for_later = "the group belongs to this process's parent"
        self.failure = dist.DistBackendError(f"hvdgloo: {self.label} belongs to this process's parent")
        self.waiting = deque()
        self.carrying_out = threading.Lock()
        self._thread, self._more = None, threading.Semaphore(0)
        if connection is not None:
            connection.after_fork_in_child()
            _kept.append(connection)

    def wait_small(self, call: Call, seconds: float, begun: float) -> Patience:
        """Return a function that waits for another rank's counter during a call that is carried out at once."""
        lookout: Lookout | None = None
        connection = self.connection
        assert connection is not None
        backend = cast(ShmBackend, connection.backend)

        def wait(which: int, peer: int, value: int) -> None:
            nonlocal lookout
            while not backend.wait(which, peer, value, time.monotonic() + TURN):
                if lookout is None:
                    lookout = Lookout(self, call, seconds, begun, blocks=True)
                lookout.look(connection)

        return wait


class Lookout:
    """Attention to the other ranks while one operation waits for them.

    Args:
        seconds: after which the operation fails.
        began: time at which this rank began it.
        blocks: True if the program waits for it, which nothing else notes.

    Attributes:
        ordered: time at which all ranks had come, as far as that was seen; 0 before.
    """

    def __init__(
        self, queue: OperationQueue, call: Call, seconds: float, began: float, *, blocks: bool = False
    ) -> None:
        self._queue, self._call, self._seconds = queue, call, seconds
        self.began, self.ordered = began, 0.0
        self._warned = False
        if queue.record is not None:
            queue.record.waits(self, blocks=blocks)

    @property
    def name(self) -> str:
        """Name of the operation."""
        return str(self._call)

    def look(self, connection: Connection) -> None:
        """Look at the other ranks.

        Raises:
            BackendError: a process has ended, a rank called something else, or the timeout has passed.
            KeyboardInterrupt: Ctrl-C was pressed during the wait.
        """
        connection.check_peers()
        if interrupts.pending():
            raise KeyboardInterrupt
        if not self.ordered and (arrivals := connection.arrivals()) is not None:
            self.ordered = self.began + arrivals[1] * 1e-6
        waited = time.monotonic() - self.began
        if waited >= self._seconds:
            who = connection.describe_late()
            raise BackendError(f"{who or 'another rank'} did not come within the timeout of {self._seconds:g} s")
        if not self._warned and 0 < connection.stall_warning_time <= waited:
            self._warned = True
            who = connection.describe_late()
            logger.warning(
                "%s in %s has waited for %s for %.0f s", self._call, self._queue.label, who or "other ranks", waited
            )
