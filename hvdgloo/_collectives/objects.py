"""Python objects between ranks: pickled, signed, and sent as bytes.

Bytes need no framework, so these functions serve all of them. A pickle can run any code when it is read, and the planes
that carry tensors are not authenticated: each pickle therefore carries an HMAC under the job's secret, which is checked
before the pickle is read. It covers what the pickle is for, too: which object of which rank in which call, so that a
recorded one is not taken for the proof of a later call of the same name. A job of one process has no secret, and sends
nothing to other processes.

Lengths travel first: the place of that operation in the job's order is what tells one call from another. A length of
minus one stands for "this object could not be pickled", so that one rank's mistake is an error on
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
    is_root = frontend.context.is_root(root_rank)
    label = frontend.automatic_name("broadcast_object", operation.process_set) if name is None else name
    pickled, failure = _pickle(obj) if is_root else (b"", None)
    lengths, call = frontend.numbered_array(operation, _length(frontend, pickled, failure), f"{label}.sz")
    count = int(lengths[0])
    if failure is not None:
        raise failure
    if count == _UNPICKLABLE:
        raise HorovodInternalError(f"rank {root_rank} could not pickle the object {label}; its own error says why")
    purpose = _purpose(frontend, label, root_rank, call)
    payload = _seal(frontend, pickled, purpose) if is_root else np.empty(count, dtype=np.uint8)
    received = frontend.start_array(operation, payload, f"{label}.t")()
    return obj if is_root else _unpack(frontend, received, purpose)


def allgather_object(
    frontend: Core[Any], obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """See ``Frontend.allgather_object``."""
    gather = gathering(process_set)
    ranks = frontend.context.engine.process_sets[gather.process_set]
    label = frontend.automatic_name("allgather_object", gather.process_set) if name is None else name
    pickled, failure = _pickle(obj)
    counts, call = frontend.numbered_array(gather, _length(frontend, pickled, failure), f"{label}.sz")
    if failure is not None:
        raise failure
    unpicklable = np.flatnonzero(counts == _UNPICKLABLE)
    if unpicklable.size:
        rank = ranks[unpicklable[0]]
        raise HorovodInternalError(f"rank {rank} could not pickle the object {label}; its own error says why")
    own = _seal(frontend, pickled, _purpose(frontend, label, frontend.context.engine.rank, call))
    together = frontend.start_array(gather, own, f"{label}.t")()
    pieces = np.split(together, np.cumsum(counts)[:-1])
    return [
        _unpack(frontend, piece, _purpose(frontend, label, rank, call))
        for rank, piece in zip(ranks, pieces, strict=True)
    ]


def _purpose(frontend: Core[Any], label: str, rank: int, call: int) -> str:
    # The rank is signed too, so that no rank's object can pass for another's; and the world and the call in it, so that
    # what was heard of an earlier one is of no use.
    return f"object {label} of rank {rank}, operation {call} of world {frontend.context.world}"


def _pickle(obj: object) -> tuple[bytes, Exception | None]:
    """An object's pickle, or why there is none."""
    # At the first object: most jobs send none until they train, and some none at all.
    from hvdgloo._platform.pickling import dumps

    try:
        return dumps(obj), None
    except Exception as error:  # noqa: BLE001 - user code runs here; the other ranks must hear of any failure
        return b"", error


def _length(frontend: Core[Any], pickled: bytes, failure: Exception | None) -> npt.NDArray[np.int64]:
    """Bytes of what will be sent, in an array."""
    from hvdgloo.rendezvous import SEAL_BYTES

    seal_bytes = 0 if frontend.context.secret is None else SEAL_BYTES
    return np.array([len(pickled) + seal_bytes if failure is None else _UNPICKLABLE], dtype=np.int64)


def _seal(frontend: Core[Any], pickled: bytes, purpose: str) -> npt.NDArray[np.uint8]:
    from hvdgloo.rendezvous import seal

    secret = frontend.context.secret
    payload = pickled if secret is None else seal(secret, pickled, purpose)
    return np.frombuffer(bytearray(payload), dtype=np.uint8)


def _unpack(frontend: Core[Any], received: npt.NDArray[np.uint8], purpose: str) -> Any:
    import cloudpickle

    from hvdgloo.rendezvous import unseal

    secret = frontend.context.secret
    payload = received.tobytes()
    return cloudpickle.loads(payload if secret is None else unseal(secret, payload, purpose))
