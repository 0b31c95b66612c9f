"""The Frontend of TensorFlow: ``hvdgloo._collectives.frontend``'s collectives, and what they become in a graph.

Eagerly a collective runs at once. In a graph (a ``tf.function``, or TensorFlow 1's) it becomes an operator that runs
Python and blocks until the collective has ended; its gradient is another collective, see
``hvdgloo._collectives.adjoints``.

**Names.** Operators with effects run in a ``tf.function`` in the order in which they were written, so there the names
of unnamed calls are counted as they run: it does not matter in which order ranks trace their functions, nor how often.
TensorFlow 1's graphs have no such order; there a name is given when the operator is made, and all ranks must make
theirs alike.

**Order.** TensorFlow orders operators that use a common resource, and, among themselves, those that use none. So calls
of nested functions, and branches, which use variables of their own, would run beside each other and beside what
surrounds them. All our operators therefore read one variable before they run and write it after.

**Threads.** In a graph of TensorFlow 1 any number of operators may wait at the same time, and which of them run first
differs between ranks. If they waited in TensorFlow's threads, all of these might wait for operators that no thread is
left to run; so each waits in a thread of its own. The operators of a ``tf.function`` run one after another and hold one
of TensorFlow's threads, which takes less time; see ``hvdgloo.tensorflow._waiting``.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from hvdgloo._collectives.adapter import Tape
from hvdgloo._collectives.adjoints import ADJOINTS, send_back
from hvdgloo._collectives.frontend import Frontend, NamedFrontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._collectives.spec import CollectiveSpec, exchanging
from hvdgloo._job import process
from hvdgloo.tensorflow import _xla as xla
from hvdgloo.tensorflow._adapter import Tensor, TensorFlowAdapter, record
from hvdgloo.tensorflow._failures import also_tensorflows, guarded
from hvdgloo.tensorflow._waiting import counted
from hvdgloo.types import Collective

F = TypeVar("F", bound=Callable[..., Any])


class TensorFlowFrontend(Frontend[Tensor]):
    """A Frontend whose methods may also be called while a graph is being built."""

    @also_tensorflows  # also in the gradient that a user's own tape asks for
    def apply(
        self,
        operation: CollectiveSpec,
        tensors: Sequence[Tensor],
        name: str | None = None,
        *,
        grouped: bool | None = None,
    ) -> list[Tensor]:
        if not in_graph(tensors):
            return super().apply(operation, tensors, name, grouped=grouped)
        group = len(tensors) > 1 if grouped is None else grouped
        given = [_tensor_here(tensor) for tensor in tensors]
        for tensor in given:
            self.adapter.describe(tensor)  # raises for types that cannot be sent
        adjoint = ADJOINTS[operation.collective, operation.op]
        label = self._graph_name(operation, given, name)

        def forward(inputs: Sequence[Tensor]) -> list[Tensor]:
            def run(*arrays: Any) -> Any:
                return self.start(operation, arrays, label, grouped=group, waits=True).result()

            return operator(run, inputs, [t.dtype for t in inputs], [_shape_after(operation, t) for t in inputs])

        # Taken inside one operator, these gradients need to know shapes, or must take part in a collective whose
        # result they do not use, which TensorFlow 1 would leave out of its graph.
        at_run_time = adjoint.keep or operation.collective.sized_late or operation.collective.has_root
        # The factor of this one's gradient is the number of ranks.
        at_run_time |= operation.collective is Collective.REDUCESCATTER and self.context.config.elastic

        def backward(tape: Tape[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
            below = _name_of_gradient(label)
            if not at_run_time:
                return adjoint.rule(self if is_ordered() else self._named(below), operation, tape, gradients)
            count = len(gradients)
            # The inputs are used as such, or for their shapes.
            before = [given[i] for i in range(len(given)) if given[i].dtype.is_floating]

            def run(*arrays: Any) -> Any:
                arriving, inputs, outputs = arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
                left = Tape(tuple(a.shape for a in inputs), inputs, outputs)
                return adjoint.rule(self._named(below), operation, left, arriving)

            every = [*gradients, *before, *tape.outputs]
            return operator(run, every, [t.dtype for t in gradients], [t.shape for t in before])

        return record(forward, backward, given, keep=adjoint.keep, once=at_run_time)

    def alltoall(
        self,
        tensor: Tensor,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        if not in_graph([tensor, splits]):
            return super().alltoall(tensor, splits, name, process_set)
        operation = exchanging(process_set)
        received, counts = self._exchange_in_graph(operation, _tensor_here(tensor), splits, name)
        return received if splits is None else (received, counts)

    alltoall.__doc__ = Frontend.alltoall.__doc__

    @also_tensorflows
    def exchange(
        self, operation: CollectiveSpec, tensor: Tensor, splits: Sequence[int], name: str | None = None
    ) -> list[Tensor]:
        return super().exchange(operation, tensor, splits, name)

    def reads(self, read: Callable[[], int]) -> Tensor:
        """Return a number that is only known when the graph runs, as int32 without dimensions."""
        if tf.executing_eagerly():
            return tf.constant(read(), tf.int32)
        (value,) = operator(lambda: [np.int32(read())], [], [tf.int32], [()])
        return value

    def shares_here(self, process_set: ProcessSet) -> bool:
        """Tell whether the program is for several ranks here; a graph may outlive an elastic job's size."""
        return (self.may_share if in_graph([None]) else self.is_shared)(process_set)

    def number_of(self, process_set: ProcessSet) -> Any:
        """Return the number of ranks in a set, 1 if this rank is alone; a tensor in an elastic job's graph."""

        def read() -> int:
            return max(len(self.sharers(process_set)), 1)

        return self.reads(read) if in_graph([None]) and self.context.config.elastic else read()

    def _exchange_in_graph(
        self, operation: CollectiveSpec, tensor: Tensor, splits: Any, name: str | None
    ) -> tuple[Tensor, Tensor]:
        label = self._graph_name(operation, [tensor], name)
        chosen = [] if splits is None else [tf.convert_to_tensor(splits)]
        counts: list[Tensor] = []

        def forward(inputs: Sequence[Tensor]) -> list[Tensor]:
            def run(array: Any, *rest: Any) -> Any:
                rows = self._splits(operation, array, rest[0] if rest else None)
                return self.start(operation, [array[: sum(rows)]], label, splits=rows, waits=True).result()

            shapes = [_shape_after(operation, tensor), (None,)]
            received, numbers = operator(run, [*inputs, *chosen], [tensor.dtype, tf.int32], shapes)
            counts.append(numbers)
            return [received]

        def backward(tape: Tape[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
            below = _name_of_gradient(label)

            def run(gradient: Any, numbers: Any, array: Any) -> Any:
                (sent,) = send_back(self._named(below), operation, self.adapter.values(numbers).tolist(), [gradient])
                # Rows that were not sent have no gradient.
                whole = np.zeros_like(array)
                whole[: len(sent)] = sent
                return [whole]

            return operator(run, [gradients[0], counts[0], tensor], [tensor.dtype], [tensor.shape])

        (received,) = record(forward, backward, [tensor], keep=False, once=True)
        return received, counts[0]

    def _graph_name(self, operation: CollectiveSpec, tensors: Sequence[Tensor], name: str | None) -> str | None:
        if name is not None or is_ordered():
            return name
        first = "".join(c if c.isalnum() else "_" for c in tensors[0].name)
        return unique_in_graph(f"{operation.collective.value}_{first}")

    def _named(self, label: str | None) -> TensorFlowFrontend:
        """Return the front-end that names a gradient's collectives; None: names are counted as they run."""
        return self if label is None else _NamedTensorFlowFrontend(self.adapter, self._context, label)


class _NamedTensorFlowFrontend(NamedFrontend[Tensor], TensorFlowFrontend):
    """For one run of a gradient's rule, or for the operators that it adds to a graph of TensorFlow 1."""

    def _graph_name(self, operation: CollectiveSpec, tensors: Sequence[Tensor], name: str | None) -> str:
        return name or self.next_name()


FRONTEND = TensorFlowFrontend(TensorFlowAdapter(), process.current, module=__name__)
"""This process's."""


def public(function: F) -> F:
    """Decorate a public function: its errors are TensorFlow's as well, and AutoGraph rewrites the user's code, not
    ours."""
    return cast(F, tf.autograph.experimental.do_not_convert(also_tensorflows(function)))


def in_graph(values: Sequence[Any]) -> bool:
    """Tell whether a collective of these values belongs in a graph; a graph's operator gets arrays when it runs."""
    return not tf.executing_eagerly() and not any(isinstance(value, np.ndarray) for value in values[:1])


def graph_here() -> Any:
    """Return the graph that is being made; None in an eager program."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_ordered() -> bool:
    """Tell whether operators with effects run in the order in which they are made.

    They do not in TensorFlow 1's branches and loops, which are functions, too, but nothing orders their operators.
    """
    in_function = getattr(tf.compat.v1.get_default_graph(), "building_function", False)
    return bool(in_function) and tf.compat.v1.executing_eagerly_outside_functions()


def _name_of_gradient(label: str | None) -> str | None:
    """Return the prefix of the names of a collective's gradient, made from the collective's own.

    A graph of TensorFlow 1 may have several gradients through one collective, which nothing puts in order.
    """
    if label is None or is_ordered():
        return None if label is None else f"{label}.gradient"
    return unique_in_graph(f"{label}.gradient")


_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def unique_in_graph(name: str) -> str:
    """Return a name that no other operator of the current graph has, its branches and loops included."""
    used = _counts.setdefault(_outermost_graph(), Counter())
    used[name] += 1
    return name if used[name] == 1 else f"{name}.{used[name]}"


def _outermost_graph() -> Any:
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph


def operator(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    dtypes: Sequence[Any],
    shapes: Sequence[Any],
) -> list[Tensor]:
    """Make an operator of the current graph that calls ``function`` with arrays; it returns a list of arrays.

    Args:
        function: may wait for other ranks (see **Threads** above); raises our errors as they are (see
            ``hvdgloo.tensorflow._failures``).
        dtypes, shapes: of the outputs.
    """
    xla.meet()
    call = guarded(function)
    with _in_order() as made:
        if not is_ordered():
            outputs = _threads.setdefault(_outermost_graph(), _Threads()).call(call, inputs, dtypes)
        else:
            outputs = tf.numpy_function(counted(call), list(inputs), list(dtypes), stateful=True)
        made += outputs
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return list(outputs)


class _Threads:
    """Operators of one graph that wait in none of the threads that TensorFlow computes with.

    Each becomes the only element of a dataset, and what asks for that waits in a thread of the operator's own. What
    computes the element is one function for all operators of the same types: making and starting one takes time.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[..., Any]] = []
        self._functions: dict[tuple[Any, ...], Any] = {}
        # For a dataset of one element there is nothing to optimise, and trying takes longer than computing it.
        self._options = tf.data.Options()
        self._options.experimental_optimization.apply_default_optimizations = False
        self._options.autotune.enabled = False

    def call(self, call: Callable[..., Any], inputs: Sequence[Tensor], dtypes: Sequence[Any]) -> list[Tensor]:
        """Make an operator of the current graph that calls a function with arrays; it returns a list of arrays."""
        self._calls.append(call)
        given = [tf.constant(len(self._calls) - 1), *inputs]
        unknown = [tf.TensorShape(None)] * len(dtypes)
        mapped = tf.raw_ops.MapDataset(
            input_dataset=tf.raw_ops.TensorDataset(components=given, output_shapes=[each.shape for each in given]),
            other_arguments=[],
            f=self._function(tuple(each.dtype for each in given), tuple(dtypes)),
            output_types=list(dtypes),
            output_shapes=unknown,
            use_inter_op_parallelism=False,  # the thread that asks computes
        )
        element = tuple(tf.TensorSpec(None, dtype) for dtype in dtypes)
        dataset = tf.data.experimental.from_variant(mapped, element).with_options(self._options)
        waiting = tf.raw_ops.DatasetToSingleElement(
            dataset=tf.data.experimental.to_variant(dataset), output_types=list(dtypes), output_shapes=unknown
        )
        return list(waiting)

    def _function(self, given: tuple[Any, ...], returned: tuple[Any, ...]) -> Any:
        if (given, returned) not in self._functions:

            def run(*tensors: Tensor) -> Any:
                return tf.numpy_function(self._dispatch, list(tensors), list(returned), stateful=True)

            specs = [tf.TensorSpec(None, dtype) for dtype in given]
            with _outermost_graph().as_default():
                self._functions[given, returned] = tf.function(run, autograph=False).get_concrete_function(*specs)
        return self._functions[given, returned]

    def _dispatch(self, number: Any, *arrays: Any) -> Any:
        return self._calls[int(number)](*arrays)


_threads: weakref.WeakKeyDictionary[Any, _Threads] = weakref.WeakKeyDictionary()


def effect(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """Make an operator that calls ``function`` with arrays and has no output; it is returned, to run before others."""

    def call(*arrays: Any) -> Any:
        function(*arrays)
        return np.int32(0)

    xla.meet()
    with _in_order() as made:
        made.append(tf.numpy_function(guarded(call), list(inputs), tf.int32, stateful=True))
    return made[0]


@contextmanager
def _in_order() -> Iterator[list[Tensor]]:
    """Surround an operator on the CPU, whose outputs are put into the list; see **Order** above."""
    made: list[Tensor] = []
    with tf.device("/cpu:0"):  # where its arrays are, also if there is a GPU
        if not is_ordered():
            yield made
            return
        turn = _turn()
        with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=turn, dtype=tf.int64)]):
            yield made
        with tf.control_dependencies(made):
            tf.raw_ops.AssignVariableOp(resource=turn, value=tf.constant(0, tf.int64))


_lock = threading.Lock()
_turns: list[Any] = []


def _turn() -> Tensor:
    """Return the current graph's handle of the variable that puts all our operators in order.

    The variable is made late: TensorFlow begins to run with it. And it is made of raw operators: a function that is
    traced for the second time allows no ``tf.Variable`` to be made.
    """
    with _lock:
        if not _turns:
            with tf.init_scope(), tf.device("/cpu:0"):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="hvdgloo_turn")
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
                _turns.append(handle)
    return _captured(_turns[0], tf.compat.v1.get_default_graph())


def _captured(handle: Tensor, graph: Any) -> Tensor:
    """Capture a handle in a function's graph.

    In a branch or a loop the handle comes through the surrounding graph, and in their gradients from the branch or loop
    itself, if that has it: TensorFlow finds nothing else there, and of two ways for one tensor it would lose one.
    """
    known = handle
    if graph.is_control_flow_graph:
        forward = getattr(graph, "_forward_graph", None)
        known = None if forward is None else _captured_before(handle, forward)
        known = _captured(handle, graph.outer_graph) if known is None else known
    with graph.as_default():
        return graph.capture(known)


def _captured_before(handle: Tensor, graph: Any) -> Tensor | None:
    """Return a handle in a graph that is complete; None if the graph does not have it."""
    known = _captured_before(handle, graph.outer_graph) if graph.is_control_flow_graph else handle
    return next((internal for external, internal in graph.captures if external is known), None)


def _tensor_here(value: Any) -> Tensor:
    """Make a value a tensor of the current graph. A gradient that used it from another graph as well would lose one."""
    tensor = tf.convert_to_tensor(value)
    return tf.compat.v1.get_default_graph().capture(tensor) if is_ordered() else tensor


def _shape_after(operation: CollectiveSpec, tensor: Tensor) -> Any:
    if not operation.collective.along_rows or tensor.shape.rank in (None, 0):
        return tensor.shape
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])
