"""The Frontend of JAX: ``hvdgloo._collectives.frontend``'s collectives, and what they become in a traced function.

On arrays a collective runs at once. While JAX traces a function (``jax.jit``, ``jax.grad``, a scan's body and so on),
it becomes a primitive (``_primitive``) that runs when the function does; its gradient is another collective, see
``hvdgloo._collectives.adjoints``.

**Names.** Calls run in the order in which they were written, so the names of unnamed calls are counted as they run: it
does not matter how often ranks trace their functions.

**Sizes.** A traced function's shapes are fixed. So there, all ranks have as many rows; and a call whose shapes depend
on the number of ranks, or whose gradient does, must be traced again if that changes (``_retracing``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.dtypes import float0

from hvdgloo._collectives.adapter import Tape, TensorAdapter
from hvdgloo._collectives.adjoints import ADJOINTS, send_back
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.frontend import Frontend, NamedFrontend
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._collectives.spec import CollectiveSpec, broadcasting, resolve_op
from hvdgloo._job import process
from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.jax._adapter import JaxAdapter
from hvdgloo.jax._execution import Call, MemoryCore
from hvdgloo.jax._primitive import collective, is_traced, wait_for_compiled
from hvdgloo.jax._retracing import depends_on_size
from hvdgloo.types import Collective, ReduceOp, TensorSpec

Tree = Any
"""An array, or a pytree of arrays."""

_LEAF = jax.tree.structure(0)


class JaxFrontend(Frontend[Any]):
    """A Frontend whose methods may also be called in functions that JAX transforms or compiles, and take pytrees."""

    def __init__(
        self, adapter: TensorAdapter[Any], context: Callable[[], Context], *, module: str | None = None
    ) -> None:
        super().__init__(adapter, context, module=module)
        self.compiled = MemoryCore(context, module)

    # Pytrees ----------------------------------------------------------------------------------------------------------

    def allreduce(
        self,
        tensor: Tree,
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor[Any] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Tree:
        if average is not None:
            average, op = None, resolve_op(average, op, depth=2)
        leaves, structure = jax.tree.flatten(tensor)
        settings = average, name, compression, op, prescale_factor, postscale_factor, process_set
        if structure == _LEAF:
            return super().allreduce(tensor, *settings)
        return jax.tree.unflatten(structure, self.grouped_allreduce(leaves, *settings))

    def allgather(self, tensor: Tree, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tree:
        leaves, structure = jax.tree.flatten(tensor)
        if structure == _LEAF:
            return super().allgather(tensor, name, process_set)
        return jax.tree.unflatten(structure, self.grouped_allgather(leaves, name, process_set))

    def broadcast(
        self, tensor: Tree, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Tree:
        leaves, structure = jax.tree.flatten(tensor)
        if structure == _LEAF:
            return super().broadcast(tensor, root_rank, name, process_set)
        operation, group = broadcasting(root_rank, process_set), self._own_group(leaves)
        return jax.tree.unflatten(structure, self.apply(operation, group, name, grouped=True) if group else [])

    def reducescatter(
        self,
        tensor: Tree,
        name: str | None = None,
        compression: Compressor[Any] = NoneCompressor,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Tree:
        leaves, structure = jax.tree.flatten(tensor)
        settings = name, compression, op, process_set, prescale_factor, postscale_factor
        if structure == _LEAF:
            return super().reducescatter(tensor, *settings)
        return jax.tree.unflatten(structure, self.grouped_reducescatter(leaves, *settings))

    # In functions that are traced -------------------------------------------------------------------------------------

    def apply(
        self,
        operation: CollectiveSpec,
        tensors: Sequence[Any],
        name: str | None = None,
        *,
        grouped: bool | None = None,
        ends_step: bool = False,
    ) -> list[Any]:
        """Do as ``Core.apply``.

        Args:
            ends_step: a training step has ended when this has.
        """
        group = len(tensors) > 1 if grouped is None else grouped
        if not is_traced(tensors):
            results = self.start(operation, tensors, name, grouped=group, waits=True).result()
            if ends_step:
                self.end_step()
            return results
        specs = [self.adapter.describe(tensor) for tensor in tensors]  # raises for types that cannot be sent
        adjoint = ADJOINTS[operation.collective, operation.op]
        label = self._call_name(name)

        def run(*arrays: Any) -> tuple[Any, ...]:
            if not is_traced(arrays):
                return tuple(self.start(operation, arrays, label, grouped=group, waits=True).result())
            inputs = tuple(self.adapter.describe(array) for array in arrays)
            results = tuple(self._after(operation, spec) for spec in inputs)
            call = Call(self.compiled.home, operation, label, group, inputs, results, ends_step=ends_step)
            return tuple(collective(call, arrays))

        def backward(kept: Any, arriving: Sequence[Any]) -> tuple[Any, ...]:
            floating = [index for index, gradient in enumerate(arriving) if gradient.dtype != float0]
            inputs, outputs = kept if kept is not None else ((), ())
            tape = Tape(
                tuple(specs[index].shape for index in floating),
                tuple(inputs[index] for index in floating if kept is not None),
                tuple(outputs[index] for index in floating if kept is not None),
            )
            gradients = [arriving[index] for index in floating]
            rules = self._rules(operation, label, gradients)

            def rule(tape: Tape[Any], gradients: Sequence[Any]) -> list[Any]:
                return list(adjoint.rule(rules, operation, tape, gradients))

            computed = _once(rule, operation)(tape, gradients) if adjoint.keep else rule(tape, gradients)
            found: list[Any] = [np.zeros(spec.shape, float0) for spec in specs]
            for index, gradient in zip(floating, computed, strict=True):
                found[index] = gradient
            return tuple(found)

        return list(_with_gradient(run, backward, keep=adjoint.keep)(*tensors))

    def alltoall(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        array = self._own(tensor)
        if is_traced([splits]) and isinstance(splits, jax.core.Tracer):
            raise InvalidArgumentError(
                "in a compiled function splits= determine a shape, so they are numbers, the same on all ranks; they "
                "cannot be computed in it"
            )
        return super().alltoall(array, splits, name, process_set)

    def exchange(
        self, operation: CollectiveSpec, tensor: Any, splits: Sequence[int], name: str | None = None
    ) -> list[Any]:
        shape = self.adapter.describe(tensor).shape
        # Rows that are not sent have no gradient; slicing tells JAX so.
        sent = tensor[: sum(splits)] if shape and sum(splits) < shape[0] else tensor
        if not is_traced([tensor]):
            return self.start(operation, [sent], self._call_name(name), splits=splits, waits=True).result()
        label = self._call_name(name)
        ranks, own = self._members_traced(operation)
        counts = (splits[own],) * ranks
        came: list[int] = [*counts]
        numbers = [jnp.asarray(counts, jnp.int32)]

        def run(array: Any) -> Any:
            if not is_traced([array]):
                received, eager = self.start(operation, [array], label, splits=splits, waits=True).result()
                came[:], numbers[:] = np.asarray(eager).tolist(), [eager]
                return received
            spec = self.adapter.describe(array)
            result = TensorSpec(spec.dtype, (sum(counts), *spec.shape[1:]))
            call = Call(self.compiled.home, operation, label, False, (spec,), (result,), tuple(splits), counts)
            return collective(call, [array])[0]

        def backward(_: None, gradient: Any) -> tuple[Any, ...]:
            rules = self._rules(operation, label, [gradient])
            return tuple(send_back(rules, operation, came, [gradient]))

        received = _with_gradient(run, backward)(sent)
        return [received, *numbers]

    def zeros(self, like: Any) -> Any:
        return jnp.zeros_like(like)

    # On arrays --------------------------------------------------------------------------------------------------------

    def start(
        self, operation: CollectiveSpec, tensors: Sequence[Any], name: str | None = None, **how: Any
    ) -> Pending[Any]:
        self._check_eager(operation, tensors)
        return super().start(operation, tensors, name, **how)

    def start_array(
        self, operation: CollectiveSpec, array: npt.NDArray[Any], name: str | None = None
    ) -> Callable[[], npt.NDArray[Any]]:
        self._check_eager(operation, ())
        return super().start_array(operation, array, name)

    def numbered_array(
        self, operation: CollectiveSpec, array: npt.NDArray[Any], name: str | None = None
    ) -> tuple[npt.NDArray[Any], int]:
        self._check_eager(operation, ())
        return super().numbered_array(operation, array, name)

    def join(self, device: int = -1) -> int:
        self._check_eager(CollectiveSpec(Collective.JOIN), ())
        return super().join(device)

    @staticmethod
    def _check_eager(operation: CollectiveSpec, tensors: Sequence[Any]) -> None:
        if is_traced(tensors):
            raise InvalidArgumentError(
                f"this {operation.collective.value} cannot be part of a function that JAX traces, where it would run "
                "once, and not when the function does; call it outside"
            )
        wait_for_compiled()

    def own(self, tensor: Any) -> Any:
        """Return an array: a number, or an array of numpy's, becomes one.

        Raises:
            InvalidArgumentError: it is something else.
        """
        return self._own(tensor)

    def _own(self, tensor: Any) -> Any:
        if isinstance(tensor, (np.ndarray, np.generic, int, float, complex)):
            tensor = jnp.asarray(tensor)
        return super()._own(tensor)

    # For both ---------------------------------------------------------------------------------------------------------

    def _call_name(self, name: str | None) -> str | None:
        return name

    def _after(self, operation: CollectiveSpec, spec: TensorSpec) -> TensorSpec:
        """Return the result's type and shape in a traced function."""
        if not operation.collective.along_rows:
            return spec
        if not spec.shape:
            raise InvalidArgumentError(
                f"{operation.collective.value} needs a first dimension, and this array has none: array[None] adds one"
            )
        ranks, _ = self._members_traced(operation)
        first, *others = spec.shape
        rows = self.own_rows(operation, first) if operation.collective.reduces else first * ranks
        return TensorSpec(spec.dtype, (rows, *others))

    def _members_traced(self, operation: CollectiveSpec) -> tuple[int, int]:
        depends_on_size()
        return self.members(operation)

    def _rules(self, operation: CollectiveSpec, label: str | None, gradients: Sequence[Any]) -> JaxFrontend:
        """Return the Frontend on which the gradient of a call runs its collectives."""
        traced = is_traced(gradients)
        if traced and (operation.collective is not Collective.ALLREDUCE or operation.op is ReduceOp.PRODUCT):
            depends_on_size()
        return _Rules(self, None if label is None else f"{label}.gradient", traced)


for _name in ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "join"):
    getattr(JaxFrontend, _name).__doc__ = getattr(Frontend, _name).__doc__


class _Rules(NamedFrontend[Any], JaxFrontend):
    """For one run of a gradient's rule.

    Args:
        parent: the Frontend of the call.
        label: the prefix of the names; None: names are counted as calls run.
        traced: shapes are the same on all ranks.
    """

    def __init__(self, parent: JaxFrontend, label: str | None, traced: bool) -> None:
        super().__init__(parent.adapter, parent._context, label or "")
        self.compiled = parent.compiled
        self._traced = traced

    def _call_name(self, name: str | None) -> str | None:
        return name or self.next_name()

    def next_name(self) -> str:
        return cast(str, super().next_name() if self._label else None)

    def gather_integers(self, values: Sequence[int], process_set: int = 0, name: str | None = None) -> npt.NDArray[Any]:
        if not self._traced:
            return super().gather_integers(values, process_set, name)
        ranks, _ = self.members(CollectiveSpec(Collective.ALLGATHER, process_set=process_set))
        return np.tile(np.asarray(values, np.int64), (ranks, 1))


def _with_gradient(run: Callable[..., Any], backward: Callable[..., Any], *, keep: bool = False) -> Any:
    """Return a function with a gradient of its own.

    Args:
        run: the function.
        backward: takes the arguments and the results, or None, and the results' gradients.
        keep: arguments and results are kept for ``backward``.
    """
    function = jax.custom_vjp(run)

    def forward(*arrays: Any) -> Any:
        outputs = function(*arrays)  # not ``run``: a second derivative is taken of this
        return outputs, (arrays, outputs) if keep else None

    function.defvjp(forward, backward)

    def call(*arrays: Any) -> Any:
        try:
            return function(*arrays)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise InvalidArgumentError(
                "collectives have no derivatives in forward mode (jax.jvp, jax.jacfwd, jax.hessian); use jax.grad or "
                "jax.jacrev, also for second derivatives: jax.jacrev(jax.jacrev(function))"
            ) from error

    return call


def _once(
    rule: Callable[[Tape[Any], Sequence[Any]], list[Any]], operation: CollectiveSpec
) -> Callable[[Tape[Any], Sequence[Any]], list[Any]]:
    """Return a rule that JAX refuses to differentiate again, because the result would be wrong."""

    def call(tape: Tape[Any], gradients: Sequence[Any]) -> list[Any]:
        def run(inputs: Any, outputs: Any, gradients: Any) -> Any:
            return rule(Tape(tape.shapes, inputs, outputs), gradients)

        def refuse(*_: Any) -> Any:
            raise InvalidArgumentError(
                f"the gradient of a {operation.op.name.lower()} allreduce cannot be differentiated a second time"
            )

        found: list[Any] = _with_gradient(run, refuse)(tape.inputs, tape.outputs, gradients)
        return found

    return call


FRONTEND = JaxFrontend(JaxAdapter(), process.current, module=__name__)
"""This process's."""
