"""Collectives that take several calls of the data plane, each as one Work.

Such a collective is a generator: it yields the Work of each call, and is resumed when that has completed. Meanwhile
nothing else may be under way on the group, since ranks would begin it at different moments; the executor ensures this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hvdgloo._backends import kernels
from hvdgloo._backends.base import Backend, Plane, Work
from hvdgloo._engine import adasum
from hvdgloo._engine.submission import Submission
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer, DType, ReduceOp, TensorSpec


class Phases:
    """The Work of a generator that yields Works."""

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


def exchange(host: Backend, plane: Plane, operation: Submission, size: int) -> Iterator[Work]:
    """An alltoall. The numbers of rows travel first: they may differ in every step, and only pairs of ranks need them.

    The operation's outputs become the received rows and how many came from each rank (int64).

    Args:
        host: the plane for these numbers.
        plane: the one for the rows.
    """
    source = operation.inputs[0]
    spec = source.spec
    sent = np.asarray(operation.splits, np.int64)
    received = np.empty(size, np.int64)
    yield host.alltoall(Buffer.of_array(sent), Buffer.of_array(received), [8] * size, [8] * size)
    if operation.allocate is None:
        raise BackendError(f"{operation.request.name} was submitted without a way to allocate its result")
    output = operation.allocate(0, TensorSpec(spec.dtype, (int(received.sum()), *spec.shape[1:]), spec.device))
    operation.outputs = [output, Buffer.of_array(received)]
    row = math.prod(spec.shape[1:]) * spec.dtype.itemsize
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


def adaptive_sum(backend: Backend, buffer: Buffer, counts: Sequence[int], rank: int, size: int) -> Iterator[Work]:
    """Adasum in place.

    Args:
        buffer: one or several tensors, one after another.
        counts: their numbers of elements.
    """
    if size == 1:
        return
    itemsize = buffer.dtype.itemsize
    cuts = [buffer.count * index // size for index in range(size + 1)]
    lengths = [end - begin for begin, end in pairwise(cuts)]
    own = lengths[rank]
    slices = np.empty((size, own), buffer.dtype.numpy_dtype)
    flat = Buffer.of_array(slices.reshape(-1), buffer.dtype)
    yield backend.alltoall(buffer, flat, [length * itemsize for length in lengths], [own * itemsize] * size)
    vectors = kernels.widen_bfloat16(slices) if buffer.dtype is DType.BFLOAT16 else slices
    edges = np.clip(np.cumsum([0, *counts]) - cuts[rank], 0, own)
    bounds = [int(edge) for edge in edges]
    products = adasum.inner_products(list(vectors), bounds)
    yield backend.allreduce(Buffer.of_array(products.reshape(-1)), ReduceOp.SUM)
    result = np.empty(own, vectors.dtype)
    adasum.combine(list(vectors), bounds, products, result)
    if buffer.dtype is DType.BFLOAT16:
        result = kernels.narrow_bfloat16(result)
    source = Buffer.of_array(result, buffer.dtype)
    yield backend.allgather(source, buffer, [length * itemsize for length in lengths])
