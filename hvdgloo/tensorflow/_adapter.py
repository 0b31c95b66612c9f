"""TensorFlow's tensors and variables as the Frontend sees them.

A tensor on the CPU is shared with the engine as a numpy view of it. Results are made in numpy memory of the alignment
that TensorFlow asks for, and become tensors through DLPack; so nothing is copied either way. Tensors are immutable:
nothing here writes into one that a user has seen. Inside a graph operators are Python functions that get their inputs
as arrays, which are therefore tensors of this adapter too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdgloo._collectives.adapter import Tape, kind_of, not_sendable
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import Buffer, DType, TensorSpec

Array = npt.NDArray[Any]
Tensor = Any
"""A tf.Tensor, a tf.Variable, or (inside a graph's operators) a numpy array; TensorFlow ships no types."""

Forward = Callable[[Sequence[Tensor]], list[Tensor]]
Backward = Callable[[Tape[Tensor], Sequence[Tensor]], Sequence[Tensor]]

_DTYPES = {dtype.value: dtype for dtype in DType}
_ARRAYS = (np.ndarray, np.generic)
"""Types of arrays; numpy's functions return a number, not an array, for an array without dimensions."""
_ALIGNMENT = 64
"""The alignment of memory that TensorFlow takes over as it is; with less it is copied, or vector instructions fault."""


class TensorFlowAdapter:
    """TensorAdapter for eager ``tf.Tensor``, ``tf.Variable`` and ``numpy.ndarray``.

    Tensors in the CPU's memory are shared with the engine; variables are staged, and tensors on other devices copied to
    the host once. What is
    returned for a tensor "in place" is a new one; variables are assigned.
    """

    def owns(self, tensor: object) -> bool:
        return isinstance(tensor, (tf.Tensor, tf.Variable, *_ARRAYS))

    def describe(self, tensor: Tensor) -> TensorSpec:
        # Also for tensors of a graph under construction, whose dimensions may be unknown; those are -1 here.
        name = tensor.dtype.name.removesuffix("_ref")  # a variable of TensorFlow 1's may be a reference to its memory
        dtype = _DTYPES.get(name)
        if dtype is None:
            kind = kind_of(np.asarray(tensor)) if isinstance(tensor, _ARRAYS) else name
            raise not_sendable(kind, "tensors", _DTYPES, "tf.stack([tf.math.real(x), tf.math.imag(x)])")
        if isinstance(tensor, _ARRAYS):
            return TensorSpec(dtype, tensor.shape)
        dimensions = tensor.shape.as_list() if tensor.shape.rank is not None else []
        return TensorSpec(dtype, tuple(-1 if size is None else size for size in dimensions))

    def export(self, tensor: Tensor, *, writable: bool = False, known: TensorSpec | None = None) -> Buffer:
        if isinstance(tensor, _ARRAYS):
            return self._export_array(np.asarray(tensor), writable)
        if not isinstance(tensor, (tf.Tensor, tf.Variable)):
            raise InvalidArgumentError(
                f"expected a tensor of TensorFlow, not {type(tensor).__name__}; tf.convert_to_tensor makes one"
            )
        self.describe(tensor)
        is_variable, on_cpu = isinstance(tensor, tf.Variable), is_on_cpu(tensor)
        # Of a variable, asarray would make a copy of its own; what is on another device, it copies to the host.
        array = np.asarray(tensor.read_value() if is_variable else tensor)
        # A variable's memory may be a tensor's that the user has read from it.
        if writable or (is_variable and on_cpu):
            private = self._aligned(array.shape, array.dtype)
            np.copyto(private, array)
            return self._export_array(private, False)
        owner = tensor if on_cpu else array
        return Buffer(_address(array), TensorSpec(_DTYPES[array.dtype.name], array.shape), owner)

    def allocate(self, spec: TensorSpec, like: Tensor) -> Tensor:
        return self._aligned(spec.shape, tf.as_dtype(spec.dtype.value).as_numpy_dtype)

    def deliver(self, result: Tensor, target: Tensor, *, in_place: bool) -> Tensor:
        if isinstance(target, np.generic):
            return result
        if isinstance(target, np.ndarray):
            if in_place and result is not target:
                target[...] = result
            return target if in_place else result
        # A reducer's compressor may have made a tensor of it already.
        tensor = self.tensor_of(result) if isinstance(result, np.ndarray) else result
        if not is_on_cpu(target):
            with tf.device(target.device):
                tensor = tf.identity(tensor)
        if in_place and isinstance(target, tf.Variable):
            target.assign(tensor)
            return target
        return tensor

    def values(self, tensor: Tensor) -> npt.NDArray[Any]:
        return np.asarray(tensor)

    def cast(self, tensor: Tensor, dtype: DType) -> Tensor:
        if isinstance(tensor, _ARRAYS):
            return np.asarray(tensor).astype(tf.as_dtype(dtype.value).as_numpy_dtype)
        return tf.cast(tensor, dtype.value)

    def fence(self, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
        return None  # looking at a tensor's memory waits for what computes it

    def differentiable(
        self, forward: Forward, backward: Backward, inputs: Sequence[Tensor], *, keep: bool
    ) -> list[Tensor]:
        if all(isinstance(tensor, _ARRAYS) for tensor in inputs):
            return forward(inputs)
        return record(forward, backward, inputs, keep=keep)

    @staticmethod
    def tensor_of(array: Array) -> Tensor:
        """An eager tensor over the memory of an array that ``allocate`` made."""
        if array.dtype == np.bool_ or array.size == 0:
            return tf.constant(array)  # DLPack does not have booleans everywhere, nor empty arrays
        if array.dtype.name == "bfloat16":
            return tf.bitcast(_from_dlpack(array.view(np.uint16)), tf.bfloat16)
        return _from_dlpack(array)

    @staticmethod
    def _aligned(shape: tuple[int, ...], dtype: Any) -> Array:
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -_address(raw) % _ALIGNMENT
        memory: Array = raw[start : start + nbytes].view(kind).reshape(shape)
        return memory

    def _export_array(self, array: Array, writable: bool) -> Buffer:
        spec = self.describe(array)
        if not array.flags.c_contiguous:
            private = self._aligned(array.shape, array.dtype)
            np.copyto(private, array)
            return Buffer(_address(private), spec, private)
        return Buffer(_address(array), spec, array)


def is_on_cpu(tensor: Tensor) -> bool:
    """Tell whether a tensor's memory is the host's."""
    device = tensor.device
    return not device or "CPU:" in device.upper()


def record(
    forward: Forward, backward: Backward, inputs: Sequence[Tensor], *, keep: bool, once: bool = False
) -> list[Tensor]:
    """``forward(inputs)`` with its gradient, eagerly or in a graph: see ``TensorAdapter.differentiable``.

    ``once``: the gradient itself has none.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in inputs]
    chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype.is_floating]
    if not chosen:
        return forward(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*given: Tensor) -> Any:
        outputs = forward(given)

        def gradient(*arriving: Tensor) -> Any:
            # Integer members of a group have no gradient, on any rank; leaving them out spares every rank their
            # transfer.
            tape = Tape(
                tuple(_shape(given[index]) for index in chosen),
                tuple(given[index] for index in chosen if keep),
                tuple(outputs[index] for index in chosen if keep),
            )
            incoming = [tf.convert_to_tensor(arriving[index]) for index in chosen]  # an IndexedSlices becomes dense
            results: list[Tensor] = [None] * len(given)
            for index, result in zip(chosen, _once(backward, tape, incoming, refuse=keep or once), strict=True):
                results[index] = result
            return results

        return tuple(outputs), gradient

    return list(call(*tensors))


def _once(backward: Backward, tape: Tape[Tensor], incoming: Sequence[Tensor], *, refuse: bool) -> Sequence[Tensor]:
    if not refuse:
        return backward(tape, incoming)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*given: Tensor) -> Any:
        def gradient(*_: Tensor) -> Any:
            raise InvalidArgumentError(
                "the gradient of this collective cannot be differentiated again; Sum's and Average's can, and eagerly "
                "all gradients but Min's, Max's and Product's"
            )

        return tuple(backward(tape, given)), gradient

    return list(call(*incoming))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return () if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def _from_dlpack(array: Array) -> Tensor:
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
