"""Collectives of CUDA tensors over NCCL, as torch carries it: ``ProcessGroupNCCL`` on the rendezvous store.

NCCL refuses two ranks on one GPU, and runs what it is given in order on a CUDA stream. Nothing here waits for the GPU:
an operation has completed when an event that follows it on the stream has happened.

torch's own watchdog would end the process when a peer is lost. For this group it only takes notes: the engine notices a
lost peer by itself, and ``abort`` then makes NCCL give up what is under way; what NCCL reports by itself fails the
operation. A thread that waits in NCCL for a peer to connect is left there.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdgloo._backends import gpu
from hvdgloo._backends.base import CANCELLED, RendezvousStore, Work, first_line
from hvdgloo._backends.process_group import BOOL_OPS, OPS, SIGNED, ProcessGroupBackend, tensor_of
from hvdgloo.errors import AuthenticationError, BackendError, ConnectError, RendezvousError
from hvdgloo.types import Buffer, DType, ReduceOp

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3

_TURN = 0.05
"""Seconds between two checks whether to give up waiting for NCCL to connect."""

_FAILURE_SECONDS = 0.2
"""The interval at which a wait for a collective checks whether NCCL has reported a failure."""

_CLOSE_SECONDS = 3.0
"""The time that closing a group may take."""

_stuck: list[Any] = []
"""Groups of this process that did not close in time."""


class NcclStore(dist.Store):  # type: ignore[name-defined,misc] # absent from torch's own annotations
    """A rendezvous store as NCCL's process group sees it: the first rank puts an id there that the others read."""

    def __init__(self, store: RendezvousStore, prefix: str, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._timeout = timeout
        self.error: Exception | None = None

    def clone(self) -> NcclStore:
        """Another one for another thread, as torch has it; this one serves all."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        with self._noting_errors():
            self._store.set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._get(keys, self._timeout)

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        self._get(keys, seconds)

    def _get(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        with self._noting_errors():
            return self._store.get_many([self._prefix + key for key in keys], timeout=timeout)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """An error goes through torch's C++, which makes one of its own of it."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise


class Passed:
    """A Mark: a place in a GPU's current stream. It completes when the GPU has done everything before it; not earlier,
    even after ``abort``, since kernels behind an aborted one still use their memory."""

    def __init__(self, device: torch.device, is_aborted: Callable[[], bool] = lambda: False) -> None:
        self._event = gpu.record(device)
        self._is_aborted = is_aborted

    def completes_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        try:
            while not gpu.has_happened(self._event):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)  # CUDA has no wait with a deadline
                pause = min(2 * pause, _LONGEST_PAUSE)
        except RuntimeError as error:
            raise BackendError(f"CUDA: {first_line(error)}") from error
        if self._is_aborted():  # its kernel may have ended by that alone
            raise BackendError("the operation was aborted")
        return True

    def order(self, buffers: Sequence[Buffer]) -> None:
        for device in {device for buffer in buffers if (device := _device_of(buffer)) is not None}:
            gpu.wait(self._event, device)


def _device_of(buffer: Buffer) -> torch.device | None:
    return gpu.of(buffer.owner) if isinstance(buffer.owner, torch.Tensor) else None


class Aside:
    """A daemon thread for calls that may never return, each with a deadline for its caller.

    It is started at once: at the interpreter's end, when groups are closed, no thread can be.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> Call:
        """Have the thread call a function, once it has returned from those before."""
        call = Call(function)
        self._calls.put(call)
        return call

    def end(self, timeout: float) -> None:
        """Have the thread end when it has done what it was given, and wait for that.

        A thread that returns from C++ while the interpreter ends takes the process along: "terminate called without an
        active exception".
        """
        self._calls.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call


class Call:
    """A call on another thread."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._returned = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - raised where a caller waits
            logger.debug("%s", error)
            self._error = error
        del self._function  # with what it holds: a group's destructor may block, too
        self._returned.set()

    def returns_within(self, timeout: float) -> bool:
        """Return whether the function has returned; raise what it raised."""
        if not self._returned.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True


class NcclBackend(ProcessGroupBackend):
    """One rank's membership in an NCCL process group.

    NCCL can block for as long as it likes when it connects, aborts or closes. It does so on threads of its own, and
    callers that wait for it have a deadline.

    Args:
        store: of the rendezvous.
        prefix: of this group's keys in it, the same on all ranks and never used before.
        rank, size: within the group.
        device: the GPU, which no other rank has. Collectives are ordered on its stream that is current at the call.
        connect_timeout: seconds until the ranks are connected, and until a collective has begun that connects others.
        cancelled: polled meanwhile to see whether to give up.

    Raises:
        ConnectError: at construction, if they are not.
        BackendError: connecting was cancelled.
    """

    name = "nccl"
    blocks = False
    in_rank_order = False

    def __init__(
        self,
        store: RendezvousStore,
        prefix: str,
        rank: int,
        size: int,
        device: torch.device,
        connect_timeout: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(rank, size)
        self._device = device
        self._aborted = threading.Event()
        self._abort: Call | None = None
        self._lock = threading.Lock()
        self._connect_timeout = connect_timeout
        self._routes: set[tuple[str, int, int]] = set()
        self._store = NcclStore(store, prefix, connect_timeout)
        of = threading.current_thread().name
        self._aside, self._aborter = Aside(f"NCCL of {of}"), Aside(f"NCCL's end of {of}")
        try:
            # Connect now, so that an unreachable peer is an error here and not in some later step.
            call = self._aside.call(self._connect)
            deadline = time.monotonic() + connect_timeout
            while not call.returns_within(_TURN):
                if cancelled():
                    raise BackendError(CANCELLED)
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"not connected within {connect_timeout:g} s")
        except (RendezvousError, AuthenticationError, BackendError):
            self._give_up()
            raise
        except RuntimeError as error:
            self._give_up()
            raise ConnectError(
                f"rank {rank} could not connect its NCCL group on {device}: {first_line(error)}. NCCL_DEBUG=INFO makes "
                "NCCL say more; HVDGLOO_GPU_OPERATIONS=gloo sends CUDA tensors through host memory instead",
                rank=rank,
            ) from error

    def _connect(self) -> None:
        """Make the group and its first collective, which connects it. Called aside."""
        # The program's stream has its own queue to work off, which is not to be waited for.
        gpu.ignore_captures()
        gpu.use_own_stream(self._device)
        group = gpu.nccl_group(self._store, self._rank, self._size)
        with self._lock:
            self._group = group
            if self._aborted.is_set():
                return
        first = gpu.empty((1,), torch.float32, self._device).zero_()
        try:
            work = group.allreduce([first])
        except RuntimeError:
            if self._store.error is not None:
                raise self._store.error from None
            raise
        work.wait()
        passed = Passed(self._device)
        while not passed.completes_within(_TURN):
            if self._aborted.is_set():
                return
            if failure := gpu.nccl_failure(work):
                raise RuntimeError(failure)

    def _give_up(self) -> None:
        self.abort()
        self.abandon()

    def _begin(self, function: Callable[..., Any], nbytes: int, *args: Any) -> Any:
        """Call the group's method aside where it may connect ranks: NCCL connects a pair when it first needs it.

        From version 2.22 on, it needs other pairs for each algorithm, which it chooses by kind and size, and for each
        peer of an alltoall. A peer that is not reached would keep this thread for ever.
        """
        routes = _routes(function.__name__, nbytes, args)
        if routes <= self._routes:
            return function(*args)
        stream, begun = gpu.current(self._device), []

        def begin() -> None:
            gpu.use(stream)
            begun.append(function(*args))

        call = self._aside.call(begin)
        deadline = time.monotonic() + self._connect_timeout
        while not call.returns_within(_TURN):
            if self._aborted.is_set():
                raise BackendError("the operation was aborted")
            if time.monotonic() >= deadline:
                raise BackendError(
                    f"NCCL did not begin {function.__name__} within {round(self._connect_timeout, 1):g} s: it connects "
                    "ranks when it first needs to, and did not reach one. NCCL_DEBUG=INFO makes NCCL say more; "
                    "NCCL_RUNTIME_CONNECT=0 makes it connect all ranks at the beginning"
                )
        self._routes |= routes
        return begun[0]

    def _work(self, what: str, work: Any, keep: object, finish: Callable[[], object] | None = None) -> Work:
        work.wait()  # the current stream waits for NCCL's own; this thread does not
        if finish is not None:
            finish()
        return _NcclWork(self._device, self._aborted.is_set, what, keep, work)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        if len(set(nbytes)) == 1:
            return super().allgather(source, target, nbytes)
        # Blocks of unequal sizes: torch makes a group of broadcasts of it, straight into their places.
        blocks = list(torch.split(tensor_of(target, DType.UINT8), list(nbytes)))
        work = self._begin(self._group.allgather, target.nbytes, [blocks], [tensor_of(source, DType.UINT8)])
        return self._work("allgather", work, (source, target))

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        if len(set(nbytes)) > 1 or source.dtype in (DType.INT16, DType.UINT16):
            return super().reducescatter(source, target, nbytes, op)
        kind = DType.UINT8 if source.dtype is DType.BOOL else SIGNED.get(source.dtype)
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = (BOOL_OPS if source.dtype is DType.BOOL else OPS)[op]
        begin = self._group._reduce_scatter_base
        work = self._begin(begin, source.nbytes, tensor_of(target, kind), tensor_of(source, kind), options)
        return self._work("reducescatter", work, (source, target))

    def scale(self, buffer: Buffer, factor: float) -> None:
        gpu.scale(tensor_of(buffer), factor)

    def abort(self) -> None:
        """See ``Backend``. Returns at once: NCCL is told so aside, and may take its time."""
        with self._lock:
            self._aborted.set()
            group = self._group
            if self._abort is not None or group is None:
                return
            self._abort = self._aborter.call(lambda: gpu.nccl_abort(group))

    def close(self) -> None:
        """See ``Backend``. Takes no longer than ``_CLOSE_SECONDS``, whatever NCCL does."""
        if self._group is None:
            return
        held = [self._group]
        self._group = None

        def release() -> None:
            try:
                gpu.nccl_close(held[0])
            finally:
                held.clear()

        deadline = time.monotonic() + (0.0 if _stuck else _CLOSE_SECONDS)
        call = self._aside.call(release)
        try:
            ended = call.returns_within(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - whatever torch raises: the job is over
            logger.warning("NCCL's group was not closed: %s", first_line(error))
            ended = True
        if not ended:
            if not _stuck:  # no group will end if one does not
                logger.warning("NCCL did not close its group within %g s; it is left as it is", _CLOSE_SECONDS)
            _stuck.append(held)
            _keep_for_ever(*held, self._store)
        self._end_threads(max(0.0, deadline - time.monotonic()))

    def abandon(self) -> None:
        _keep_for_ever(self._group, self._store)
        self._end_threads(0.0)

    def after_fork_in_child(self) -> None:
        """CUDA does not work in a forked child: the group is kept forever, untouched."""
        _keep_for_ever(self._group, self._store)

    def _end_threads(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for thread in (self._aside, self._aborter):
            thread.end(max(0.0, deadline - time.monotonic()))


def _keep_for_ever(*objects: object) -> None:
    """A group's destructor would wait for what never ends."""
    for kept in objects:
        if kept is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _routes(method: str, nbytes: int, args: Sequence[Any]) -> set[tuple[str, int, int]]:
    """Return what NCCL may need connections for: kinds and orders of size, and for an alltoall its peers."""
    if method != "alltoall_base":
        return {(method, nbytes.bit_length(), -1)}
    blocks = enumerate(map(max, *args[-2:]))
    return {(method, block.bit_length(), peer) for peer, block in blocks if block}


class _NcclWork(Passed):
    """An operation on the stream."""

    def __init__(
        self, device: torch.device, is_aborted: Callable[[], bool], what: str, keep: object, work: Any
    ) -> None:
        super().__init__(device, is_aborted)
        self._what = what
        self._keep = keep
        self._work = work
        self._next_look = time.monotonic() + _FAILURE_SECONDS

    def completes_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        try:
            while not super().completes_within(min(_FAILURE_SECONDS, max(0.0, deadline - time.monotonic()))):
                now = time.monotonic()
                if now >= self._next_look and not self._is_aborted():  # which ends no wait before the GPU is done
                    self._next_look = now + _FAILURE_SECONDS
                    if failure := gpu.nccl_failure(self._work):
                        raise BackendError(failure)
                if now >= deadline:
                    return False
            return True
        except BackendError as error:
            raise BackendError(f"NCCL {self._what}: {error}") from error
