"""How several keys or values travel in one body, in msgpack as all that processes say to each other. Pure.

Values are bytes and stay bytes. A reader trusts no length: the codec checks all against what really arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from hvdgloo._net.codec import Codec

MAX_COUNT = 1 << 20
"""Keys or values in one request."""

_MOST = msgspec.Meta(max_length=MAX_COUNT)
_KEYS: Codec[list[str]] = Codec(Annotated[list[str], _MOST], "body with keys")
_VALUES: Codec[list[bytes]] = Codec(Annotated[list[bytes], _MOST], "body with values")
_ITEMS: Codec[list[tuple[str, bytes]]] = Codec(Annotated[list[tuple[str, bytes]], _MOST], "body with items")


def pack_keys(keys: Sequence[str]) -> bytes:
    return _KEYS.encode(list(keys))


def unpack_keys(body: bytes) -> list[str]:
    """The keys in a body.

    Raises:
        ValueError: the body is not a list of keys; the text says why.
    """
    return _KEYS.decode(body)


def pack_values(values: Sequence[bytes]) -> bytes:
    return _VALUES.encode(list(values))


def unpack_values(body: bytes) -> list[bytes]:
    """
    Raises:
        ValueError: the body is something else; the text says what.
    """
    return _VALUES.decode(body)


def pack_items(items: Mapping[str, bytes]) -> bytes:
    return _ITEMS.encode(list(items.items()))


def unpack_items(body: bytes) -> dict[str, bytes]:
    """The items in a body.

    Raises:
        ValueError: the body is not what ``pack_items`` makes, or names a key twice.
    """
    pairs = _ITEMS.decode(body)
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError(f"{len(pairs)} keys, but only {len(items)} different ones")
    return items
