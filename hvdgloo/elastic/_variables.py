"""States that consist of variables: TensorFlow's, Keras's on each of its backends, and tf_keras's.

None of these libraries is imported here: what their variables have in common is enough. A save copies each variable
into an array that is kept from one save to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.arrays import broadcast_arrays
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._platform.error_tokens import recall
from hvdgloo.elastic.loop import run_fn
from hvdgloo.elastic.state import ObjectState
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError, MismatchError

T = TypeVar("T")
Array = npt.NDArray[Any]
Variable = Any
"""A ``tf.Variable``, or a ``keras.Variable`` of any backend."""


class VariablesState(ObjectState):
    """Variables, besides plain attributes. Subclasses say which, and may say how they are read and written.

    Args:
        frontend: what variables are sent by; its tensors are, or may be, arrays.
        kwargs: see ``ObjectState``.
    """

    def __init__(self, frontend: Frontend[Any], **kwargs: Any) -> None:
        self._frontend = frontend
        self._kept: list[Array] = []
        super().__init__(frontend.broadcast_object, frontend.rank, **kwargs)

    def save(self) -> None:
        """Keep a copy of the variables, and of the attributes.

        Raises:
            InvalidArgumentError: (a ValueError) an attribute can be neither copied nor pickled.
        """
        # All are read before the first is kept: reading waits for what computes them, which may fail.
        now = self._read(self._variables())
        super().save()
        for index, array in enumerate(now):
            if index == len(self._kept):
                self._kept.append(np.array(array))
            elif self._kept[index].shape == array.shape and self._kept[index].dtype == array.dtype:
                np.copyto(self._kept[index], array)
            else:
                self._kept[index] = np.array(array)
        del self._kept[len(now) :]

    def restore(self) -> None:
        """Give the variables, and the attributes, the values that were saved last.

        Variables that were made since, such as an optimizer's at its first step, stay as they are.
        """
        super().restore()
        variables = self._variables()
        count = min(len(variables), len(self._kept))
        self._write(variables[:count], self._kept[:count])

    def sync(self) -> None:
        """Give all workers the variables and the attributes of one, and save them; collective.

        Raises:
            MismatchError: on all ranks: their variables differ in number, shape or type.
        """
        if not self._progress.unchanged:
            self._receive(self._progress.root)
        super().sync()

    def _variables(self) -> list[Variable]:
        """Return all variables that are saved; new ones come after the existing ones."""
        raise NotImplementedError

    def _shared(self) -> list[Variable]:
        """Return the variables that all workers have alike, which are sent to newcomers."""
        return self._variables()

    def _read(self, variables: Sequence[Variable]) -> list[Array]:
        """Return the variables' values, which need not be copies."""
        return [_value(variable) for variable in variables]

    def _write(self, variables: Sequence[Variable], values: Sequence[Array]) -> None:
        for variable, value in zip(variables, values, strict=True):
            # A framework that never changes its arrays (JAX) may take over the one that it is given.
            variable.assign(value if _is_assigned_by_copying(variable) else np.array(value))

    def _receive(self, root: int) -> None:
        shared = self._shared()
        values = self._read(shared)
        described = [(tuple(value.shape), value.dtype.name) for value in values]
        everyone = self._frontend.allgather_object(described, "elastic.variables")
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[root]:
                raise MismatchError(_difference(rank, theirs, root, everyone[root]), name="elastic.variables")
        # As bytes, so that every type of any framework can be sent.
        received = broadcast_arrays(self._frontend, [_bytes(value) for value in values], root, "elastic.variables")
        if self._frontend.rank() != root:
            arrays = [sent.view(value.dtype).reshape(value.shape) for sent, value in zip(received, values, strict=True)]
            self._write(shared, arrays)

    def _fingerprint(self) -> str:
        hashed = hashlib.sha256()
        for index, (value, kept) in enumerate(zip(self._read(self._variables()), self._kept, strict=False)):
            now = _bytes(value)
            if value.shape != kept.shape or not np.array_equal(now, _bytes(kept)):
                hashed.update(f"{index} {value.shape};".encode())
                hashed.update(now.data)
        return super()._fingerprint() + hashed.hexdigest()


class ModelState(VariablesState):
    """A model's variables and its optimizer's, besides plain attributes.

    Args:
        frontend: see ``VariablesState``.
        model: of Keras 3 or of tf_keras, built.
        optimizer: None for the one that the model was compiled with, if it was.
        kwargs: see ``ObjectState``.

    Seeds of random generators (of Dropout, for example) are saved with the model and restored, and never sent: they
    are each worker's own.

    Raises:
        InvalidArgumentError: (a ValueError) the model is not built.
    """

    def __init__(self, frontend: Frontend[Any], model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", False):
            raise InvalidArgumentError(
                f"the model {getattr(model, 'name', model)!r} is not built, so it has no variables yet: call "
                "model.build(input_shape), or the model itself once on some data, before the state is made"
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self._build()
        super().__init__(frontend, **kwargs)

    def _build(self) -> None:
        """Make the optimizer's variables: a newcomer's must be there to receive what others have."""
        optimizer = self.optimizer
        if optimizer is None or getattr(optimizer, "built", False):
            return
        # Optimizers of tf_keras, of its two kinds, leave alone what they have made already.
        build = getattr(optimizer, "build", None) or getattr(optimizer, "_create_all_weights", None)
        if build is not None:
            build(self.model.trainable_variables)

    def _variables(self) -> list[Variable]:
        # On JAX, what a step has computed is not in the variables while ``fit`` runs, unless one asks for it.
        synchronize = getattr(self.model, "jax_state_sync", None)
        if synchronize is not None:
            synchronize()
        return [*self.model.variables, *self._of_optimizer()]

    def _shared(self) -> list[Variable]:
        return [*self.model.weights, *self._of_optimizer()]

    def _of_optimizer(self) -> list[Variable]:
        if self.optimizer is None:
            return []
        variables = self.optimizer.variables
        own = list(variables() if callable(variables) else variables)  # it is callable in tf_keras
        # The scale of tf_keras's LossScaleOptimizer is not among its variables.
        scale: Any = getattr(self.optimizer, "_loss_scale", None)
        return [*own, scale.current_loss_scale, scale.counter] if hasattr(scale, "counter") else own


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Make a training function elastic: it goes on when workers are lost or come; see ``hvdgloo.elastic.run_fn``.

    Args:
        func: takes a state, and whatever else it is given.
    """
    return run_fn(func, failure=failure_in)


def failure_in(error: BaseException) -> HorovodInternalError | None:
    """Return the failure of the job that an exception stands for, also if native code has turned it into another."""
    found = error if isinstance(error, HorovodInternalError) else recall(str(error))
    return found if isinstance(found, HorovodInternalError) else None


def _inner(variable: Variable) -> Any:
    """Return the framework's own object: Keras's variables have one inside."""
    inside = getattr(variable, "value", None)
    return variable if inside is None or callable(inside) else inside


def _is_assigned_by_copying(variable: Variable) -> bool:
    inner = _inner(variable)
    return hasattr(inner, "read_value") or hasattr(inner, "detach")


def _value(variable: Variable) -> Array:
    inner = _inner(variable)
    if hasattr(inner, "read_value"):  # TensorFlow's; a tensor that is read shares the variable's memory
        tensor = inner.read_value()
        return np.asarray(tensor if tensor.shape.rank else tensor.numpy())
    if hasattr(inner, "detach"):  # torch's
        tensor = inner.detach().cpu()
        # numpy has no bfloat16; float32 holds each of its values.
        return np.asarray(tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor)
    return np.asarray(inner)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _difference(rank: int, theirs: Sequence[Any], root: int, wanted: Sequence[Any]) -> str:
    advice = "all workers must build the same model and optimizer before elastic.run"
    if len(theirs) != len(wanted):
        here, there = (
            f"rank {rank}'s state has {len(theirs)} variables",
            f"rank {root}'s, the newest, has {len(wanted)}",
        )
        return f"{here}, and {there}: {advice}"
    index = next(i for i, (one, other) in enumerate(zip(theirs, wanted, strict=True)) if one != other)
    (shape, kind), (wanted_shape, wanted_kind) = theirs[index], wanted[index]
    return (
        f"variable {index} of the state is {kind} of shape {shape} on rank {rank}, and {wanted_kind} of shape "
        f"{wanted_shape} on rank {root}, whose state is the newest: {advice}"
    )
