"""CPU collectives over Gloo, as pygloo carries it: for Python 3.10 where torch is too large.

pygloo holds the interpreter's lock during a collective, so it runs in a process of its own beside the worker
(``pygloo_helper``), one for each group. Tensors pass through memory that the two share, piece by piece: one piece is
copied while another is on the wire. Pieces are cut alike on all ranks, and go in the order in which operations began.

The helper never sees a tensor's own memory. So ``abort`` kills it: whatever was under way fails at once, on this rank
and on those that wait for it, and nothing writes into a tensor any more.

pygloo knows fewer types and collectives than torch's Gloo: what it lacks is composed of what it has. Its ``allgatherv``
is not used, since it takes the same size from all ranks and otherwise crashes with a division by zero.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._backends import kernels, pygloo_helper
from hvdgloo._backends.base import CANCELLED, RendezvousStore, Work, first_line, get_all, gloo_unconnected
from hvdgloo._backends.codec import Values
from hvdgloo._backends.pygloo_helper import Command, Op, Order, Tell, Type, Verb
from hvdgloo._backends.shm import limits, system
from hvdgloo._backends.shm.segment import array_at
from hvdgloo._net.cancelling import TURN
from hvdgloo._net.descriptors import close_keeping_numbers, reserve_descriptors
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer, DType, ReduceOp, WireFormat

PIECE = 4 << 20
"""Bytes of a piece."""

SLOTS = 3
"""Pieces that are under way at once: one is filled, one on the wire, one emptied."""

ENCODES_NOT = (
    "pygloo carries Gloo here, and does not encode. Install torch on all hosts, or leave out --wire and "
    "Compression.int8 or int4"
)

_END_SECONDS = 5.0
"""Seconds that the helper has to end when it is told to."""

_WIRE_TYPES = {
    DType.UINT8: Type.Uint8,
    DType.INT8: Type.Int8,
    DType.INT32: Type.Int32,
    DType.UINT64: Type.Int64,  # whose sums and products have the same bits
    DType.INT64: Type.Int64,
    DType.FLOAT16: Type.Float16,
    DType.FLOAT32: Type.Float32,
    DType.FLOAT64: Type.Float64,
}
_WIDER = {
    DType.UINT16: DType.INT32,
    DType.INT16: DType.INT32,
    DType.UINT32: DType.INT64,
    DType.BFLOAT16: DType.FLOAT32,
}
"""The types that pygloo cannot compute with, and those that they are converted to for it."""

_OPS = {ReduceOp.SUM: Op.SUM, ReduceOp.MIN: Op.MIN, ReduceOp.MAX: Op.MAX, ReduceOp.PRODUCT: Op.PRODUCT}
# Bools are 0 and 1: their "or" is a maximum, their "and" a minimum.
_BOOL_OPS = {ReduceOp.SUM: Op.MAX, ReduceOp.MAX: Op.MAX, ReduceOp.MIN: Op.MIN, ReduceOp.PRODUCT: Op.MIN}


def _nothing(address: int) -> None:
    """A ``load`` or ``store`` that has nothing to do."""


@dataclass(frozen=True)
class Piece:
    """A part of an operation that fits into a slot.

    Attributes:
        command: its offsets count from the slot's beginning.
        load: called with the slot's address before the command.
        store: called with it afterwards.
    """

    command: Command
    load: Callable[[int], object] = _nothing
    store: Callable[[int], object] = _nothing


class _PyglooWork:
    """An operation under way."""

    def __init__(
        self,
        backend: PyglooBackend,
        what: str,
        pieces: Iterator[Piece],
        keep: object,
        finish: Callable[[], object] | None,
    ) -> None:
        self._backend = backend
        self.what = what
        self.pieces = pieces
        self.all_begun = False
        self.under_way = 0
        self.ended = False
        self._keep = keep
        self._finish = finish

    def look_whether_ended(self) -> None:
        """To be called whenever a piece has ended, or the last one has begun."""
        if self.all_begun and not self.under_way and not self.ended:
            if self._finish is not None:
                self._finish()
            self.ended = True

    def completes_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self.ended:
            if not self._backend.advance(deadline):
                return False
        return True


class Helper:
    """The other process, the socket to it, and the memory that is shared with it.

    Args:
        nbytes: of the memory.

    Raises:
        OSError, Unsupported: it cannot be started, or there is no such memory here.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        limits.check_room(nbytes)
        self._memory = system.create_memory("hvdgloo-pygloo", nbytes)
        self.address = 0
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.posix_fallocate(self._memory, 0, nbytes)  # an error here, and not the end of a process later
            self.address = system.map_memory(self._memory, nbytes)
            descriptors = theirs.fileno(), self._memory
            # By its path and isolated: neither it nor its modules may be looked up in the current folder or in ours.
            self._process = subprocess.Popen(
                [sys.executable, "-I", pygloo_helper.__file__, *map(str, descriptors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        except BaseException:
            self._release()
            raise
        finally:
            theirs.close()
        self._poll = select.poll()
        self._poll.register(self._channel, select.POLLIN)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Hand a message over.

        Raises:
            BackendError: the helper is gone.
        """
        try:
            self._channel.send(message)
        except OSError as error:
            raise BackendError(self._how_it_ended()) from error

    def receive(self, timeout: float) -> bytes | None:
        """The next message; None if there is none within ``timeout`` seconds.

        Raises:
            BackendError: the helper is gone, or reports a failure.
        """
        if not self._poll.poll(max(0, math.ceil(timeout * 1000))):
            return None
        try:
            message = self._channel.recv(pygloo_helper.MOST_BYTES)
        except OSError:
            message = b""
        if not message:
            raise BackendError(self._how_it_ended())
        if message[0] == Tell.FAILED:
            raise BackendError(first_line(RuntimeError(message[1:].decode(errors="replace"))))
        return message

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the helper process that runs pygloo no longer answers"
        return f"the helper process that runs pygloo has ended with status {status}"

    def kill(self) -> None:
        """End it at once. Callable from any thread, more than once."""
        self._process.kill()

    def close(self) -> None:
        """End it, and give the memory back."""
        if self._channel.fileno() < 0:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()  # which ends it, in whatever it is doing
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        self._channel.close()
        if self.address:
            system.unmap_memory(self.address, self.nbytes)
            self.address = 0
        os.close(self._memory)

    def after_fork_in_child(self) -> None:
        """Let go of the descriptors in a forked child: the helper is to end with its worker."""
        if self._channel.fileno() >= 0:
            assert self._process.stdin is not None
            close_keeping_numbers([self._channel.fileno(), self._process.stdin.fileno(), self._memory])
            self._process.returncode = 0  # it is no child of this process


class PyglooBackend:
    """One rank's membership in a Gloo process group of pygloo's; see ``GlooBackend`` for arguments and errors."""

    name = "gloo"
    blocks = False
    in_rank_order = False

    def __init__(
        self,
        store: RendezvousStore,
        prefix: str,
        rank: int,
        size: int,
        address: str,
        connect_timeout: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self._rank, self._size = rank, size
        self._failure = ""
        self._waiting: deque[_PyglooWork] = deque()
        self._under_way: deque[tuple[_PyglooWork, Piece, int]] = deque()
        self._free = deque(slot * PIECE for slot in range(SLOTS))
        # The helper has this process's limits, and a connection for each other rank.
        reserve_descriptors(size - 1, f"rank {rank} of a Gloo group", "connections with other ranks")
        try:
            self._helper = Helper(SLOTS * PIECE)
        except (OSError, system.Unsupported) as error:
            raise gloo_unconnected(rank, address, f"the helper process of pygloo cannot be started: {error}") from error
        try:
            self._helper.send(Order(_path(), rank, size, address, self._helper.nbytes).encode())
            self._connect(store, prefix, connect_timeout, cancelled)
        except BackendError as error:
            self.close()
            raise gloo_unconnected(rank, address, str(error)) from error
        except BaseException:
            self.close()
            raise

    def _connect(
        self, store: RendezvousStore, prefix: str, timeout: float, cancelled: Callable[[], bool] | None
    ) -> None:
        """Answer the helper's questions until it is connected."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            message = self._helper.receive(min(TURN, left))
            if message is None:
                if cancelled is not None and cancelled():
                    raise BackendError(CANCELLED)
                if left <= TURN:
                    raise BackendError(f"not connected within {timeout:g} s")
            elif message[0] == Tell.PUBLISH:
                store.set(f"{prefix}{self._rank}", message[1:])
            elif message[0] == Tell.ASK:
                for value in get_all(store, [f"{prefix}{rank}" for rank in range(self._size)], left, cancelled):
                    self._helper.send(value)
            else:
                return

    @property
    def helper_pid(self) -> int:
        """The process that runs pygloo."""
        return self._helper.pid

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        return self._begin(f"allreduce of {buffer.nbytes} bytes", self._reduced(buffer, op), buffer)

    @property
    def rounding(self) -> tuple[float, float]:
        """See ``Encoding``: nothing is encoded."""
        return 0.0, 0.0

    def allreduce_encoded(self, buffer: Buffer, form: WireFormat, residual: Values | None = None) -> Work:
        """Refuse: see ``Encoding``.

        Raises:
            BackendError: always.
        """
        raise BackendError(f"values cannot cross between hosts as {form}: {ENCODES_NOT}")

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        return self._begin("allgather", self._gathered(source, target, nbytes), (source, target))

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        sends = self._rank == root
        pieces = self._spread(root, buffer.nbytes, buffer.address if sends else 0, 0 if sends else buffer.address)
        return self._begin(f"broadcast of {buffer.nbytes} bytes", pieces, buffer)

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Work:
        return self._begin("alltoall", self._exchanged(source, target, sent, received), (source, target))

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        # In rank order, so that results do not depend on the timing.
        own = nbytes[self._rank]
        blocks = np.empty((self._size, target.count), target.dtype.numpy_dtype)

        def finish() -> None:
            np.copyto(target.array(), kernels.reduce(list(blocks), target.dtype, op))

        pieces = self._exchanged(source, Buffer.of_array(blocks, target.dtype), nbytes, [own] * self._size)
        return self._begin("reducescatter", pieces, (source, target), finish)

    def scale(self, buffer: Buffer, factor: float) -> None:
        kernels.scale(buffer, factor)

    def abort(self) -> None:
        self._helper.kill()

    def close(self) -> None:
        self._fail("the process group has been closed")
        self._helper.close()

    def abandon(self) -> None:
        self.close()  # which waits for nothing but the helper's end

    def after_fork_in_child(self) -> None:
        """Let go of the helper in a forked child."""
        self._helper.after_fork_in_child()

    def _begin(
        self, what: str, pieces: Iterator[Piece], keep: object, finish: Callable[[], object] | None = None
    ) -> Work:
        if self._failure:
            raise BackendError(f"Gloo {what}: {self._failure}")
        work = _PyglooWork(self, what, pieces, keep, finish)
        self._waiting.append(work)
        self._feed()
        return work

    def _feed(self) -> None:
        """Begin as many pieces as there are free slots."""
        while self._waiting and self._free:
            work = self._waiting[0]
            piece = next(work.pieces, None)
            if piece is None:
                self._waiting.popleft()
                work.all_begun = True
                work.look_whether_ended()
                continue
            slot, command = self._free.popleft(), piece.command
            piece.load(self._helper.address + slot)
            command = replace(command, source=command.source + slot, target=command.target + slot)
            self._under_way.append((work, piece, slot))
            work.under_way += 1
            try:
                self._helper.send(command.encode())
            except BackendError as error:
                self._fail(str(error))
                raise

    def advance(self, deadline: float) -> bool:
        """Wait for the piece that was begun first, put its result in place, and begin others.

        Returns:
            False if it has not ended by ``deadline`` on the monotonic clock.

        Raises:
            BackendError: some piece has failed, or the helper has ended.
        """
        if not self._failure:
            try:
                if self._helper.receive(deadline - time.monotonic()) is None:
                    return False
            except BackendError as error:
                self._fail(str(error))
        if self._failure:
            what = self._under_way[0][0].what if self._under_way else "group"
            raise BackendError(f"Gloo {what}: {self._failure}")
        work, piece, slot = self._under_way.popleft()
        piece.store(self._helper.address + slot)
        self._free.append(slot)
        work.under_way -= 1
        work.look_whether_ended()
        self._feed()
        return True

    def _fail(self, reason: str) -> None:
        """Remember why nothing goes on any more; the first reason counts."""
        self._failure = self._failure or reason

    # How operations are cut into pieces, alike on all ranks.

    def _reduced(self, buffer: Buffer, op: ReduceOp) -> Iterator[Piece]:
        dtype = buffer.dtype
        if (dtype.is_floating or dtype is DType.UINT64) and op in (ReduceOp.MIN, ReduceOp.MAX):
            yield from self._extremes(buffer, op)
            return
        wide = _WIDER.get(dtype, dtype)
        kind = Type.Uint8 if dtype is DType.BOOL else _WIRE_TYPES[wide]
        combine = (_BOOL_OPS if dtype is DType.BOOL else _OPS)[op]
        for begin, count in _cut(buffer.count, PIECE // wide.itemsize):
            part = buffer.part(begin * dtype.itemsize, count * dtype.itemsize)
            command = Command(Verb.ALLREDUCE, kind, combine, count=count)
            if wide is dtype:
                yield Piece(command, _load(part.address, part.nbytes), _store(part.address, part.nbytes))
            else:
                yield Piece(command, _widen(part, wide), _narrow(part, wide))

    @staticmethod
    def _extremes(buffer: Buffer, op: ReduceOp) -> Iterator[Piece]:
        """As integers in the same order: pygloo's comparisons lose NaN, in a part of the ranks' blocks, and it has no
        uint64."""
        is_long = buffer.dtype in (DType.FLOAT64, DType.UINT64)
        kind, itemsize = (Type.Int64, 8) if is_long else (Type.Int32, 4)
        for begin, count in _cut(buffer.count, PIECE // itemsize):
            part = buffer.part(begin * buffer.dtype.itemsize, count * buffer.dtype.itemsize)
            command = Command(Verb.ALLREDUCE, kind, _OPS[op], count=count)
            yield Piece(command, *_ordered(part, op, itemsize))

    def _gathered(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Iterator[Piece]:
        """Gather what all ranks have at once; the rest of longer blocks is broadcast."""
        begins = list(accumulate(nbytes, initial=0))
        common = min(nbytes)
        for begin, count in _cut(common, PIECE // (self._size + 1)):
            command = Command(Verb.ALLGATHER, target=count, count=count)
            places = [target.address + start + begin for start in begins[:-1]]
            yield Piece(command, _load(source.address + begin, count), _store_blocks(places, count))
        for root, size in enumerate(nbytes):
            place, left = target.address + begins[root] + common, size - common
            if root == self._rank:
                ctypes.memmove(place, source.address + common, left)
                yield from self._spread(root, left, source.address + common, 0)
            else:
                yield from self._spread(root, left, 0, place)

    @staticmethod
    def _spread(root: int, nbytes: int, source: int, target: int) -> Iterator[Piece]:
        """A broadcast, from an address on the root, and to one on the others; 0 is none."""
        for begin, count in _cut(nbytes, PIECE):
            load = _load(source + begin, count) if source else _nothing
            store = _store(target + begin, count) if target else _nothing
            yield Piece(Command(Verb.BROADCAST, peer=root, count=count), load, store)

    def _exchanged(
        self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]
    ) -> Iterator[Piece]:
        """Pairs of ranks meet, round after round. A send waits for its receive, so of each pair the lower one sends
        first, and the other receives."""
        outgoing = list(accumulate(sent, initial=source.address))
        incoming = list(accumulate(received, initial=target.address))
        ctypes.memmove(incoming[self._rank], outgoing[self._rank], sent[self._rank])
        for peer in rounds(self._rank, self._size):
            sends = [
                Piece(Command(Verb.SEND, peer=peer, count=count), load=_load(outgoing[peer] + begin, count))
                for begin, count in _cut(sent[peer], PIECE)
            ]
            receives = [
                Piece(Command(Verb.RECEIVE, peer=peer, count=count), store=_store(incoming[peer] + begin, count))
                for begin, count in _cut(received[peer], PIECE)
            ]
            yield from sends + receives if self._rank < peer else receives + sends


def _path() -> list[str]:
    """Return the directories in which modules are found; Python ignores entries that are not text, too."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def rounds(rank: int, size: int) -> list[int]:
    """Return the peer that a rank meets in each round, if all are to meet each other once, in pairs.

    The circle of a round-robin tournament: in round r the ranks whose numbers add up to r modulo an odd number meet.
    If there are as many ranks as an even number, the last one is left out of that circle, and meets the rank that would
    meet itself; if not, that rank rests.
    """
    circle = size if size % 2 else size - 1
    met = []
    for turn in range(circle):
        if rank == circle:
            peer = turn * ((circle + 1) // 2) % circle  # twice that is turn
        else:
            peer = (turn - rank) % circle
            if peer == rank:
                peer = circle
        if peer < size:
            met.append(peer)
    return met


def _cut(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Beginnings and lengths of pieces."""
    return ((begin, min(most, total - begin)) for begin in range(0, total, most))


def _load(address: int, nbytes: int) -> Callable[[int], object]:
    return lambda slot: ctypes.memmove(slot, address, nbytes)


def _store(address: int, nbytes: int) -> Callable[[int], object]:
    return lambda slot: ctypes.memmove(address, slot, nbytes)


def _store_blocks(places: Sequence[int], nbytes: int) -> Callable[[int], object]:
    """Put what was gathered behind one's own block to its places."""

    def store(slot: int) -> None:
        for number, place in enumerate(places, 1):
            ctypes.memmove(place, slot + number * nbytes, nbytes)

    return store


def _widen(part: Buffer, wide: DType) -> Callable[[int], object]:
    def load(slot: int) -> None:
        array_at(slot, part.count * wide.itemsize).view(wide.numpy_dtype)[:] = _values(part)

    return load


def _narrow(part: Buffer, wide: DType) -> Callable[[int], object]:
    def store(slot: int) -> None:
        _assign(part, array_at(slot, part.count * wide.itemsize).view(wide.numpy_dtype))

    return store


def _ordered(part: Buffer, op: ReduceOp, itemsize: int) -> tuple[Callable[[int], object], Callable[[int], object]]:
    def integers(slot: int) -> npt.NDArray[Any]:
        return array_at(slot, part.count * itemsize).view(f"i{itemsize}")

    def load(slot: int) -> None:
        integers(slot)[:] = kernels.to_ordered(_values(part), op)

    def store(slot: int) -> None:
        _assign(part, kernels.from_ordered(integers(slot), part.dtype))

    return load, store


def _values(part: Buffer) -> npt.NDArray[Any]:
    """Numbers to compute with: of half types as float32."""
    return kernels.widen(part.array(), part.dtype) if kernels.is_half(part.dtype) else part.array()


def _assign(part: Buffer, values: npt.NDArray[Any]) -> None:
    """The inverse of ``_values``; of wider integers the lower bits."""
    part.array()[:] = kernels.narrow(values, part.dtype) if kernels.is_half(part.dtype) else values
