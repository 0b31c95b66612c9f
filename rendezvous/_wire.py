"""How several keys or values are packed into one body. Pure.

Values are bytes and stay bytes: lengths first, then everything in sequence. Keys are JSON. A reader trusts no length:
all are checked against what actually arrived.

* keys: a JSON list of strings.
* values: ``count`` as 4 bytes, ``count`` lengths of 8 bytes each (big-endian), then the values.
* items: the length of the keys' JSON as 4 bytes, the keys, the values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

MAX_COUNT = 1 << 20


def pack_keys(keys: Sequence[str]) -> bytes:
    return json.dumps(list(keys), separators=(",", ":")).encode()


def unpack_keys(body: bytes) -> list[str]:
    """The keys in a body.

    Raises:
        ValueError: the body is not a list of keys; the text says why.
    """
    try:
        keys = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("the keys are not a JSON list of texts")
    if len(keys) > MAX_COUNT:
        raise ValueError(f"{len(keys)} keys, but at most {MAX_COUNT} fit into one request")
    return keys


def pack_values(values: Sequence[bytes]) -> bytes:
    count = len(values)
    return b"".join((struct.pack(f">I{count}Q", count, *map(len, values)), *values))


def unpack_values(body: bytes, offset: int = 0) -> list[bytes]:
    """The values in a body, from ``offset``.

    Raises:
        ValueError: the lengths and the body do not fit together.
    """
    if len(body) < offset + 4:
        raise ValueError("the body ends before the number of values")
    (count,) = struct.unpack_from(">I", body, offset)
    start = offset + 4 + 8 * count
    if count > MAX_COUNT or len(body) < start:
        raise ValueError(f"the body ends before the lengths of its {count} values")
    lengths = struct.unpack_from(f">{count}Q", body, offset + 4)
    if start + sum(lengths) != len(body):
        raise ValueError(f"the values should have {sum(lengths)} bytes, the body has {len(body) - start}")
    values = []
    for length in lengths:
        values.append(body[start : start + length])
        start += length
    return values


def pack_items(items: Mapping[str, bytes]) -> bytes:
    keys = pack_keys(list(items))
    return b"".join((struct.pack(">I", len(keys)), keys, pack_values(list(items.values()))))


def unpack_items(body: bytes) -> dict[str, bytes]:
    """The items in a body.

    Raises:
        ValueError: the body is not what ``pack_items`` makes, or names a key twice.
    """
    if len(body) < 4:
        raise ValueError("the body ends before the length of the keys")
    (length,) = struct.unpack_from(">I", body, 0)
    if length > len(body) - 4:
        raise ValueError("the body ends before the keys do")
    keys, values = unpack_keys(body[4 : 4 + length]), unpack_values(body, 4 + length)
    items = dict(zip(keys, values, strict=False))
    if not len(keys) == len(values) == len(items):
        raise ValueError(f"{len(keys)} keys, {len(set(keys))} of them different, for {len(values)} values")
    return items
