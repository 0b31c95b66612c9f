"""Values that all ranks must start from, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set

Array = npt.NDArray[Any]

_AS_SIGNED = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}
"""Types of no arithmetic of ours, such as a seed's, travel as the bits that they are."""


def broadcast_arrays(
    frontend: Frontend[Any],
    arrays: Sequence[Array],
    root_rank: int,
    label: str,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """One rank's arrays, on all; all are under way before the first is waited for.

    Args:
        frontend: one that takes arrays.
        arrays: on every rank of the same shapes and types; none is written.
        root_rank: global rank of the source.
        label: what the names begin with that match the ranks' calls.
        process_set: the ranks that take part.

    Returns:
        new arrays.

    Raises:
        HorovodInternalError: a broadcast failed.
    """
    sent = [(f"{label}.{i}", a.view(_AS_SIGNED.get(a.dtype.name, a.dtype))) for i, a in enumerate(arrays)]
    received = frontend.broadcast_all(sent, root_rank, process_set)
    return [each.view(array.dtype) for each, array in zip(received, arrays, strict=True)]
