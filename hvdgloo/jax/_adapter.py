"""JAX's arrays on a CPU as the Frontend sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.adapter import Tape, not_sendable
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import Buffer, DType, TensorSpec

_DTYPES = {dtype.value: dtype for dtype in DType}
_JAX_DTYPES = {dtype: np.dtype(jnp.bfloat16) if dtype is DType.BFLOAT16 else dtype.numpy_dtype for dtype in DType}
_ALIGNMENT = 64
"""Memory of this alignment becomes an array of JAX's without a copy."""

ONE_PROCESS_PER_DEVICE = (
    "start one process per device, for example hvdgloo-run -np 4, and give each array of this process to one CPU device"
)
CPU_ONLY = (
    "collectives of hvdgloo.jax work on a CPU's arrays: move them there with jax.device_put(x, jax.devices('cpu')[0]), "
    "or run the program with JAX_PLATFORMS=cpu"
)
ONE_CONTROLLER = (
    "jax.distributed has joined several processes into one program, in which hvdgloo.jax has no place: leave out "
    "jax.distributed.initialize(), or use JAX's own collectives"
)


def dtype_of(dtype: DType) -> Any:
    """Return an element type as JAX has it."""
    return _JAX_DTYPES[dtype]


class Memory:
    """Memory for a result, which then becomes an array without a copy.

    Attributes:
        array: the memory.
        buffer: the same for the engine.
    """

    __slots__ = ("__weakref__", "array", "buffer")

    def __init__(self, spec: TensorSpec) -> None:
        raw = np.empty(spec.nbytes + _ALIGNMENT, np.uint8)
        begin = -raw.__array_interface__["data"][0] % _ALIGNMENT
        self.array = raw[begin : begin + spec.nbytes].view(_JAX_DTYPES[spec.dtype]).reshape(spec.shape)
        self.buffer = Buffer(self.array.__array_interface__["data"][0], spec, self)


class JaxAdapter:
    """TensorAdapter for ``jax.Array``, also while it is being traced, when only its type and shape are known.

    Arrays cannot be written. The engine reads their memory; gradients are recorded by ``_frontend``, not here.
    """

    def owns(self, tensor: object) -> bool:
        return isinstance(tensor, jax.Array)

    def describe(self, tensor: Any) -> TensorSpec:
        name = tensor.dtype.name
        dtype = _DTYPES.get(name)
        if dtype is None:
            if jax.dtypes.issubdtype(tensor.dtype, jax.dtypes.prng_key):
                raise InvalidArgumentError(
                    f"typed PRNG keys ({name}) cannot be sent, but their numbers can: jax.random.key_data(key), and "
                    "jax.random.wrap_key_data() for the result"
                )
            raise not_sendable(name, "arrays", _DTYPES, "jax.numpy.stack([array.real, array.imag])")
        return TensorSpec(dtype, tensor.shape)

    def export(self, tensor: Any, *, writable: bool = False, known: TensorSpec | None = None) -> Buffer:
        if isinstance(tensor, Memory):
            return tensor.buffer
        if not self.owns(tensor):
            raise InvalidArgumentError(
                f"expected an array of JAX's, not {type(tensor).__name__}; jax.numpy.asarray makes one of numbers and "
                "lists"
            )
        if isinstance(tensor, jax.core.Tracer):
            raise InvalidArgumentError("this array is being traced and has no values yet")
        if writable:
            raise InvalidArgumentError("JAX's arrays cannot be written; use the function that returns a new array")
        if not tensor.is_fully_addressable:
            raise InvalidArgumentError(ONE_CONTROLLER)
        devices = tensor.devices()
        if len(devices) > 1:
            raise InvalidArgumentError(f"the array lies on {len(devices)} devices; {ONE_PROCESS_PER_DEVICE}")
        platform = next(iter(devices)).platform
        if platform != "cpu":
            raise InvalidArgumentError(f"the array is on a device of platform {platform}; {CPU_ONLY}")
        is_known = known is not None and tensor.shape == known.shape and tensor.dtype == _JAX_DTYPES[known.dtype]
        spec = known if known is not None and is_known else self.describe(tensor)
        memory = np.asarray(tensor)  # the array's own memory, once it has been computed
        if memory.flags.c_contiguous:
            return Buffer(memory.__array_interface__["data"][0], spec, tensor)
        copy = Memory(spec)
        copy.array[...] = memory
        return copy.buffer

    def allocate(self, spec: TensorSpec, like: Any) -> Any:
        return Memory(spec)

    def deliver(self, result: Any, target: Any, *, in_place: bool) -> Any:
        if not isinstance(result, Memory):
            return result
        place = target.sharding if getattr(target, "committed", False) else None
        return jax.device_put(result.array, place, may_alias=True)

    def values(self, tensor: Any) -> npt.NDArray[Any]:
        return np.asarray(tensor)

    def cast(self, tensor: Any, dtype: DType) -> Any:
        return tensor.astype(_JAX_DTYPES[dtype])

    def fence(self, tensors: Sequence[Any]) -> Callable[[], None] | None:
        return None

    def differentiable(
        self,
        forward: Callable[[Sequence[Any]], list[Any]],
        backward: Callable[[Tape[Any], Sequence[Any]], Sequence[Any]],
        inputs: Sequence[Any],
        *,
        keep: bool,
    ) -> list[Any]:
        return forward(inputs)
