"""Adasum: a sum of gradients that adapts to their angles (Maleki et al., "Scaling distributed training with adaptive
summation", MLSys 2021).

Two gradients combine to ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: orthogonal ones add, parallel ones average.
More are combined in pairs of neighbours, then in pairs of pairs; if their number is odd, the last waits for the next
round.

Whatever the tree, its result is a linear combination of the ranks' gradients whose coefficients follow from their inner
products alone. So each rank takes a slice of all gradients, the ranks add up their slices' inner products, every rank
computes the same coefficients, and each combines its slice: as many bytes travel as in an ordinary allreduce, for any
number of ranks. A bucket of several tensors is combined tensor by tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._backends import kernels
from hvdgloo._backends.base import Backend, Work
from hvdgloo.types import Buffer, DType, ReduceOp

Floats = npt.NDArray[np.float64]

_SMALLEST = sys.float_info.min
"""A gradient with a smaller squared norm counts as zero: its direction means nothing."""

_CHUNK = 1 << 16


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
    products = inner_products(list(vectors), bounds)
    yield backend.allreduce(Buffer.of_array(products.reshape(-1)), ReduceOp.SUM)
    result = np.empty(own, vectors.dtype)
    combine(list(vectors), bounds, products, result)
    if buffer.dtype is DType.BFLOAT16:
        result = kernels.narrow_bfloat16(result)
    source = Buffer.of_array(result, buffer.dtype)
    yield backend.allgather(source, buffer, [length * itemsize for length in lengths])


def inner_products(vectors: Sequence[npt.NDArray[Any]], bounds: Sequence[int]) -> Floats:
    """Inner products of every pair of equally long vectors, piece by piece.

    Args:
        bounds: ascending positions at which pieces begin, followed by the end of the last one.

    Returns:
        shape (pieces, vectors, vectors).
    """
    size = len(vectors)
    products = np.zeros((len(bounds) - 1, size, size))
    for piece, (begin, end) in enumerate(pairwise(bounds)):
        for start in range(begin, end, _CHUNK):  # float64 copies of a whole gradient would be twice its size
            chunk = np.stack([vector[start : min(start + _CHUNK, end)].astype(np.float64) for vector in vectors])
            products[piece] += chunk @ chunk.T
    return products


def coefficients(products: Floats) -> Floats:
    """Compute the share of each vector in the result.

    Args:
        products: shape (vectors, vectors), the inner products of every pair.

    Returns:
        shape (vectors,).
    """
    nodes = list(np.eye(len(products)))
    while len(nodes) > 1:
        paired = [_combine(a, b, products) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = paired + (nodes[-1:] if len(nodes) % 2 else [])
    return nodes[0]


def combine(
    vectors: Sequence[npt.NDArray[Any]], bounds: Sequence[int], products: Floats, out: npt.NDArray[Any]
) -> None:
    """Write the combination of ``vectors`` to ``out``, each piece by its own inner products."""
    for piece, (begin, end) in enumerate(pairwise(bounds)):
        factors = coefficients(products[piece])
        for start in range(begin, end, _CHUNK):
            part = slice(start, min(start + _CHUNK, end))
            total = np.zeros(part.stop - part.start)
            for factor, vector in zip(factors, vectors, strict=True):
                total += factor * vector[part]
            out[part] = total.astype(out.dtype)


def _combine(a: Floats, b: Floats, products: Floats) -> Floats:
    dot = float(a @ products @ b)
    return _share(a, dot, products) * a + _share(b, dot, products) * b


def _share(node: Floats, dot: float, products: Floats) -> float:
    norm = float(node @ products @ node)
    return 1.0 if norm < _SMALLEST else 1.0 - dot / (2 * norm)
