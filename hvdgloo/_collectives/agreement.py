"""A few integers on which all ranks agree, whatever their framework."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.process_sets import global_process_set
from hvdgloo._collectives.spec import reduction
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.submission import PersistentRequest
from hvdgloo._job.context import Context
from hvdgloo._platform import interrupts
from hvdgloo.types import Buffer, ReduceOp

_registered: weakref.WeakKeyDictionary[Context, dict[tuple[str, int], PersistentRequest]] = weakref.WeakKeyDictionary()

_asked: weakref.WeakKeyDictionary[Context, dict[str, tuple[Handle, npt.NDArray[np.int64]]]] = (
    weakref.WeakKeyDictionary()
)
"""The agreements under way, by their operations' names. The others have this rank's values."""


def highest(context: Context, label: str, values: Sequence[int]) -> list[int]:
    """The highest value of any rank, for each of a few integers; collective.

    Args:
        label: what matches the ranks' calls.
        values: each fits 64 bits; the same number of them on every rank.

    Raises:
        HorovodInternalError: a rank was lost, or shut down.
    """
    array = np.array(values, dtype=np.int64)
    if context.size == 1:
        return [int(value) for value in array]
    buffer = Buffer.of_array(array)
    known = _registered.setdefault(context, {})
    persistent = known.get((label, len(values)))
    if persistent is None:
        operation = reduction(None, ReduceOp.MAX, 1.0, 1.0, global_process_set)
        persistent = PersistentRequest(operation.request(f"allreduce.{label}", (buffer.spec,)))
        known[label, len(values)] = persistent
    asked = _asked.setdefault(context, {})
    if persistent.request.name not in asked:  # or waiting for the answer was interrupted
        handle = Handle(persistent.request.name)
        held = interrupts.hold()
        try:
            context.engine.launch(persistent, handle, [buffer], [buffer], waits=True)
            asked[handle.name] = handle, array
        finally:
            interrupts.release(held)
    handle, array = asked[persistent.request.name]
    try:
        handle.wait()
    except Exception:
        del asked[handle.name]
        raise
    del asked[handle.name]
    return [int(value) for value in array]
