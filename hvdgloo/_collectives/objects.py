"""Python objects between ranks: pickled, signed, and sent as bytes.

Bytes need no framework, so these functions serve all of them. A pickle can run any code when it is read, and the planes
that carry tensors are not authenticated: each pickle therefore carries an HMAC under the job's secret, which is checked
before the pickle is read. A job of one process has no secret, and sends nothing to other processes.

Lengths travel first. Minus one stands for "this object could not be pickled", so that one rank's mistake is an error on
every rank instead of an endless wait.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.core import Core
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._collectives.spec import broadcasting, gathering
from hvdgloo._platform.machine import has_package
from hvdgloo.errors import HorovodInternalError

if not has_package("cloudpickle"):  # imported with the first object; if it is missing, say so at once
    raise ModuleNotFoundError("No module named 'cloudpickle'", name="cloudpickle")

T = TypeVar("T")

_UNPICKLABLE = -1


def broadcast_object(
    frontend: Core[Any],
    obj: T,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """See ``Frontend.broadcast_object``."""
    operation = broadcasting(root_rank, process_set)
    is_root = frontend.context.rank == root_rank
    label = frontend.automatic_name("broadcast_object", operation.process_set) if name is None else name
    purpose = _purpose(label, root_rank)
    payload, failure = _pack(frontend, obj, purpose) if is_root else (_bytes(0), None)
    length = np.array([payload.size if failure is None else _UNPICKLABLE], dtype=np.int64)
    count = int(frontend.start_array(operation, length, f"{label}.sz")()[0])
    if failure is not None:
        raise failure
    if count == _UNPICKLABLE:
        raise HorovodInternalError(f"rank {root_rank} could not pickle the object {label}; its own error says why")
    received = frontend.start_array(operation, payload if is_root else _bytes(count), f"{label}.t")()
    return obj if is_root else _unpack(frontend, received, purpose)


def allgather_object(
    frontend: Core[Any], obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """See ``Frontend.allgather_object``."""
    gather = gathering(process_set)
    ranks = frontend.context.engine.process_sets[gather.process_set]
    label = frontend.automatic_name("allgather_object", gather.process_set) if name is None else name
    payload, failure = _pack(frontend, obj, _purpose(label, frontend.context.rank))
    count = payload.size if failure is None else _UNPICKLABLE
    counts = frontend.gather_integers([count], gather.process_set, f"{label}.sz")[:, 0]
    if failure is not None:
        raise failure
    unpicklable = np.flatnonzero(counts == _UNPICKLABLE)
    if unpicklable.size:
        rank = ranks[unpicklable[0]]
        raise HorovodInternalError(f"rank {rank} could not pickle the object {label}; its own error says why")
    together = frontend.start_array(gather, payload, f"{label}.t")()
    pieces = np.split(together, np.cumsum(counts)[:-1])
    return [_unpack(frontend, piece, _purpose(label, rank)) for rank, piece in zip(ranks, pieces, strict=True)]


def _purpose(label: str, rank: int) -> str:
    # The rank is signed too, so that no rank's object can pass for another's.
    return f"object {label} of rank {rank}"


def _bytes(count: int) -> npt.NDArray[np.uint8]:
    return np.empty(count, dtype=np.uint8)


def _pack(frontend: Core[Any], obj: object, purpose: str) -> tuple[npt.NDArray[np.uint8], Exception | None]:
    import cloudpickle  # at the first object: most jobs send none until they train, and some none at all

    try:
        pickled = cloudpickle.dumps(obj)
    except Exception as error:  # noqa: BLE001 - user code runs here; the other ranks must hear of any failure
        return _bytes(0), error
    from hvdgloo.rendezvous import seal

    secret = frontend.context.secret
    payload = pickled if secret is None else seal(secret, pickled, purpose)
    return np.frombuffer(bytearray(payload), dtype=np.uint8), None


def _unpack(frontend: Core[Any], received: npt.NDArray[np.uint8], purpose: str) -> Any:
    import cloudpickle

    from hvdgloo.rendezvous import unseal

    secret = frontend.context.secret
    payload = received.tobytes()
    return cloudpickle.loads(payload if secret is None else unseal(secret, payload, purpose))
