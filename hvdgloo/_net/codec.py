"""Messages between processes as values: frozen classes and their bytes; no bytes decode to anything but those classes.

A message is a class derived from ``Message``, with a ``tag`` of its own: a number, or True for its name. On the wire it
is a msgpack array: the tag, then the fields in order. What is missing at the end has its default value; everything else
must be there, of its declared type and within its declared bounds, and nothing else may be. Nothing that arrives is
ever unpickled.

    >>> class Greeting(Message, tag=0):
    ...     name: str
    ...     times: Count = 1
    >>> codec = Codec(Greeting, "greeting")
    >>> codec.decode(codec.encode(Greeting("you")))
    Greeting(name='you', times=1)
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from hvdgloo._net import framing
from hvdgloo._platform.spelling import encodable

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""An integer that is not negative."""

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Codec(Generic[T]):
    """Converts values of one type to bytes and back. Safe in any thread.

    Args:
        kind: the type: a class, or a union of ``Message`` classes.
        what: the messages' name in errors, e.g. "control message".
        shown: texts are only shown, so bytes in them that are not UTF-8 are decoded as ``spelling.encodable`` has them.
    """

    def __init__(self, kind: Any, what: str, *, shown: bool = False) -> None:
        self._kind = kind
        self._what = what
        unescape = _spelled_out if shown else _unescape
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=unescape)
        self._unescaper = msgspec.msgpack.Decoder(ext_hook=unescape)

    def encode(self, message: T) -> bytes:
        """Return a message's bytes, without framing.

        Raises:
            TypeError: a field holds something that cannot be encoded.
        """
        try:
            return self._encoder.encode(message)
        except UnicodeEncodeError:
            return self._encoder.encode(_escaped(msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_plain)))

    def frame(self, message: T) -> bytearray:
        """Return a message as sent over a stream; see ``framing``. Raises TypeError as ``encode`` does."""
        frame = bytearray(framing.HEAD)
        try:
            self._encoder.encode_into(message, frame, framing.HEAD)
        except UnicodeEncodeError:
            frame[framing.HEAD :] = self.encode(message)
        frame[: framing.HEAD] = framing.head(len(frame) - framing.HEAD)
        return frame

    def decode(self, data: bytes | memoryview) -> T:
        """Return the message: the inverse of ``encode``.

        Raises:
            ValueError: the bytes are not a message of this type.
        """
        try:
            try:
                message: T = self._decoder.decode(data)
            except msgspec.ValidationError:
                if _ESCAPE not in bytes(data):
                    raise
                message = msgspec.convert(self._unescaper.decode(data), self._kind)
        except (ValueError, RecursionError) as error:
            # Whatever error a hostile or foreign byte string causes, the caller sees only this one.
            article = "an" if self._what[0] in "aeiou" else "a"
            raise ValueError(f"not {article} {self._what}: {error}") from error
        return message


def to_json(value: Any) -> bytes:
    """Return a value as JSON in ASCII, in one line. Unlike msgspec's encoder, accept any path in it (see below)."""
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode("ascii")


def from_json(data: bytes, kind: type[T]) -> T:
    """Return the value: the inverse of ``to_json``.

    Raises:
        ValueError: the bytes are no such value.
    """
    try:
        return msgspec.convert(json.loads(data), kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


# Paths, arguments and environment variables may hold bytes that are not UTF-8. Python represents them as strings with
# lone surrogates, which msgpack's strings cannot hold; they travel as an extension type. They are rare, so values are
# searched for them only after encoding one has failed.

_EXTENSION = 1
_ESCAPE = bytes([_EXTENSION])


class _OddText:
    def __init__(self, text: str) -> None:
        self.data = text.encode("utf-8", "surrogatepass")


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return _OddText(value)
        return value
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    return value


def _unescape(code: int, data: memoryview) -> str:
    if code != _EXTENSION:
        raise ValueError("an unknown extension type")
    return str(data, "utf-8", "surrogatepass")


def _spelled_out(code: int, data: memoryview) -> str:
    return encodable(_unescape(code, data))


def _plain(value: Any) -> Any:
    """Convert a value without a msgpack form. Subclasses' values (numpy's float64) become their bases'."""
    if isinstance(value, _OddText):
        return msgspec.msgpack.Ext(_EXTENSION, value.data)
    for base in (str, float, int):
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"a value of {type(value).__name__} cannot be sent")
