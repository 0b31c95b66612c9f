"""XLA's custom calls handled by Python: XLA calls a ctypes function, so nothing has to be compiled.

The structures are XLA's C interface for foreign functions (``xla/ffi/api/c_api.h`` in jaxlib, version 0.3), which
carries its version and the structures' sizes. ``is_usable`` checks both, and makes one call to see that the layout is
understood; where it returns False, callers use a callback instead. This module knows nothing of collectives.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_logger = logging.getLogger(__name__)

_P, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t

MAJOR = 0
"""The version of the interface that the structures below describe. A higher minor version only appends to them."""

_EXECUTE = 3
_METADATA = 1
_ABORTED = 10
_SELF_TEST = "hvdgloo_self_test"
_SELF_TEST_SECONDS = 60.0


class _Struct(ctypes.Structure):
    """A structure that begins with its size and a pointer to extensions."""

    struct_size: int
    extension: int | None


def _struct(name: str, *fields: tuple[str, Any], head: bool = True) -> Any:
    begin: list[tuple[str, Any]] = [("struct_size", _SIZE), ("extension", _P)] if head else []
    return type(name, (_Struct,), {"_fields_": [*begin, *fields]})


Version = _struct("Version", ("major", ctypes.c_int), ("minor", ctypes.c_int))
_Extension = _struct("Extension", ("struct_size", _SIZE), ("type", ctypes.c_int), ("next", _P), head=False)
_Metadata = _struct(
    "Metadata", ("struct_size", _SIZE), ("version", Version), ("traits", ctypes.c_uint32), ("state", _I64), head=False
)
_MetadataExtension = _struct(
    "MetadataExtension", ("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)), head=False
)
Buffer = _struct("Buffer", ("dtype", ctypes.c_int), ("data", _P), ("rank", _I64), ("dims", _P))
_Text = _struct("Text", ("pointer", _P), ("length", _SIZE), head=False)
_Values = _struct("Values", ("size", _I64), ("types", _P), ("items", _P))
_Attributes = _struct("Attributes", ("size", _I64), ("types", _P), ("names", _P), ("items", _P))
_FUNCTIONS = (
    "Error_Create",
    "Error_GetMessage",
    "Error_Destroy",
    "Handler_Register",
    "Stream_Get",
    "Type_Register",
    "ExecutionContext_Get",
    "State_Set",
    "State_Get",
    "DeviceMemory_Allocate",
    "DeviceMemory_Free",
    "ThreadPool_Schedule",
    "ThreadPool_NumThreads",
    "Future_Create",
    "Future_SetAvailable",
    "Future_SetError",
)
Api = _struct("Api", ("version", Version), ("internal", _P), *[(name, _P) for name in _FUNCTIONS])
Frame = _struct(
    "Frame",
    ("api", ctypes.POINTER(Api)),
    ("context", _P),
    ("stage", ctypes.c_int),
    ("arguments", _Values),
    ("results", _Values),
    ("attributes", _Attributes),
    ("future", _P),
)
_ErrorArguments = _struct("ErrorArguments", ("message", ctypes.c_char_p), ("code", ctypes.c_int))
_FutureArguments = _struct("FutureArguments", ("future", _P))
_FutureErrorArguments = _struct("FutureErrorArguments", ("future", _P), ("error", _P))

_Handler = ctypes.CFUNCTYPE(_P, _P)
_DATA = Buffer.data.offset
_POINTER = ctypes.sizeof(_P)


class Future:
    """The end of a call that goes on after its handler has returned.

    XLA meanwhile computes what does not depend on the call, and continues in the thread that sets the future.
    """

    def __init__(self, api: Any) -> None:
        arguments = _FutureArguments(ctypes.sizeof(_FutureArguments), None, None)
        if _function(api.Future_Create, _FutureArguments)(arguments):
            raise RuntimeError("XLA could not create a future")
        self.address: int = arguments.future
        self._api = api

    def set(self, error: str | None = None) -> None:
        """End the call: well, or with an error's text. To be called once."""
        if error is None:
            arguments = _FutureArguments(ctypes.sizeof(_FutureArguments), None, self.address)
            _function(self._api.Future_SetAvailable, _FutureArguments)(arguments)
        else:
            made = _make_error(self._api, error)
            arguments = _FutureErrorArguments(ctypes.sizeof(_FutureErrorArguments), None, self.address, made)
            _function(self._api.Future_SetError, _FutureErrorArguments)(arguments)


class Call:
    """One call from a compiled function: valid until its handler returns, but for the addresses."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def text(self) -> bytes:
        """Return the only attribute, a text."""
        item = _P.from_address(self._frame.attributes.items).value
        value = _Text.from_address(item)
        return ctypes.string_at(value.pointer, value.length)

    def arguments(self, count: int) -> list[int]:
        """Return the addresses of the last ``count`` arguments; a token may precede them."""
        return _addresses(self._frame.arguments, count)

    def results(self, count: int) -> list[int]:
        """Return the addresses of the last ``count`` results."""
        return _addresses(self._frame.results, count)

    def future(self) -> Future:
        """Create the future that the handler returns."""
        return Future(self._frame.api.contents)


def _addresses(values: Any, count: int) -> list[int]:
    first = values.size - count
    pointers = (_P * count).from_address(values.items + first * _POINTER) if count else ()
    return [_P.from_address(pointer + _DATA).value or 0 for pointer in pointers]


@functools.cache
def _prototype(arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(_P, ctypes.POINTER(arguments))


def _function(address: int, arguments: Any) -> Any:
    return _prototype(arguments)(address)


def _make_error(api: Any, text: str) -> int:
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text.encode(), _ABORTED)
    error: int = _function(api.Error_Create, _ErrorArguments)(arguments)
    return error


_registered: list[Any] = []  # ctypes functions that XLA calls for as long as the process lives


def register(name: str, execute: Callable[[Call], Future | None]) -> None:
    """Have a function handle the custom calls of a name on the CPU.

    Args:
        name: the target of the calls.
        execute: returns None if the call has ended, else the future that ends it. What it raises becomes the error of
            the computation, with this text.
    """

    def handle(address: int) -> int | None:
        frame = Frame.from_address(address)
        api = frame.api.contents
        try:
            if frame.extension and _Extension.from_address(frame.extension).type == _METADATA:
                metadata = _MetadataExtension.from_address(frame.extension).metadata.contents
                metadata.version.major, metadata.version.minor = api.version.major, api.version.minor
                metadata.traits = 0
            elif frame.stage == _EXECUTE:
                future = execute(Call(frame))
                if future is not None:
                    frame.future = future.address
        except BaseException as error:  # noqa: BLE001 - nothing may escape into XLA, not even Ctrl-C's
            return _make_error(api, str(error) or type(error).__name__)
        return None

    handler = _Handler(handle)
    _registered.append(handler)
    capsule = jax.ffi.pycapsule(ctypes.cast(handler, _P).value)
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")


def _increment(call: Call) -> Future:
    """Handle the self-test's call: add the length of its text to a number, in another thread."""
    api, frame = call._frame.api.contents, call._frame
    if (
        api.version.major != MAJOR
        or api.struct_size < ctypes.sizeof(Api)
        or frame.struct_size < Frame.future.offset  # XLA does not count the last field
        or (frame.arguments.size, frame.results.size, frame.attributes.size) != (1, 1, 1)
    ):
        raise RuntimeError(
            f"its interface for foreign functions, version {api.version.major}.{api.version.minor}, has another layout"
        )
    (source,), (target,) = call.arguments(1), call.results(1)
    value = ctypes.c_int32.from_address(source).value + len(call.text())
    future = call.future()

    def end() -> None:
        ctypes.c_int32.from_address(target).value = value
        future.set()

    threading.Thread(target=end, daemon=True, name="hvdgloo-jax-self-test").start()
    return future


def problem_of(increment: Callable[[Call], Future | None], name: str = _SELF_TEST) -> str:
    """Make one call, and return the reason why calls cannot be used; an empty text if they can.

    Args:
        increment: handles the call.
        name: the call's target.
    """
    found: list[str] = []

    def run() -> None:
        try:
            register(name, increment)
            like = jax.ShapeDtypeStruct((), np.int32)
            call = jax.ffi.ffi_call(name, like)
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                result = jax.jit(lambda number: call(number, text="four"))(np.int32(38))
                found.append("" if int(result) == 42 else f"the self-test's result is {int(result)}")
        except Exception as error:  # noqa: BLE001 - there is another way for whatever does not work
            found.append(str(error).strip().partition("\n")[0] or type(error).__name__)

    # In a thread of its own: the caller may be tracing a function.
    thread = threading.Thread(target=run, daemon=True, name="hvdgloo-jax-self-test")
    thread.start()
    thread.join(_SELF_TEST_SECONDS)
    return found[0] if found else f"the self-test did not end within {_SELF_TEST_SECONDS:g} s"


@functools.cache
def problem() -> str:
    """Return the reason why Python cannot handle this jaxlib's custom calls; an empty text if it can."""
    return problem_of(_increment)
