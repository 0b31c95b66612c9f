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
"""Types that collectives do not compute with, such as a seed's, are sent as integers with the same bits."""


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
    sent = [(f"{label}.{i}", a.view(_AS_SIGNED.get(a.dtype.name, a.dtype))) for i, a in enumerate(arrays)]
    received = frontend.broadcast_all(sent, root_rank, process_set)
    return [each.view(array.dtype) for each, array in zip(received, arrays, strict=True)]
