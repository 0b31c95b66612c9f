"""Collectives by exchanges between neighbours in a cube of ranks (``cube``), over anything that sends and receives.

Every element is combined in an order that follows from ranks and sizes alone: results are the same bits on all ranks,
and in every run. Methods return when the operation has ended, or raise as soon as something has failed; by then other
sends and receives may still be under way, which the owner of the wire waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdgloo._backends.cube import Cube, Exchange
from hvdgloo._backends.shm.reduction import Reducer, Reduction
from hvdgloo.types import Buffer, DType, ReduceOp

Bytes = npt.NDArray[np.uint8]

SMALL = 1 << 14
"""Bytes up to which a tensor goes whole to each neighbour of a cube: in half as many steps as halving and doubling."""

PIECE = 1 << 20
"""Bytes that are combined while others are being received."""

AHEAD = 3
"""Pieces that are received at once."""


class Wire(Protocol):
    """The carrier of bytes between ranks. Between two ranks they arrive in the order in which they were sent."""

    def send(self, data: Bytes, peer: int) -> Any:
        """Begin to send; ``data`` must not be written until ``wait`` has returned for what this returns."""
        ...

    def receive(self, data: Bytes, peer: int) -> Any:
        """Begin to receive exactly as many bytes as ``peer`` sends at a time."""
        ...

    def wait(self, begun: Any) -> None:
        """Wait until something has ended.

        Raises:
            Exception: it failed.
        """
        ...


class Butterfly:
    """One rank's part in the collectives of a cube."""

    def __init__(self, cube: Cube, wire: Wire) -> None:
        self._cube, self._wire = cube, wire
        self._leading, self._following = Reducer(0, 2, PIECE), Reducer(1, 2, PIECE)
        self._rooms = np.empty((0, 0), np.uint8)

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> None:
        """See ``Backend``."""
        cube, whole, reduction = self._cube, _bytes_of(buffer), Reduction(buffer.dtype, op)
        if cube.speaker is not None:
            self._send(whole, cube.speaker)
            self._receive(whole, cube.speaker)
            return
        if cube.ward is not None:
            self._combine(whole, None, cube.ward, reduction, leads=True)
        if buffer.nbytes <= SMALL or buffer.count < cube.corners:
            for exchange in reversed(cube.halvings):
                self._combine(whole, whole, exchange.peer, reduction, leads=exchange.leads)
        else:
            edges = self._even_edges(buffer)
            self._halve(whole, edges, reduction)
            self._double(whole, edges)
        if cube.ward is not None:
            self._send(whole, cube.ward)

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> None:
        """See ``Backend``; takes any reduction."""
        cube, reduction = self._cube, Reduction(source.dtype, op)
        if cube.speaker is not None:
            self._send(_bytes_of(source), cube.speaker)
            self._receive(_bytes_of(target), cube.speaker)
            return
        whole = _bytes_of(source).copy()
        if cube.ward is not None:
            self._combine(whole, None, cube.ward, reduction, leads=True)
        edges = self._edges(nbytes)
        self._halve(whole, edges, reduction)
        begin = edges[cube.corner]
        _bytes_of(target)[:] = whole[begin : begin + target.nbytes]
        if cube.ward is not None:
            self._send(whole[begin + target.nbytes : edges[cube.corner + 1]], cube.ward)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> None:
        """See ``Backend``."""
        cube, whole = self._cube, _bytes_of(target)
        if cube.speaker is not None:
            self._send(_bytes_of(source), cube.speaker)
            self._receive(whole, cube.speaker)
            return
        edges = self._edges(nbytes)
        begin, end = edges[cube.corner], edges[cube.corner + 1]
        whole[begin : begin + source.nbytes] = _bytes_of(source)
        if cube.ward is not None:
            self._receive(whole[begin + source.nbytes : end], cube.ward)
        self._double(whole, edges)
        if cube.ward is not None:
            self._send(whole, cube.ward)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """See ``Backend``."""
        cube, whole = self._cube, _bytes_of(buffer)
        if cube.speaker is not None:
            if cube.rank == root:
                self._send(whole, cube.speaker)
            else:
                self._receive(whole, cube.speaker)
            return
        if cube.ward == root:
            self._receive(whole, root)
        in_slices = buffer.nbytes > SMALL
        edges = self._even_edges(buffer)
        for exchange in cube.halvings:
            sends = cube.passes_on(exchange, cube.corner_of(root))
            if sends:
                self._send(_part(whole, edges, exchange.theirs) if in_slices else whole, exchange.peer)
            elif sends is not None:
                self._receive(_part(whole, edges, exchange.mine) if in_slices else whole, exchange.peer)
        if in_slices:
            self._double(whole, edges)
        if cube.ward is not None and cube.ward != root:
            self._send(whole, cube.ward)

    def _halve(self, whole: Bytes, edges: Sequence[int], reduction: Reduction) -> None:
        """Leave this rank with the sums of its corner's slice."""
        for exchange in self._cube.halvings:
            mine, theirs = _part(whole, edges, exchange.mine), _part(whole, edges, exchange.theirs)
            self._combine(mine, theirs, exchange.peer, reduction, leads=exchange.leads)

    def _double(self, whole: Bytes, edges: Sequence[int]) -> None:
        """Complete ``whole``, of which each rank has its corner's slice."""
        for exchange in reversed(self._cube.halvings):
            self._swap(_part(whole, edges, exchange.mine), _part(whole, edges, exchange.theirs), exchange)

    def _swap(self, sent: Bytes, received: Bytes, exchange: Exchange) -> None:
        wire, peer = self._wire, exchange.peer
        begun = [wire.receive(piece, peer) for piece in _pieces(received)]
        begun += [wire.send(piece, peer) for piece in _pieces(sent)]
        for each in begun:
            wire.wait(each)

    def _send(self, data: Bytes, peer: int) -> None:
        for begun in [self._wire.send(piece, peer) for piece in _pieces(data)]:
            self._wire.wait(begun)

    def _receive(self, data: Bytes, peer: int) -> None:
        for begun in [self._wire.receive(piece, peer) for piece in _pieces(data)]:
            self._wire.wait(begun)

    def _combine(self, kept: Bytes, given: Bytes | None, peer: int, reduction: Reduction, *, leads: bool) -> None:
        """Combine what a peer sends with ``kept``, piece by piece, while ``given`` goes to it.

        Args:
            given: None if the peer gets nothing. If it is the same memory as ``kept``, that is written only when it has
                been sent.
            leads: own values come first.
        """
        wire, reducer = self._wire, self._leading if leads else self._following
        rooms = self._rooms_for(kept.size)
        incoming = deque[tuple[Any, Bytes]]()
        pieces = _pieces(kept)
        for number, piece in enumerate(pieces[:AHEAD]):
            incoming.append((wire.receive(room := rooms[number, : piece.size], peer), room))
        sends = [wire.send(piece, peer) for piece in _pieces(given)] if given is not None else []
        if given is kept:
            while sends:
                wire.wait(sends.pop())
        for number, piece in enumerate(pieces):
            begun, room = incoming.popleft()
            wire.wait(begun)
            own = _elements(piece, reduction.dtype)
            reducer.fold(partial(_the_other, [_elements(room, reduction.dtype)]), [own], [own], reduction)
            if number + AHEAD < len(pieces):
                room = rooms[number % AHEAD, : pieces[number + AHEAD].size]
                incoming.append((wire.receive(room, peer), room))
        for begun in sends:
            wire.wait(begun)

    def _rooms_for(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory for pieces that are received, in rows; kept for the next time."""
        rows, size = min(AHEAD, -(-nbytes // PIECE)), min(nbytes, PIECE)
        if self._rooms.shape[0] < rows or self._rooms.shape[1] < size:
            self._rooms = np.empty((max(rows, self._rooms.shape[0]), max(size, self._rooms.shape[1])), np.uint8)
        return self._rooms

    def _even_edges(self, buffer: Buffer) -> list[int]:
        """Return the byte at which each corner's slice of a tensor begins, and the end of the last one."""
        corners = self._cube.corners
        return [buffer.count * corner // corners * buffer.dtype.itemsize for corner in range(corners + 1)]

    def _edges(self, nbytes: Sequence[int]) -> list[int]:
        """The same where each rank has a block of its own."""
        begins = list(accumulate(nbytes, initial=0))
        return [begins[self._cube.first_rank(corner)] for corner in range(self._cube.corners + 1)]


def _bytes_of(buffer: Buffer) -> Bytes:
    return buffer.array().view(np.uint8)


def _elements(data: Bytes, dtype: DType) -> npt.NDArray[Any]:
    return data.view(dtype.numpy_dtype)


def _the_other(theirs: Sequence[npt.NDArray[Any]], rank: int) -> Sequence[npt.NDArray[Any]]:
    """Return the other one of two ranks' elements, for ``Reducer``."""
    return theirs


def _part(whole: Bytes, edges: Sequence[int], corners: tuple[int, int]) -> Bytes:
    return whole[edges[corners[0]] : edges[corners[1]]]


def _pieces(data: Bytes) -> list[Bytes]:
    """List what is sent or received in one go: Gloo ends the process if both sides do not mean the same."""
    if data.size <= PIECE:
        return [data] if data.size else []
    return [data[begin : begin + PIECE] for begin in range(0, data.size, PIECE)]
