"""Values that all ranks must start from, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set

Array = npt.NDArray[Any]


def broadcast_arrays(
    frontend: Frontend[Any],
    arrays: Sequence[Array],
    root_rank: int,
    label: str,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """One rank's arrays, on all ranks; all are under way before the first is waited for.

    Args:
        frontend: a Frontend whose tensors are arrays.
        arrays: of the same shapes and types on every rank; none is written.
        root_rank: global rank of the source.
        label: the prefix of the names that match the ranks' calls.
        process_set: the ranks that take part.

    Returns:
        new arrays.

    Raises:
        HorovodInternalError: a broadcast failed.
    """
    return frontend.broadcast_all([(f"{label}.{i}", a) for i, a in enumerate(arrays)], root_rank, process_set)
