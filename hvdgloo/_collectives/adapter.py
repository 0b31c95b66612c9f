"""The interface to each framework's own tensors, and nothing else.

A TensorAdapter never sees names, ranks, fusion or process sets; the Frontend never sees a framework. Adding a framework
means writing these nine methods.

The engine reads and writes memory in row-major order: a CPU's, and torch's on a CUDA device. A tensor that is such
memory is *shared* with it: the exported Buffer's owner is the tensor itself, and nothing is copied. Any other tensor
(not contiguous, on another kind of device, in foreign byte order) is *staged*: the owner is a private copy, and
``deliver`` copies the result to where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy.typing as npt

from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import Buffer, DType, TensorSpec

T = TypeVar("T")


def not_sendable(kind: str, tensors: str, supported: Iterable[object], pairs: str) -> InvalidArgumentError:
    """The error for tensors of an element type that no collective can carry.

    Args:
        kind: the type's name.
        tensors: what the framework calls its tensors.
        supported: the types that can be sent.
        pairs: what makes real numbers of complex ones.
    """
    if "complex" in kind:
        return InvalidArgumentError(
            f"complex numbers ({kind}) cannot be sent; their real and imaginary parts can: {pairs}"
        )
    if kind == "string":
        return InvalidArgumentError(
            f"{tensors} of strings cannot be sent; broadcast_object() and allgather_object() send any Python object"
        )
    return InvalidArgumentError(
        f"{tensors} of type {kind} cannot be sent; the types that can are {', '.join(map(str, supported))}"
    )


def kind_of(array: npt.NDArray[Any]) -> str:
    """The name of an array's element type: "string" for each of the types that numpy has for text."""
    of_objects = (
        array.dtype.kind == "O" and array.size > 0 and all(isinstance(each, (str, bytes)) for each in array.flat)
    )
    return "string" if of_objects or array.dtype.kind in "SUT" else array.dtype.name


@dataclass(frozen=True)
class Tape(Generic[T]):
    """The record of a forward call for its backward call.

    Attributes:
        shapes: of the inputs.
        inputs, outputs: the tensors, only if they were asked to be kept.
    """

    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[T, ...] = ()
    outputs: tuple[T, ...] = ()


class TensorAdapter(Protocol[T]):
    """The tensors of one framework, as the Frontend needs them."""

    def owns(self, tensor: object) -> bool:
        """Return whether this is a tensor of the framework."""

    def describe(self, tensor: T) -> TensorSpec:
        """Element type and shape, and the kind of device that the exported memory is on.

        Raises:
            InvalidArgumentError: naming the element type, if no collective can carry it.
        """

    def export(self, tensor: T, *, writable: bool = False, known: TensorSpec | None = None) -> Buffer:
        """The tensor's memory if the engine can use it, else a copy's.

        Args:
            tensor: anything that ``owns`` accepts.
            writable: the result is to be written back into the tensor.
            known: what ``describe`` would probably return: an adapter that compares faster than it describes returns
                this object if it is right.

        Returns:
            a Buffer whose owner is ``tensor`` itself if it is shared, and a tensor of the framework if it is staged.

        Raises:
            InvalidArgumentError: not a tensor of the framework, an element type that no collective can carry, or memory
                that cannot be written although ``writable`` asks for it.
        """

    def allocate(self, spec: TensorSpec, like: T) -> T:
        """A new uninitialised tensor that ``export`` shares, from which ``deliver`` is cheap for tensors like ``like``.

        ``spec.device`` says where: "cuda" means the GPU of ``like``.

        May be called on an engine thread.
        """

    def deliver(self, result: T, target: T, *, in_place: bool) -> T:
        """Hand a result from memory that the engine uses to the user.

        Args:
            result: the owner of the memory that holds it.
            target: the tensor that the user passed.
            in_place: write into ``target`` (nothing is left to copy if it is ``result``), else return a tensor like it.

        Returns:
            ``target``, or a tensor on its device.
        """

    def values(self, tensor: T) -> npt.NDArray[Any]:
        """A tensor's elements as an array of its shape in the host's memory; bfloat16 may become float32.

        Blocks until they have been computed. The array may be the tensor's own memory.
        """

    def cast(self, tensor: T, dtype: DType) -> T:
        """A tensor of the same values in another element type; differentiable where the framework can."""

    def fence(self, tensors: Sequence[T]) -> Callable[[], None] | None:
        """Return a function to call, from any thread, before the tensors' exported memory is used; None if it may be
        used at once.

        What that thread then does with the memory (on a CUDA device, on its current stream) comes after everything that
        has been done with the tensors so far. Called once the results are allocated, by the thread that allocated them.
        """

    def differentiable(
        self,
        forward: Callable[[Sequence[T]], list[T]],
        backward: Callable[[Tape[T], Sequence[T]], Sequence[T]],
        inputs: Sequence[T],
        *,
        keep: bool,
    ) -> list[T]:
        """``forward(inputs)``, with ``backward`` recorded as its gradient where the framework records gradients.

        Args:
            forward: takes the inputs and returns the outputs.
            backward: takes the tape and the gradients of the outputs, and returns the gradients of the inputs.
            inputs: the tensors.
            keep: whether the tape holds inputs and outputs, which costs their memory.
        """
