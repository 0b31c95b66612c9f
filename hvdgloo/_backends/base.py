"""The interface of data planes to the engine.

A backend belongs to one process set's ranks; every member calls the same operations in the same order, from one thread.
Buffers are flat memory: shapes mean nothing here. An operation may return before it has completed; its memory belongs
to it until ``Work.completes_within`` has said so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from hvdgloo._backends.codec import Values
from hvdgloo._net.cancelling import LONGEST_TURN, TURN
from hvdgloo.errors import BackendError, ConnectError, RendezvousTimeoutError
from hvdgloo.types import Buffer, ReduceOp, WireFormat

logger = logging.getLogger(__name__)

FEW_RANKS = 5
"""As many ranks send small tensors to each other at once, in one step. More ranks do so through a cube, or, where there
are several on a host, through their leaders, and do not need a connection for each pair."""

CANCELLED = "the job ended while a process group was being connected"


class Work(Protocol):
    """An operation under way."""

    def completes_within(self, timeout: float) -> bool:
        """Wait until the results are in place and every peer has finished reading this rank's memory.

        Args:
            timeout: seconds.

        Returns:
            False if it is still under way after ``timeout``; ask again.

        Raises:
            BackendError: it failed, or was aborted.
        """
        ...


class Backend(Protocol):
    """A data plane for the ranks of one process set.

    Attributes:
        name: by which it is chosen.
        blocks: True if an operation waits for other ranks before it returns its Work.
        in_rank_order: True if every element is combined in the order of ranks, wherever in a buffer it stands.
    """

    name: str
    blocks: bool
    in_rank_order: bool

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        """Combine the buffers of all ranks element by element, in place. ``op`` is SUM, MIN, MAX or PRODUCT."""
        ...

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        """Put every rank's source one after another into target.

        Args:
            source: ``nbytes[rank]`` bytes.
            target: ``sum(nbytes)`` bytes, apart from source.
            nbytes: the size of each rank's source, in order of ranks within the set.
        """
        ...

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        """Fill the buffers of all ranks from the buffer of ``root``, a rank within the set."""
        ...

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Work:
        """Send every rank a block of source, and put what each sends one after another into target.

        Args:
            source: at least ``sum(sent)`` bytes.
            target: ``sum(received)`` bytes, apart from source.
            sent, received: bytes to and from each rank, in order of ranks within the set.
        """
        ...

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        """Combine the sources of all ranks element by element, and give each rank a block of the result.

        Args:
            source: ``sum(nbytes)`` bytes; not written.
            target: ``nbytes[own rank]`` bytes.
            nbytes: the size of each rank's block, in order of ranks within the set.
            op: SUM.
        """
        ...

    def scale(self, buffer: Buffer, factor: float) -> None:
        """Multiply every element in place; if the factor is the reciprocal of a whole number, divide by that, which is
        exact. Integers are truncated toward zero, half types computed in float32."""
        ...

    def abort(self) -> None:
        """Make every operation that is under way fail soon. Callable from any thread, more than once."""
        ...

    def close(self) -> None:
        """Release everything. Nothing is under way when this is called."""
        ...

    def abandon(self) -> None:
        """Called instead of ``close`` after ``abort``: something never ended, so nothing it may use is released."""
        ...


def wait_for(work: Work, timeout: float, what: str) -> None:
    """Wait for an operation's end.

    Raises:
        BackendError: ``what`` was not there within ``timeout`` seconds, or the operation failed.
    """
    deadline = time.monotonic() + timeout
    while not work.completes_within(TURN):
        if time.monotonic() >= deadline:
            raise BackendError(f"{what} within {timeout:g} s")


class Several:
    """Operations that were started one after another, as one Work."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def completes_within(self, timeout: float) -> bool:
        """As ``Work``'s; the timeout is each one's."""
        return all(work.completes_within(timeout) for work in self._works)

    def have_ended(self, timeout: float) -> bool:
        """See ``has_ended``. Those behind one that has failed are asked, too."""
        return all(has_ended(work, timeout) for work in self._works)


def has_ended(work: Work, timeout: float) -> bool:
    """Wait until an aborted operation leaves its memory alone, whether it has failed or not.

    Args:
        timeout: seconds.

    Returns:
        False if some of it is still under way.
    """
    if isinstance(work, Several):
        return work.have_ended(timeout)
    try:
        return work.completes_within(timeout)
    except Exception as failure:  # noqa: BLE001 - expected: it was aborted
        logger.debug("aborted: %s", failure)
        return True


class RendezvousStore(Protocol):
    """The part of a rendezvous store that a backend needs."""

    def set(self, key: str, value: bytes) -> None: ...

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]: ...


def get_all(
    store: RendezvousStore, keys: Sequence[str], timeout: float, cancelled: Callable[[], bool] | None
) -> list[bytes]:
    """Wait for the values of all keys: in one request, or in several if the wait may be given up meanwhile.

    Args:
        timeout: seconds.
        cancelled: polled to see whether to give up.

    Raises:
        RendezvousError: some were not set in time, or the server cannot be reached.
        BackendError: the wait was cancelled.
    """
    if cancelled is None:
        return store.get_many(keys, timeout=timeout)
    deadline, turn = time.monotonic() + timeout, TURN
    while True:
        left = deadline - time.monotonic()
        try:
            return store.get_many(keys, timeout=max(0.0, min(turn, left)))
        except RendezvousTimeoutError:
            if left <= turn:
                raise
        if cancelled():
            raise BackendError(CANCELLED)
        turn = min(2 * turn, LONGEST_TURN)


def peek(store: RendezvousStore, key: str) -> bytes:
    """Return the present value of a key; empty if it was never set.

    Raises:
        RendezvousError: the server cannot be reached.
    """
    try:
        return store.get_many([key], timeout=0.0)[0]
    except RendezvousTimeoutError:
        return b""


def gloo_unconnected(rank: int, address: str, reason: str, missing: Sequence[int] = ()) -> ConnectError:
    """The error of a rank whose Gloo group, whichever package carries it, could not be connected."""
    return ConnectError(
        f"rank {rank} could not connect its Gloo group from {address}: {reason}. Gloo listens on a port that the "
        "system chooses, on that address; check that the other hosts reach it (firewall, wrong network interface)",
        rank=rank,
        address=address,
        missing=missing,
    )


def first_line(error: BaseException) -> str:
    """A message of Gloo's or torch's, without its source location and its advice."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    if text.startswith("[") and "] " in text:
        text = text.partition("] ")[2]
    return text.partition(" This is typically caused by")[0].rstrip(".! ")


class Mark(Work, Protocol):
    """A place in the order of what a memory does."""

    def order(self, buffers: Sequence[Buffer]) -> None:
        """Order what the calling thread does with these from now on after this place. Does not block."""
        ...


class Memory(Protocol):
    """The memory that a backend's buffers must be in, with ways there and back for tensors that are elsewhere.

    Attributes:
        in_order: True if copies here and the backend's operations are ordered among themselves, as on a CUDA
            stream: a result may be unpacked before its operation has completed, and ``mark`` tells when it is there.
    """

    in_order: bool

    def holds(self, buffer: Buffer) -> bool:
        """Return whether a backend can use this very memory."""
        ...

    def empty(self, nbytes: int) -> Buffer:
        """New memory, uninitialised; a buffer of uint8."""
        ...

    def pack(self, target: Buffer, sources: Sequence[Buffer]) -> None:
        """Copy tensors, wherever they are, one after another into ``target``, which is of this memory."""
        ...

    def unpack(self, source: Buffer, pieces: Iterable[tuple[Buffer, int, int]]) -> None:
        """Copy ``source``, which is of this memory, to pieces of tensors wherever they are.

        Args:
            pieces: for the bytes of ``source`` one after another: a tensor, at which byte in it they begin, and how
                many they are.
        """
        ...

    def mark(self) -> Mark:
        """A Work that completes when everything handed over before it has happened."""
        ...


@runtime_checkable
class Scattered(Protocol):
    """An additional ability of a Backend: reducing tensors where they lie, without packing them together."""

    def allreduce_several(
        self,
        sources: Sequence[Buffer],
        targets: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work:
        """Combine the sources of all ranks into every rank's targets.

        Args:
            sources: tensors of one dtype; not written, unless they are targets too.
            targets: of the same sizes.
            op: SUM, MIN, MAX or PRODUCT.
            prescale, postscale: factors of every element before and after, rounded like ``scale``'s results.
        """
        ...


@runtime_checkable
class Encoding(Protocol):
    """An additional ability of a Backend: sums whose values are encoded where they cross a network."""

    @property
    def rounding(self) -> tuple[float, float]:
        """Sums of squares of what encoding has lost and of what was encoded, of one block of each chunk on this
        rank."""
        ...

    def allreduce_encoded(self, buffer: Buffer, form: WireFormat, residual: Values | None = None) -> Work:
        """Add up the buffers of all ranks, in place; all get the same bits.

        Args:
            buffer: float32, float16 or bfloat16.
            form: any but FULL.
            residual: of the buffer's size; for error feedback. Whatever this rank encodes is added to it first, and
                what the codes leave out remains there. A rank encodes no value of a buffer more than once.
        """
        ...


def label_of(backend: Backend) -> str:
    """Return a backend's name as users see it."""
    return {"shm": "shared memory", "local": "alone"}.get(backend.name, backend.name)


@dataclass(frozen=True)
class Plane:
    """A backend, and the memory that it works in.

    Attributes:
        encodes_not: why the backend cannot encode sums although they cross between hosts, and the remedy; else empty.
    """

    backend: Backend
    memory: Memory
    encodes_not: str = ""

    @cached_property
    def label(self) -> str:
        """The plane's name as users see it."""
        return label_of(self.backend)

    @cached_property
    def scattered(self) -> Scattered | None:
        """The backend, if it can reduce tensors where they lie."""
        return self.backend if isinstance(self.backend, Scattered) else None

    @cached_property
    def encoding(self) -> Encoding | None:
        """The backend, if values that it reduces cross a network, and it can encode them."""
        return self.backend if isinstance(self.backend, Encoding) else None


@runtime_checkable
class Sharing(Protocol):
    """An additional ability of a Backend: memory that the peers can see, so that tensors need not be copied there."""

    def allocate(self, nbytes: int) -> Any | None:
        """Uninitialised memory as an object with a buffer; None if there is none left. Callable from any thread.

        It exists as long as the object is held, even after the backend has been closed.
        """
        ...


class Lane(Protocol):
    """Memory in which the ranks of one host offer small tensors to each other, apart from all other operations.

    Each rank has a few places, and writes only there. What is in a place is known by a word, which is not 0.
    """

    @property
    def most_bytes(self) -> int:
        """Bytes that a place holds."""
        ...

    def open(self) -> bool:
        """Take memory for this rank's places, which it then has; False if there is none. Called before ``post``."""
        ...

    def post(self, place: int, word: int, source: Buffer | None, prescale: float, now: float) -> None:
        """Put a tensor into a place, times a factor, and then the word.

        Args:
            source: None for no tensor.
            now: time to be shown with it, on the monotonic clock.
        """
        ...

    def is_whole(self, place: int, word: int) -> bool:
        """Return whether all ranks have put this word into the place."""
        ...

    def watch(self, place: int, word: int) -> bool:
        """Return what ``is_whole`` does, after looking for a moment if each rank has a core of its own."""
        ...

    def sleep(self, place: int, word: int, seconds: float, stop: Callable[[], bool] | None = None) -> None:
        """Sleep until ``is_whole`` may have changed, ``ring`` was called, or the time has passed.

        Args:
            stop: returns whether to return at once, instead.
        """
        ...

    def adapt(self, place: int) -> None:
        """Choose how long to look next time, now that a place is whole."""
        ...

    def combine(self, place: int, target: Buffer, op: ReduceOp, postscale: float) -> None:
        """Put the reduction of what all ranks have in a place into a tensor, in order of ranks."""
        ...

    def copy(self, place: int, ranks: Sequence[int], target: Buffer) -> None:
        """Put what these ranks have in a place, of equal sizes, into a tensor, one after another."""
        ...

    def arrivals(self, place: int) -> tuple[int, float]:
        """Return which rank was the last to post in a place, and how many seconds the first one had waited for it."""
        ...

    def ring(self) -> None:
        """Wake this rank's thread that sleeps here. Callable from any thread, also after the backend has closed."""
        ...


@runtime_checkable
class Offering(Protocol):
    """An additional ability of a Backend: small operations apart from all others, begun by each rank when it likes."""

    def lane(self, places: int, *, may_spin: bool) -> Lane | None:
        """Return the memory for them, once; None where processors do not keep the order of writes.

        Args:
            places: number of places that each rank needs.
            may_spin: True if each rank of the host has a core of its own.
        """
        ...


@runtime_checkable
class Tunable(Protocol):
    """An additional ability of a Backend: settings that may change between two operations, on all ranks."""

    @property
    def hierarchical_threshold(self) -> int:
        """Bytes from which a tensor of an allreduce is cut into slices."""
        ...

    def tune(self, hierarchical_threshold: int) -> None:
        """Have another one from the next operation on; nothing may be under way."""
        ...


class Done:
    """The Work of an operation that completed before it returned."""

    def completes_within(self, timeout: float) -> bool:
        """It has completed."""
        return True

    def order(self, buffers: Sequence[Buffer]) -> None:
        """All that comes now comes after it."""
