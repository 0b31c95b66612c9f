"""The way of each collective over a data plane: a bucket of tensors becomes a transfer, and that their results.

``begin`` and ``deliver`` are the data thread's. What belongs to one collective stands in a function of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdgloo._backends.base import Done, Plane, Scattered, Work
from hvdgloo._backends.codec import Values, encoded_size
from hvdgloo._engine.adasum import adaptive_sum
from hvdgloo._engine.conventions import divide_rows
from hvdgloo._engine.fusion import Bucket
from hvdgloo._engine.messages import Request, Response
from hvdgloo._engine.planes import Group
from hvdgloo._engine.submission import Submission
from hvdgloo._observe.counters import AGREEMENT, Counters, Traffic
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec, WireFormat

Batch = Sequence[tuple[Response, Submission]]


class Phases:
    """The Work of a collective that takes several calls of the data plane: of a generator that yields the Work of each
    call, and is resumed when that has completed.

    Meanwhile nothing else may be under way on the group, since ranks would begin it at different moments; the executor
    ensures this.
    """

    def __init__(self, steps: Iterator[Work]) -> None:
        self._steps = steps
        self._current: Work | None = next(steps, None)

    def completes_within(self, timeout: float) -> bool:
        """As in ``Work``; the timeout, in seconds, applies to each call."""
        while self._current is not None:
            if not self._current.completes_within(timeout):
                return False
            self._current = next(self._steps, None)
        return True


@dataclass(slots=True, eq=False)
class Transfer:
    """A bucket on its way over a plane.

    Attributes:
        block_bytes: the least size of a new block for packed tensors.
        buffer: memory that the plane works on; None if there is nothing.
        nbytes: its size.
        packed: the results are in ``buffer``, not yet in their places.
        in_order: a GPU's stream does the rest, and keeps the order with what it is given later.
        ready: on a GPU, the place where its tensors are ready to be read; the program may have given the GPU much to do
            before. None from then on.
        deadline: when it counts as lost; it does not before it is ready.
        begun: when a stream was given all of it.
        counted: it does not keep later buckets waiting any more.
        times: begun, fenced, sent; only while there is a timeline.
        traffic: where its tensors are counted, if anywhere.
        started, fenced, sent: when it was taken from the queue, when its tensors could be read, and when the plane had
            been given it; where it is counted.
    """

    bucket: Bucket
    batch: Batch
    group: Group
    plane: Plane
    block_bytes: int
    work: Work = Done()  # noqa: RUF009 - it has no state
    buffer: Buffer | None = None
    nbytes: int = 0
    packed: bool = False
    delivered: bool = False
    in_order: bool = False
    ready: Work | None = None
    deadline: float = math.inf
    begun: float = math.inf
    counted: bool = False
    times: Sequence[float] = ()
    traffic: Traffic | None = None
    started: float = 0.0
    fenced: float = 0.0
    sent: float = 0.0

    def __str__(self) -> str:
        """The bucket as it appears in messages: ``allreduce of 12 tensors (first: allreduce.fc.weight)``."""
        parts = self.bucket.parts
        first = self.batch[parts[0].operation][1].request.name
        tensors = f"{len(parts)} tensors (first: {first})" if len(parts) > 1 else first
        return f"{self.bucket.collective.value} of {tensors}"

    @property
    def inputs(self) -> list[Buffer]:
        """This rank's tensors, in order."""
        return [self.batch[part.operation][1].inputs[part.tensor] for part in self.bucket.parts]

    @property
    def outputs(self) -> list[Buffer]:
        """The places of the results, in order."""
        return [self.batch[part.operation][1].outputs[part.tensor] for part in self.bucket.parts]

    @property
    def is_held(self) -> bool:
        """True if the plane can work on the tensors where they are."""
        holds, batch = self.plane.memory.holds, self.batch
        return all(
            holds(batch[part.operation][1].inputs[part.tensor]) and holds(batch[part.operation][1].outputs[part.tensor])
            for part in self.bucket.parts
        )

    def count_departure(self, counters: Counters, started: float, fenced: float) -> None:
        """The bucket is on its way, and will be counted when it has arrived."""
        part = self.bucket.parts[0]
        plane = self.plane.label if part.tensor >= 0 else AGREEMENT
        key = plane, self.batch[part.operation][0].request.process_set
        traffic = self.traffic = counters.traffic.get(key) or counters.carried(*key)
        traffic.begun(fenced)
        self.started, self.fenced = started, fenced

    def count_arrival(self, counters: Counters, traffic: Traffic, done: float) -> None:
        """The bucket arrived at ``done``, and its results are in their places."""
        parts = self.bucket.parts
        tensors = len(parts)
        ordered = self.batch[parts[0].operation][1].handle.ordered
        if ordered:
            counters.queue += (self.started - ordered) * tensors
        counters.data += (self.fenced - self.started) * tensors
        if self.packed and not self.in_order:
            counters.copy += (self.sent - self.fenced + time.monotonic() - done) * tensors
            counters.wire += (done - self.sent) * tensors
        else:
            counters.wire += (done - self.fenced) * tensors
        nbytes = self.bucket.nbytes
        if self.bucket.collective is Collective.ALLGATHER:  # those are the bytes of all ranks
            nbytes = sum([source.nbytes for source in self.inputs])
        traffic.ended(done, tensors, nbytes, self._count_crossing(traffic, nbytes))

    def _count_crossing(self, traffic: Traffic, nbytes: int) -> int:
        """Return the size of these tensors in the form in which they crossed between hosts; 0 if they did not."""
        encoding, part = self.plane.encoding, self.bucket.parts[0]
        if encoding is None:
            return nbytes if self.plane.encodes_not else 0
        request = self.batch[part.operation][0].request
        if request.wire is WireFormat.FULL:
            return nbytes
        dtype = request.tensors[part.tensor].dtype
        form = request.form(dtype)
        if form is WireFormat.FULL:
            return nbytes
        traffic.form, traffic.rounding = form.value, encoding.rounding
        return encoded_size(form, nbytes // dtype.itemsize)

    def residual(self, buffer: Buffer) -> Values | None:
        """Return what encoding has left out of the bucket so far, if that is kept; see ``Residual.beside``.

        Args:
            buffer: with the bucket's tensors; what was left out in other buckets is added to it.
        """
        first, size = self.bucket.parts[0], buffer.dtype.itemsize
        response, submission = self.batch[first.operation]
        residual = submission.persistent.residual
        if residual is None or response.request.form(buffer.dtype) is not WireFormat.INT4_FEEDBACK:
            return None
        return residual.beside(buffer, [(part.tensor, part.nbytes // size) for part in self.bucket.parts])

    def stage(self, nbytes: int, like: TensorSpec) -> Buffer:
        """Take room for packed tensors in the plane's memory."""
        return self.group.stage(self.plane, nbytes, like, self.block_bytes)

    def place(self) -> Buffer:
        """Return the output of the only tensor, filled with the input: backends work in place."""
        (source,), (output,) = self.inputs, self.outputs
        if source.address != output.address and output.nbytes:
            self.plane.memory.pack(output, [source])
        return output


def begin(transfer: Transfer) -> None:
    """Give a bucket to its plane. Where agreement was all it took (a barrier), it has ended then."""
    collective = transfer.bucket.collective
    if collective.has_tensors:
        _BEGIN[collective](transfer)
        if transfer.buffer is not None:
            transfer.nbytes = transfer.buffer.nbytes


def deliver(transfer: Transfer) -> None:
    """Scale a bucket's results and put them in their places. Idempotent."""
    buffer = transfer.buffer
    if transfer.delivered or buffer is None or not buffer.nbytes:
        return
    transfer.delivered = True
    collective = transfer.bucket.collective
    if collective.reduces:
        request = transfer.batch[transfer.bucket.parts[0].operation][0].request
        factor = request.factor_after(len(transfer.group.ranks))
        if factor != 1.0:
            transfer.plane.backend.scale(buffer, factor)
    if transfer.packed:
        pieces = _gathered_pieces(transfer) if collective is Collective.ALLGATHER else _pieces(transfer)
        transfer.plane.memory.unpack(buffer, pieces)


def _allreduce(transfer: Transfer) -> None:
    bucket, plane, group = transfer.bucket, transfer.plane, transfer.group
    first = bucket.parts[0]
    request = transfer.batch[first.operation][0].request
    is_held, is_adasum = transfer.is_held, request.op is ReduceOp.ADASUM
    if is_held and plane.scattered is not None and not is_adasum:
        _scattered_allreduce(transfer, plane.scattered)
        return
    transfer.packed = len(bucket.parts) > 1 or not is_held
    if transfer.packed:
        buffer = transfer.stage(bucket.nbytes, request.tensors[first.tensor])
        plane.memory.pack(buffer, transfer.inputs)
    else:
        buffer = transfer.place()
    transfer.buffer = buffer
    if buffer.nbytes:
        if request.prescale != 1.0:
            plane.backend.scale(buffer, request.prescale)
        if is_adasum:
            counts = [part.nbytes // buffer.dtype.itemsize for part in bucket.parts]
            transfer.work = Phases(adaptive_sum(plane.backend, buffer, counts, group.rank, len(group.ranks)))
        else:
            transfer.work = _reduce(plane, buffer, request, transfer.residual(buffer))


def _reduce(plane: Plane, buffer: Buffer, request: Request, residual: Values | None = None) -> Work:
    """Reduce a buffer, encoded where it crosses to other hosts if that was agreed upon.

    Args:
        residual: see ``Encoding.allreduce_encoded``.

    Raises:
        BackendError: the plane crosses to other hosts and cannot encode.
    """
    form = request.form(buffer.dtype)
    if form is WireFormat.FULL:
        return plane.backend.allreduce(buffer, request.combining)
    if plane.encodes_not:
        raise BackendError(f"{request.name} cannot cross between hosts as {form}: {plane.encodes_not}")
    if plane.encoding is None:
        return plane.backend.allreduce(buffer, request.combining)  # nothing crosses
    return plane.encoding.allreduce_encoded(buffer, form, residual)


def _scattered_allreduce(transfer: Transfer, backend: Scattered) -> None:
    """Nothing is packed, copied or scaled here: the data plane does all of it."""
    request = transfer.batch[transfer.bucket.parts[0].operation][0].request
    factor = request.factor_after(len(transfer.group.ranks))
    transfer.work = backend.allreduce_several(
        transfer.inputs, transfer.outputs, request.combining, request.prescale, factor
    )
    transfer.nbytes = transfer.bucket.nbytes


def _reducescatter(transfer: Transfer) -> None:
    plane = transfer.plane
    request = transfer.batch[transfer.bucket.parts[0].operation][0].request
    (source,), (target,) = transfer.inputs, transfer.outputs
    packed = transfer.packed = not transfer.is_held
    if source.nbytes:
        rows = divide_rows(source.shape[0], len(transfer.group.ranks))
        row = source.nbytes // source.shape[0]
        if packed or request.prescale != 1.0:
            own = target.nbytes if packed else 0
            staged = transfer.stage(own + source.nbytes, source.spec)
            if packed:
                target = staged.part(0, own)
            whole = staged.part(own, source.nbytes)
            plane.memory.pack(whole, [source])
            source = whole
        if request.prescale != 1.0:
            plane.backend.scale(source, request.prescale)
        transfer.work = plane.backend.reducescatter(source, target, [n * row for n in rows], request.combining)
    transfer.buffer = target


def _broadcast(transfer: Transfer) -> None:
    bucket, plane, group = transfer.bucket, transfer.plane, transfer.group
    root = group.ranks.index(transfer.batch[bucket.parts[0].operation][0].request.root)
    transfer.packed = len(bucket.parts) > 1 or not transfer.is_held
    if transfer.packed:
        buffer = transfer.stage(bucket.nbytes, TensorSpec(DType.UINT8, ()))
        if group.rank == root:
            plane.memory.pack(buffer, transfer.inputs)
    else:
        buffer = transfer.place()
    transfer.buffer = buffer
    if buffer.nbytes:
        transfer.work = plane.backend.broadcast(buffer, root)


def _allgather(transfer: Transfer) -> None:
    bucket, plane = transfer.bucket, transfer.plane
    sizes = []
    for part in bucket.parts:
        response, operation = transfer.batch[part.operation]
        operation.outputs[part.tensor] = operation.allocated(part.tensor, sum(response.rows[part.tensor]))
        sizes.append(_block_sizes(response, part.tensor))
    totals = [sum(column) for column in zip(*sizes, strict=True)]
    transfer.packed = len(bucket.parts) > 1 or not transfer.is_held
    target = None if transfer.packed else transfer.outputs[0]
    if sum(totals):
        if target is None:
            own = totals[transfer.group.rank]
            staged = transfer.stage(own + sum(totals), TensorSpec(DType.UINT8, ()))
            source, target = staged.part(0, own), staged.part(own, sum(totals))
            plane.memory.pack(source, transfer.inputs)
        else:
            (source,) = transfer.inputs
        transfer.work = plane.backend.allgather(source, target, totals)
    transfer.buffer = target


def _alltoall(transfer: Transfer) -> None:
    operation = transfer.batch[transfer.bucket.parts[0].operation][1]
    transfer.buffer = operation.inputs[0]
    transfer.work = Phases(_exchanges(transfer.group, transfer.plane, operation))


def _exchanges(group: Group, plane: Plane, operation: Submission) -> Iterator[Work]:
    """Exchange the numbers of rows, then the rows: the numbers may differ in every step, and only pairs of ranks need
    them.

    The operation's outputs become the received rows and how many came from each rank (int64).
    """
    size = len(group.ranks)
    source = operation.inputs[0]
    sent = np.asarray(operation.splits, np.int64)
    received = np.empty(size, np.int64)
    yield group.host.backend.alltoall(Buffer.of_array(sent), Buffer.of_array(received), [8] * size, [8] * size)
    output = operation.allocated(0, int(received.sum()))
    operation.outputs = [output, Buffer.of_array(received)]
    row = math.prod(source.shape[1:]) * source.dtype.itemsize
    memory, target = plane.memory, output
    if not memory.holds(source):
        staged = memory.empty(source.nbytes)
        memory.pack(staged, [source])
        source = staged
    if not memory.holds(output):
        target = memory.empty(output.nbytes)
    yield plane.backend.alltoall(source, target, [int(n) * row for n in sent], [int(n) * row for n in received])
    if target is not output:
        memory.unpack(target, [(output, 0, output.nbytes)])
        yield memory.mark()


_BEGIN: Mapping[Collective, Callable[[Transfer], None]] = {
    Collective.ALLREDUCE: _allreduce,
    Collective.ALLGATHER: _allgather,
    Collective.BROADCAST: _broadcast,
    Collective.ALLTOALL: _alltoall,
    Collective.REDUCESCATTER: _reducescatter,
}


def _block_sizes(response: Response, tensor: int) -> list[int]:
    """Bytes that each rank contributes to the gathered tensor."""
    rows = response.rows[tensor]
    total = sum(rows)
    row_bytes = response.sizes[tensor] // total if total else 0
    return [row_bytes * count for count in rows]


def _pieces(transfer: Transfer) -> Iterator[tuple[Buffer, int, int]]:
    """Yield the places of a bucket's results, one after another."""
    for output in transfer.outputs:
        yield output, 0, output.nbytes


def _gathered_pieces(transfer: Transfer) -> Iterator[tuple[Buffer, int, int]]:
    """Yield the places of gathered tensors: they arrive rank by rank, all tensors of a rank one after another."""
    parts = transfer.bucket.parts
    sizes = [_block_sizes(transfer.batch[part.operation][0], part.tensor) for part in parts]
    targets = transfer.outputs
    at = [0] * len(parts)
    for rank in range(len(transfer.group.ranks)):
        for index, blocks in enumerate(sizes):
            yield targets[index], at[index], blocks[rank]
            at[index] += blocks[rank]
