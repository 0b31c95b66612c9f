"""Fewer bytes on the wire: a Compressor changes a tensor before a collective and changes the result back.

Horovod's programs write ``Compression.fp16`` and derive their own classes from ``Compression.none``, so compressors are
classes that are never instantiated. The only framework-specific part is the cast, which an adapter provides: a class
here, and its line in ``Compression``, is a compressor in every front-end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import DType, TensorSpec, WireFormat

T = TypeVar("T")


class Compressor(Protocol[T]):
    """Two functions, each the inverse of the other up to rounding. A class with static methods serves as well as an
    instance."""

    def compress(self, tensor: T) -> tuple[T, Any]:
        """The tensor to send, and whatever ``decompress`` needs to know. The tensor given is not written."""

    def decompress(self, tensor: T, ctx: Any) -> T:
        """The reduced tensor in the original's form."""


def is_elementwise(compressor: object) -> bool:
    """Return whether a compressor treats many tensors at once just as it treats each of them, so that gradients which
    it compresses may share a bucket.

    A class says so by ``elementwise = True``. Classes that derive from it and compress otherwise must say so again.
    """
    return bool(_declared(compressor, "elementwise", False))


def wire_of(compressor: object) -> WireFormat | None:
    """Return the form in which what a compressor yields crosses between hosts; None if the job's settings decide.

    A class says so by ``wire``. What any other yields may not be rounded: it may contain indices, for example.
    """
    wire: WireFormat | None = _declared(compressor, "wire", WireFormat.FULL)
    return wire


def _declared(compressor: object, attribute: str, otherwise: Any) -> Any:
    """Return a class attribute that describes how a compressor compresses: from its class, or from the base
    class whose methods it inherits."""
    for kind in (compressor if isinstance(compressor, type) else type(compressor)).__mro__:
        members = vars(kind)
        if attribute in members:
            return members[attribute]
        if "compress" in members or "decompress" in members:
            return otherwise
    return otherwise


class NoneCompressor:
    """Sends tensors as they are, unless ``--wire`` shortens what crosses between hosts."""

    elementwise = True
    wire: ClassVar[WireFormat | None] = None

    @staticmethod
    def compress(tensor: T) -> tuple[T, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: T, ctx: None) -> T:
        return tensor


class Int8Compressor(NoneCompressor):
    """Sends a quarter of the bytes from host to host, in allreduces; within a host, tensors stay as they are.

    Of each block of 256 values x, ``round(x / s)`` is sent in 8 bits, and the scale ``s = max(abs(x)) / 127``:
    block-wise quantisation (Dettmers et al., ICLR 2022, arXiv 2110.02861), here with evenly spaced codes.
    """

    wire = WireFormat.INT8


class Int4Compressor(NoneCompressor):
    """Sends a seventh of the bytes from host to host, in allreduces; within a host, tensors stay as they are.

    As ``Int8Compressor``, with blocks of 64 values, 4 bits, and ``s = max(abs(x)) / 7``.
    """

    wire = WireFormat.INT4


class Int4FeedbackCompressor(NoneCompressor):
    """As ``Int4Compressor``. Reducers of gradients add what was left out of a gradient to the next one: error feedback
    (Karimireddy et al., ICML 2019, arXiv 1901.09847).
    """

    wire = WireFormat.INT4_FEEDBACK


class Casts(Protocol[T]):
    """The part of an adapter that casting compressors need."""

    def describe(self, tensor: T) -> TensorSpec:
        """As ``TensorAdapter.describe``."""

    def cast(self, tensor: T, dtype: DType) -> T:
        """As ``TensorAdapter.cast``."""


class AdapterCompressor:
    """A compressor that needs its framework; each front-end's ``Compression`` has one of its own, with the adapter."""

    adapter: ClassVar[Casts[Any]]


class _CastCompressor(AdapterCompressor):
    elementwise = True
    wire: ClassVar[WireFormat | None] = None
    dtype: ClassVar[DType]

    @classmethod
    def compress(cls, tensor: T) -> tuple[T, DType | None]:
        """The tensor in fewer bytes, and its original type; or the tensor itself and None.

        Two-byte types would gain nothing, and integers would lose digits. What cannot be sent (complex numbers) is
        not compressed either.
        """
        try:
            dtype = cls.adapter.describe(tensor).dtype
        except InvalidArgumentError:
            return tensor, None
        if not dtype.is_floating or dtype.itemsize <= cls.dtype.itemsize:
            return tensor, None
        narrow: T = cls.adapter.cast(tensor, cls.dtype)
        return narrow, dtype

    @classmethod
    def decompress(cls, tensor: T, ctx: DType | None) -> T:
        """The tensor in its original type."""
        wide: T = tensor if ctx is None else cls.adapter.cast(tensor, ctx)
        return wide


class FP16Compressor(_CastCompressor):
    """Sends float32 and float64 as float16 (IEEE 754: 11 significant bits, up to 65504, beyond which it is infinity);
    other types as they are.
    """

    dtype = DType.FLOAT16


class BF16Compressor(_CastCompressor):
    """Sends float32 and float64 as bfloat16 (8 significant bits, float32's range); other types as they are."""

    dtype = DType.BFLOAT16


class Compression:
    """The compressors to choose from: how tensors travel in fewer bytes, at the price of rounding."""

    none = NoneCompressor
    fp16 = FP16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
    int4_feedback = Int4FeedbackCompressor

    def __init_subclass__(cls, *, adapter: Casts[Any] | None = None) -> None:
        """Derive a front-end's own compressors from those that need its adapter, also from those that only it has."""
        if adapter is None:
            return
        for name in dir(cls):
            each = getattr(cls, name)
            if isinstance(each, type) and issubclass(each, AdapterCompressor):
                place = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.{name}"}  # for pickle
                setattr(cls, name, type(each.__name__, (each,), {**place, "__doc__": each.__doc__, "adapter": adapter}))


class MultiStep(Protocol[T]):
    """The additional method of a compressor that needs several collectives for one gradient, for GradientReducer."""

    def begin(self, frontend: Any, operation: Any, name: str, gradients: Sequence[T]) -> Steps[T]:
        """Begin with gradients that travel together. Called while the backward pass runs; must not block."""


class Steps(Protocol[T]):
    """Gradients whose compression such a compressor has begun."""

    def advance(self) -> None:
        """Wait for the collective under way, and start the next. Called once, before ``wait``."""

    def wait(self) -> list[T]:
        """The reduced gradients."""
