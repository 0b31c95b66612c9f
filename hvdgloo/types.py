"""The values that front-ends, engine and backends exchange. They never change, and depend on no framework."""

from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from hvdgloo.errors import BackendError


class DType(enum.Enum):
    """An element type. The value is the name used in messages.

    ``numpy_dtype`` is the dtype of arrays of such elements. numpy has no bfloat16: for it this is an opaque type of two
    bytes, so that no code computes with it by mistake or confuses it with uint16.
    """

    UINT8 = "uint8"
    INT8 = "int8"
    UINT16 = "uint16"
    INT16 = "int16"
    UINT32 = "uint32"
    INT32 = "int32"
    UINT64 = "uint64"
    INT64 = "int64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BOOL = "bool"

    # enum.Enum caches nothing, and these are read on the path of every tensor.
    itemsize: int
    is_floating: bool
    numpy_dtype: np.dtype[Any]

    def __init__(self, text: str) -> None:
        self.numpy_dtype = np.dtype("V2" if text == "bfloat16" else text)
        self.itemsize = self.numpy_dtype.itemsize
        self.is_floating = "float" in text

    def __str__(self) -> str:
        return str(self.value)

    # Members are singletons; enum's own hash is a Python function, and these are looked up for every tensor.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class PlaneMetrics:
    """Counters of one data plane.

    Attributes:
        operations: number of tensors it carried.
        bytes: size of these tensors on this rank.
        seconds: time during which it was carrying something.
        wire_bytes: size of these tensors in the form in which they crossed between hosts; less than ``bytes`` with
            ``--wire``, and 0 if the plane is within a host.
        wire_error: relative error of gradients that were encoded for that, from samples.
    """

    operations: int = 0
    bytes: int = 0
    seconds: float = 0.0
    wire_bytes: int = 0
    wire_error: float = 0.0


@dataclass(frozen=True)
class Metrics:
    """Counters of this rank since its process started; times are in seconds. ``later - earlier`` gives the counts in
    between.

    Attributes:
        rank, size: the rank's place in the job.
        operations: number of tensors exchanged.
        bytes: size of these tensors on this rank.
        steps: training steps that ended, one for each ``optimizer.step()`` or batch of a ``fit``.
        step_seconds: time from the end of the first step to the end of the last.
        step_waiting, step_communicating: part of ``step_seconds`` blocked on tensors that other ranks had not
            submitted, and on tensors in transfer.
        step_before_first: part of ``step_seconds`` from each step's start to its first submission; a slow input
            pipeline shows here.
        last_step: duration of the last step.
        outer_steps: outer steps that ended, of ``LocalSGD``, ``DiLoCo`` or ``OuterOptimizer``.
        outer_bytes: size of the changes sent in them, before they were encoded.
        outer_seconds: time for which they kept the program from inner steps.
        since_outer_step: time since the last one ended; 0 if there was none.
        waiting, communicating: time blocked in the same two ways, inside and outside steps.
        negotiation, queue, data, copy, wire: times summed over tensors: from submission until all ranks had submitted
            the tensor, from then until the operation was started, until the data was readable (computed by the GPU),
            copying into and out of buffers, and on the data plane.
        cpu_seconds: CPU time of this process, user and system.
        memory: resident bytes.
        planes: counters by data plane's name; "agreement" is for small tensors that travel with the negotiation.
        logged: number by name, as this rank passed it to ``hvd.log`` last.
    """

    rank: int
    size: int
    operations: int = 0
    bytes: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_waiting: float = 0.0
    step_communicating: float = 0.0
    step_before_first: float = 0.0
    last_step: float = 0.0
    outer_steps: int = 0
    outer_bytes: int = 0
    outer_seconds: float = 0.0
    since_outer_step: float = 0.0
    waiting: float = 0.0
    communicating: float = 0.0
    negotiation: float = 0.0
    queue: float = 0.0
    data: float = 0.0
    copy: float = 0.0
    wire: float = 0.0
    cpu_seconds: float = 0.0
    memory: int = 0
    planes: Mapping[str, PlaneMetrics] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)

    def __sub__(self, earlier: Metrics) -> Metrics:
        """Return the counts since ``earlier``; values that are not totals (``last_step``, ``since_outer_step``,
        ``memory``, ``logged``, rank and size) stay as they are here."""
        if not isinstance(earlier, Metrics):
            return NotImplemented
        changes: dict[str, Any] = {
            name: getattr(self, name) - getattr(earlier, name)
            for name in self.__dataclass_fields__
            if name not in _NO_TOTALS
        }
        none = PlaneMetrics()
        planes = {}
        for name, now in self.planes.items():
            then = earlier.planes.get(name, none)
            planes[name] = PlaneMetrics(
                now.operations - then.operations,
                now.bytes - then.bytes,
                now.seconds - then.seconds,
                now.wire_bytes - then.wire_bytes,
                now.wire_error,
            )
        return replace(self, planes=planes, **changes)


_NO_TOTALS = frozenset({"rank", "size", "last_step", "since_outer_step", "memory", "planes", "logged"})


class ReduceOp(enum.IntEnum):
    """The operation that combines the elements a, b, ... of n ranks. The numbers are Horovod's public constants.

    Attributes:
        AVERAGE: ``(a + b + ...) / n``, where n is the size of the process set; an integer is truncated toward zero. For
            gradients it yields the gradient of the mean loss, if all ranks' batches have one size.
        SUM: ``a + b + ...``; the gradient of a loss that is summed over the batch.
        ADASUM: an adaptive sum of floating-point tensors on the CPU: two ranks' tensors yield
            ``(1 - a·b / (2 a·a)) a + (1 - a·b / (2 b·b)) b``, where ``·`` is the inner product. Parallel gradients are
            averaged and orthogonal ones added, so the learning rate need not grow with the number of ranks. More ranks
            are combined in pairs of neighbours, and the results in pairs again. Source: Maleki et al., "Scaling
            Distributed Training with Adaptive Summation", MLSys 2021 ([arXiv 2006.02924](https://arxiv.org/abs/2006.02924)).
        MIN: ``min(a, b, ...)``; NaN if any of them is NaN.
        MAX: ``max(a, b, ...)``; NaN if any of them is NaN.
        PRODUCT: ``a * b * ...``.
    """

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    __hash__ = int.__hash__  # enum's own is a Python function


class WireFormat(enum.Enum):
    """The form in which a sum's float32 values cross a network; the value is the name that users give."""

    FULL = "full"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    INT4_FEEDBACK = "int4-feedback"
    """The same codes; what they leave out of a gradient is added to the next one."""

    def __str__(self) -> str:
        return str(self.value)

    __hash__ = object.__hash__  # as DType's


_QUANTISED = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})

ENCODABLE: Mapping[WireFormat, frozenset[DType]] = {
    WireFormat.FULL: frozenset(),
    WireFormat.BF16: frozenset({DType.FLOAT32}),
    WireFormat.INT8: _QUANTISED,
    WireFormat.INT4: _QUANTISED,
    WireFormat.INT4_FEEDBACK: _QUANTISED,
}
"""The types whose values each form makes smaller; others cross as they are, and so does float64, whose users want its
precision."""


class _Traits:
    """The properties in which collectives differ, for all code that treats several of them alike."""

    has_tensors = False
    """It moves tensors, so that its name comes from the user, behind a prefix."""

    reduces = False
    """It computes, with a reduce operation and scale factors."""

    along_rows = False
    """It divides or joins tensors along their first dimension, so that they need one."""

    sized_late = False
    """Ranks' first dimensions may differ; the result's size is known only when all ranks have submitted."""

    has_root = False
    """One rank's tensors are the source."""

    fusible = False
    """Several of its tensors can travel in one buffer."""

    quick = False
    """On this rank it takes no longer than its bytes, so that a caller's thread may execute a small one."""

    exclusive = False
    """Nothing else of this rank may be under way when it begins."""

    excusable = False
    """It goes on without the data of ranks that have joined."""

    changes_sets = False
    """All ranks add or remove a process set."""


class Collective(_Traits, enum.Enum):
    """A collective operation, with its traits; the value is the prefix of its tensors' names."""

    _value_: str

    ALLREDUCE = "allreduce", "has_tensors reduces fusible quick excusable"
    ALLGATHER = "allgather", "has_tensors along_rows sized_late fusible quick"
    BROADCAST = "broadcast", "has_tensors has_root fusible quick"
    ALLTOALL = "alltoall", "has_tensors along_rows sized_late exclusive"
    REDUCESCATTER = "reducescatter", "has_tensors reduces along_rows"
    BARRIER = "barrier", "quick excusable"
    JOIN = "join", ""
    ADD_PROCESS_SET = "add_process_set", "changes_sets exclusive"
    REMOVE_PROCESS_SET = "remove_process_set", "changes_sets exclusive"

    def __new__(cls, value: str, traits: str) -> Collective:
        member = object.__new__(cls)
        member._value_ = value
        for trait in traits.split():
            if not hasattr(_Traits, trait):
                raise TypeError(f"no collective is {trait!r}")
            setattr(member, trait, True)  # on the member: read on the path of every tensor
        return member

    def prefix(self, *, grouped: bool) -> str:
        """Return the prefix of names: of one tensor's, or of a group's."""
        return f"grouped_{self.value}" if grouped else self.value

    __hash__ = object.__hash__  # as DType's


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The properties of a tensor on which ranks must agree before any of its bytes are sent."""

    dtype: DType
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    device: str = "cpu"

    @cached_property
    def count(self) -> int:
        """Number of elements; 1 for a zero-dimensional tensor."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(slots=True, unsafe_hash=True)  # not frozen: that takes three times as long, and one is made for every tensor
class Buffer:
    """Contiguous memory of one tensor, in row-major order, without a copy.

    Attributes:
        address: address of the first byte; may be 0 if there are no elements. Valid while the Buffer exists.
        spec: dtype, shape and kind of device ("cpu" or "cuda").
        owner: the object that keeps the memory alive and knows its device.
    """

    address: int
    spec: TensorSpec
    owner: object = field(default=None, compare=False, repr=False)

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def device(self) -> str:
        return self.spec.device

    @property
    def count(self) -> int:
        return self.spec.count

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def part(self, begin: int, nbytes: int) -> Buffer:
        """Return ``nbytes`` bytes from ``begin`` on, a whole number of elements, as a flat buffer."""
        spec = TensorSpec(self.dtype, (nbytes // self.dtype.itemsize,), self.device)
        return Buffer(self.address + begin, spec, self.owner)

    def array(self) -> npt.NDArray[Any]:
        """Return a flat, writable numpy view of ``dtype.numpy_dtype``.

        Raises:
            BackendError: the memory is not the host's.
        """
        nbytes = self.nbytes
        if nbytes == 0:
            return np.empty(0, self.dtype.numpy_dtype)
        if self.spec.device != "cpu" and not getattr(self.owner, "is_cpu", True):
            raise BackendError(f"the host cannot read the memory of a {self.spec.device} device")
        memory: Any = (ctypes.c_ubyte * nbytes).from_address(self.address)
        memory.owner = self.owner  # the view keeps the memory alive
        return np.frombuffer(memoryview(memory).cast("B"), self.dtype.numpy_dtype)

    @classmethod
    def of_array(cls, array: npt.NDArray[Any], dtype: DType | None = None) -> Buffer:
        """Return a Buffer over the memory of a C-contiguous numpy array.

        Args:
            dtype: the element type, required for elements that numpy does not regard as numbers.
        """
        if not array.flags.c_contiguous:
            raise ValueError("a Buffer needs a C-contiguous array")
        return cls(array.ctypes.data, TensorSpec(dtype or DType(array.dtype.name), array.shape), array)
