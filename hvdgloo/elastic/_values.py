"""Plain values of a state: copies that later changes do not reach, and digests by which ranks compare them."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdgloo.errors import InvalidArgumentError

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None))


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of attributes, in which objects that two of them share are shared again.

    Raises:
        InvalidArgumentError: (a ValueError) one of them can be neither copied nor pickled, so it could not be sent to
            other workers, either.
    """
    if all(type(value) in _IMMUTABLE for value in values.values()):
        return dict(values)
    try:
        return copy.deepcopy(dict(values))
    except Exception:  # noqa: BLE001 - whatever a value's class raises: the next line says which it is
        return {name: _copied(name, value) for name, value in values.items()}


def _copied(name: str, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - as above
        from hvdgloo._platform.pickling import dumps  # a tensor in the midst of a graph can be pickled and not copied

        try:
            return pickle.loads(dumps(value))  # noqa: S301 - made here
        except Exception as error:
            raise InvalidArgumentError(
                f"the state's attribute {name!r} is a {type(value).__name__}, which can be neither copied nor pickled "
                f"({error}); keep it outside of the state"
            ) from error


def digest(values: Any) -> str:
    """Return a text that is the same for equal values, in every process.

    Values that are equal may have different texts (a set's order differs from process to process), but not vice versa.
    """
    import hashlib  # and OpenSSL, which programs that are not elastic do not need when they import hvdgloo

    hashed = hashlib.sha256()
    _hash(values, hashed.update)
    return hashed.hexdigest()[:32]


def _hash(value: Any, update: Any) -> None:
    kind = type(value)
    if kind in _IMMUTABLE:
        update(f"{kind.__name__} {value!r};".encode())
    elif kind in (list, tuple):
        update(f"{kind.__name__} {len(value)};".encode())
        for each in value:
            _hash(each, update)
    elif kind is dict:
        update(f"dict {len(value)};".encode())
        for key, each in value.items():
            _hash(key, update)
            _hash(each, update)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"array {value.dtype.str} {value.shape};".encode())
        update(np.ascontiguousarray(value).tobytes())
    else:
        import cloudpickle

        try:
            update(cloudpickle.dumps(value))
        except Exception:  # noqa: BLE001 - equal to nothing; the value's own error comes when it is sent
            update(os.urandom(16))
