"""The assignment of rows to ranks and batches: arithmetic on the row counts of row groups, without reading any file.

The rows of all row groups, in the epoch's order of row groups, form one line. Each rank reads an even part of it, so
only the row groups at a rank's two ends are divided, and any number of row groups will do. Since the parts' lengths
depend only on the number of rows, a rank reads equally many rows in every epoch, and all ranks take equally many steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvdgloo.errors import DataError


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` (not included) of the row group with index ``group``."""

    group: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def bounds(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return the begin and end of this rank's part of the line of ``total`` rows."""
    return rank * total // size, (rank + 1) * total // size


def order_of_groups(groups: int, seed: int, epoch: int, *, shuffle: bool) -> NDArray[np.int64]:
    """Return the indices of all row groups in this epoch's order, which is the same on all ranks."""
    if not shuffle:
        return np.arange(groups)
    return np.random.default_rng([seed, epoch]).permutation(groups)


def pieces(rows: NDArray[np.int64], order: NDArray[np.int64], rank: int, size: int) -> list[Piece]:
    """Return this rank's part of the line.

    Args:
        rows: number of rows of each row group; may be 0.
        order: indices of row groups, in the order of the line.
    """
    ends = np.cumsum(rows[order])
    low, high = bounds(int(rows.sum()), rank, size)
    found: list[Piece] = []
    if low == high:
        return found
    # From the row group that contains the part's begin to the one that contains its end.
    for position in range(int(np.searchsorted(ends, low, side="right")), len(order)):
        group = int(order[position])
        begin = int(ends[position]) - int(rows[group])
        if begin >= high:
            break
        if rows[group]:
            found.append(Piece(group, max(low - begin, 0), min(high - begin, int(rows[group]))))
    return found


_ENOUGH = 2
"""The fewest rows over which a batch can be normalized."""


def steps(total: int, size: int, batch_size: int) -> int:
    """Return the number of batches in one pass over the data, which is the same on every rank."""
    if batch_size == 1:
        # A rank with one row fewer would have none for a further batch; the others take two rows in their last one.
        return total // size
    longest = -(-total // size)
    return -(-longest // batch_size)


def batch_sizes(total: int, rank: int, size: int, batch_size: int) -> list[int]:
    """Return the rows of each batch in one pass on this rank: full batches, and a short one at the end, none empty.

    If the last batch would have fewer than two rows, the batches before it give up a row or two each, so that it has
    two, since layers that normalize over a batch refuse a single row. If that is impossible, it has one.

    Raises:
        DataError: there are fewer rows than ranks.
    """
    if total < size:
        raise DataError(f"{total} rows cannot be divided among {size} ranks: each needs at least one")
    low, high = bounds(total, rank, size)
    count = steps(total, size, batch_size)
    sizes = [batch_size] * (count - 1)
    last = high - low - sum(sizes)
    if batch_size > _ENOUGH:
        for index in reversed(range(len(sizes))):
            if last >= _ENOUGH:
                break
            given = min(_ENOUGH - last, batch_size - _ENOUGH)
            sizes[index] -= given
            last += given
    if last == 0:
        sizes[-1] -= 1
        last = 1
    return [*sizes, last]


def windows(sizes: Sequence[int], rows: int) -> list[list[int]]:
    """Divide a pass into windows of whole batches: up to ``rows`` rows in each, and at least one batch."""
    divided: list[list[int]] = []
    held = 0
    for size in sizes:
        if not divided or held + size > rows:
            divided.append([])
            held = 0
        divided[-1].append(size)
        held += size
    return divided
