"""MXNet's arrays as the Frontend sees them: classic ones (``mx.nd``) and the numpy interface's (``mx.np``).

MXNet computes in the background: an array is there at once, its values later. Before the engine is given memory,
everything that writes it must therefore have ended and, if results go into it, everything that reads it. The wait is in
the calling thread, not in a fence, since until then the memory may still be in another layout (oneDNN's blocks, for
convolutions), and even elsewhere. MXNet is asked to compute nothing on it before the collective has ended, so what it
computes afterwards sees the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd
from mxnet.base import _LIB, MXNetError, check_call
from mxnet.ndarray.sparse import BaseSparseNDArray

from hvdgloo._collectives.adapter import Tape, not_sendable
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.mxnet import _recording as recording
from hvdgloo.mxnet._shapes import numpy_shapes
from hvdgloo.types import Buffer, DType, TensorSpec

Tensor = Any
"""An ``mx.nd.NDArray``, of which ``mx.np.ndarray`` is a subclass; MXNet ships no types."""

Forward = Callable[[Sequence[Tensor]], list[Tensor]]
Backward = Callable[[Tape[Tensor], Sequence[Tensor]], Sequence[Tensor]]

_NOT_MXNETS = (DType.UINT16, DType.INT16, DType.UINT32, DType.UINT64)
_MXNET_DTYPES: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype([("bfloat16", np.uint16)]) if dtype is DType.BFLOAT16 else dtype.numpy_dtype
    for dtype in DType
    if dtype not in _NOT_MXNETS
}
_DTYPES: dict[Any, DType] = {
    # Classic arrays tell their type as numpy's class; other arrays, and bfloat16 ones, as its dtype.
    kind: dtype
    for dtype, numpy_dtype in _MXNET_DTYPES.items()
    for kind in ((numpy_dtype,) if dtype is DType.BFLOAT16 else (numpy_dtype, numpy_dtype.type))
}
_PAIRS = "mx.nd.array(numpy.stack([array.real, array.imag]))"
_ON_HOST = frozenset({"cpu", "cpu_pinned", "cpu_shared"})


class MXNetAdapter:
    """TensorAdapter for ``mx.nd.NDArray`` and ``mx.np.ndarray``.

    Arrays in the host's memory are shared with the engine; those on a GPU are staged there. Legacy shapes know neither
    zero rows nor scalars, so whatever makes an array here does it with numpy's.
    """

    def owns(self, tensor: object) -> bool:
        return isinstance(tensor, mx.nd.NDArray)

    def describe(self, tensor: Tensor) -> TensorSpec:
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise not_sendable(str(tensor.dtype), "arrays", dict.fromkeys(_DTYPES.values()), _PAIRS)
        return TensorSpec(dtype, tensor.shape)

    def export(self, tensor: Tensor, *, writable: bool = False, known: TensorSpec | None = None) -> Buffer:
        if not self.owns(tensor):
            raise InvalidArgumentError(
                f"expected an array of MXNet, not {type(tensor).__name__}; {_instead_of(tensor)}"
            )
        if isinstance(tensor, BaseSparseNDArray):
            raise InvalidArgumentError(
                f"a {tensor.stype} array cannot be sent; tostype('default') gives one that can, and sparse_grad=False "
                "and grad_stype='default' make gradients that can"
            )
        spec = self.describe(tensor)
        owner = tensor if self._is_on_host(tensor) else tensor.copyto(mx.cpu())
        _settle(owner, written=writable)
        address = ctypes.c_void_p()
        check_call(_LIB.MXNDArrayGetData(owner.handle, ctypes.byref(address)))
        return Buffer(address.value or 0, spec, owner)

    def allocate(self, spec: TensorSpec, like: Tensor) -> Tensor:
        with numpy_shapes():
            made = mx.nd.empty(spec.shape, mx.cpu(), _MXNET_DTYPES[spec.dtype])
            return made.as_np_ndarray() if isinstance(like, mx.np.ndarray) else made

    def deliver(self, result: Tensor, target: Tensor, *, in_place: bool) -> Tensor:
        if not in_place:
            return result.as_in_context(target.context)
        if result is not target:
            with autograd.pause(), numpy_shapes():
                result.copyto(target)
        return target

    def values(self, tensor: Tensor) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = tensor.asnumpy()
        return array

    def cast(self, tensor: Tensor, dtype: DType) -> Tensor:
        with numpy_shapes():
            return tensor.astype(_MXNET_DTYPES[dtype])

    def fence(self, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
        return None  # ``export`` has waited

    def differentiable(
        self, forward: Forward, backward: Backward, inputs: Sequence[Tensor], *, keep: bool
    ) -> list[Tensor]:
        # Integer members of a group have no gradient, on any rank; leaving them out spares every rank their transfer.
        chosen = [index for index, tensor in enumerate(inputs) if self.describe(tensor).dtype.is_floating]
        if not chosen or not autograd.is_recording():
            return forward(inputs)
        with autograd.pause():
            outputs = forward(inputs)
        given, made = [inputs[index] for index in chosen], [outputs[index] for index in chosen]
        tape: Tape[Tensor] = Tape(
            tuple(tensor.shape for tensor in given),
            # Gradients arrive as classic arrays, and the two kinds do not mix.
            tuple(tensor.detach().as_nd_ndarray() for tensor in given if keep),
            tuple(tensor.detach().as_nd_ndarray() for tensor in made if keep),
        )
        recording.record(given, made, lambda arriving: backward(tape, arriving))
        return outputs

    @staticmethod
    def _is_on_host(tensor: Tensor) -> bool:
        return tensor.context.device_type in _ON_HOST


def _instead_of(value: object) -> str:
    if isinstance(value, mx.sym.Symbol):
        return "a block that calls a collective must not be hybridized, nor must one around it"
    if "complex" in str(getattr(value, "dtype", type(value).__name__)):
        return f"MXNet has no complex numbers, but their real and imaginary parts can be sent: {_PAIRS}"
    return "mx.nd.array makes one of numbers and lists"


def _settle(tensor: Tensor, *, written: bool) -> None:
    """Wait until MXNet has done everything with an array's memory that the program has asked for so far.

    Raises:
        HvdglooError: the array comes from the gradient of a collective, which failed with this error.
        MXNetError: computing it failed otherwise.
    """
    wait = _LIB.MXNDArrayWaitToWrite if written else _LIB.MXNDArrayWaitToRead
    try:
        check_call(wait(tensor.handle))
    except MXNetError as error:
        ours = recording.failure_behind(error)
        if ours is None:
            raise
        raise ours from error
