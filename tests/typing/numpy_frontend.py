"""The numpy front-end as users call it; mypy must accept it, and see the types that it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import hvdgloo.numpy as hvd


def collectives(array: npt.NDArray[Any]) -> None:
    hvd.init()
    assert_type(hvd.local_rank(), int)
    assert_type(hvd.allreduce(array, op=hvd.Sum), npt.NDArray[Any])
    assert_type(hvd.allreduce(np.ones(3, np.float32), compression=hvd.Compression.fp16), npt.NDArray[Any])
    assert_type(hvd.grouped_allreduce_([array], op=hvd.Min), list[npt.NDArray[Any]])
    assert_type(hvd.allgather(array), npt.NDArray[Any])
    assert_type(hvd.broadcast_(array, 0), npt.NDArray[Any])
    hvd.synchronize(hvd.allgather_async(array, name="rows"))
    assert_type(hvd.broadcast_object("text"), str)
    hvd.shutdown()
