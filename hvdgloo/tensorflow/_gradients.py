"""Reducing the gradients of a step: what the tape and all optimizers call.

**Two phases.** In a graph every gradient gets an operator that only hands it to the engine, and one last operator waits
for all. So they travel while the rest of the backward pass is computed, and no operator blocks a thread that another
rank's progress depends on. A ``tf.function`` runs operators with effects in the order in which they are made: the last
variable's gradient, which the backward pass computes first, is made first.

**Elastic jobs.** A function that is traced in a job of one process reduces as well: the job may have grown when it
runs. Its operators look at the size as they run, and return their inputs if there is no other rank.

**Interrupts.** Where Ctrl-C ends an eager reduction, other ranks may have made the step. So the next reduction of the
same variables continues the interrupted one, and returns its results; a reduction of other variables completes it first
and drops its results.

**Names** are made of the variables' shapes, types and names, and of their places in the list. They do not depend on the
order in which ranks trace their functions, on how often they did, or on what else a rank has built: see
``hvdgloo._training.labels``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import tensorflow as tf

from hvdgloo._collectives.adapter import Tape
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.process_sets import ProcessSet, process_set_id
from hvdgloo._collectives.spec import CollectiveSpec, gathering
from hvdgloo._job.context import Context
from hvdgloo._platform import interrupts
from hvdgloo._training.labels import agreed_labels, labels, path_of
from hvdgloo._training.options import GradientOptions, check, label, make_reducer, named_groups
from hvdgloo._training.weights import check_late
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.tensorflow import _sparse as sparse
from hvdgloo.tensorflow._adapter import Tensor, record
from hvdgloo.tensorflow._failures import also_tensorflows
from hvdgloo.tensorflow._frontend import TensorFlowFrontend, effect, in_graph, is_ordered, operator, unique_in_graph
from hvdgloo.tensorflow._weights import REMEDY, checksum_of
from hvdgloo.types import Collective, ReduceOp


class GradientSync:
    """Reduces lists of gradients over the ranks.

    Args:
        frontend: where collectives are submitted.
        options: how gradients are reduced.
        compares: the variables are equal on all ranks when their gradients are reduced, and are compared once.

    Raises:
        InvalidArgumentError: (a ValueError) an option cannot be used.
    """

    def __init__(self, frontend: TensorFlowFrontend, options: GradientOptions, *, compares: bool = True) -> None:
        self.frontend = frontend
        self.options = options
        self.compares = compares
        self._sources: dict[int, Any] = {}
        self._latest: Context | None = None
        self._asked: dict[str, Pending[Tensor]] = {}  # eager questions to all ranks, until they are answered
        make_reducer(frontend, options, [])  # raises for what it cannot do
        check(options.groups)

    @property
    def active(self) -> bool:
        """True if there are other ranks to reduce with, or may be when the graph runs that is being built."""
        return self.frontend.shares_here(self.options.process_set)

    def register_local_source(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone."""
        self._sources[id(inner(variable))] = variable

    @property
    def local_sources(self) -> list[Any]:
        """The variables whose gradients are left to this rank alone."""
        return list(self._sources.values())

    def is_local(self, variable: Any) -> bool:
        """Tell whether a variable's gradient is left to this rank alone."""
        return id(inner(variable)) in self._sources

    @also_tensorflows
    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        differentiable: bool = False,
        among: tuple[Sequence[Any], Sequence[Any]] | None = None,
    ) -> list[Any]:
        """Reduce gradients.

        Args:
            gradients: for each variable a tensor, a ``tf.IndexedSlices`` or None, alike on all ranks. They are not
                changed.
            variables: what they are the gradients of.
            differentiable: the results have gradients in turn, which all ranks then ask for alike; not if any of them
                is sparse.
            among: all of the step's gradients and variables, if those without gradients have been left out.

        Returns:
            new tensors, on every rank the same; None where None was given. Gradients of local variables are this
            rank's, divided by the number of ranks if ``scale_local_gradients``.
        """
        if not self.active:
            return list(gradients)
        if in_graph([None]):
            return self._reduce_shared(gradients, variables, differentiable, among)
        with _until_done(self.frontend):
            return self._reduce_shared(gradients, variables, differentiable, among)

    def _reduce_shared(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        differentiable: bool,
        among: tuple[Sequence[Any], Sequence[Any]] | None,
    ) -> list[Any]:
        results = list(gradients)
        shared: list[int] = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if self.is_local(variable):
                results[index] = self._local(gradient)
                continue
            if sparse.is_sparse(gradient) and self.options.sparse_as_dense:
                results[index] = tf.convert_to_tensor(gradient)
            shared.append(index)
        if shared:
            chosen = [results[index] for index in shared]
            names = self._names(*(among or (results, variables)))
            reduce = self._reduce_differentiably if differentiable else self._reduce
            reduced = reduce(chosen, [variables[index] for index in shared], names)
            for index, gradient in zip(shared, reduced, strict=True):
                results[index] = gradient
        return results

    def alike(self, gradients: Sequence[Any], reduced: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        """Return what ``reduce`` has returned, with a gradient that is not finite if one was given on any rank.

        For deciding by that whether to step. Sums have this property anyway.

        Args:
            gradients, variables: as for ``reduce``.
            reduced: its results.
            name: what matches the ranks' calls.
        """
        results = list(reduced)
        given = [gradient for gradient in gradients if gradient is not None]
        pairs = enumerate(zip(gradients, variables, strict=True))
        shared = [at for at, (gradient, of) in pairs if gradient is not None and not self.is_local(of)]
        adds = self.options.op in (ReduceOp.AVERAGE, ReduceOp.SUM)
        if shared and not (adds and len(shared) == len(given)):
            finite = [tf.reduce_all(tf.math.is_finite(getattr(g, "values", g))) for g in given]
            everywhere = self.agree(tf.reduce_all(finite), name)
            first = tf.convert_to_tensor(results[shared[0]])
            results[shared[0]] = tf.where(everywhere, first, tf.cast(float("nan"), first.dtype))
        return results

    @also_tensorflows
    def agree(self, holds: Any, name: str) -> Any:
        """Tell whether a boolean tensor holds on all ranks; ``name`` matches their calls."""
        if not self.active:
            return holds

        def exchange(flag: Any) -> list[Any]:
            if not self.frontend.is_shared(self.options.process_set):
                return [flag]
            number = process_set_id(self.options.process_set)
            agreement = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.MIN, process_set=number)
            if not in_graph([None]):
                return self._ask(agreement, flag, name)
            return self.frontend.start(agreement, [flag], name, waits=True).result()

        flag = tf.cast(holds, tf.uint8)
        (everywhere,) = operator(exchange, [flag], [flag.dtype], [flag.shape]) if in_graph([None]) else exchange(flag)
        return tf.cast(everywhere, tf.bool)

    def _ask(self, operation: CollectiveSpec, flag: Tensor, name: str) -> list[Tensor]:
        """Exchange a flag; where that was interrupted, the next call goes on."""
        if name not in self._asked:
            held = interrupts.hold()
            try:
                self._asked[name] = self.frontend.start(operation, [flag], name, waits=True)
            finally:
                interrupts.release(held)
        try:
            return (self._asked[name].result(), self._asked.pop(name))[0]
        except Exception:
            self._asked.pop(name, None)
            raise

    def renewed(self) -> Any:
        """Tell whether the job has changed since the previous call (in a graph, since the previous run): ranks that add
        gradients up over several calls have to begin together then.

        Returns:
            a boolean tensor; None outside elastic jobs, where that cannot be.
        """
        if not self.frontend.context.config.elastic:
            return None

        def read() -> int:
            before, self._latest = self._latest, self.frontend.context
            return int(before is not None and before is not self._latest)

        return tf.cast(self.frontend.reads(read), tf.bool)

    def _local(self, gradient: Any) -> Any:
        size = self.frontend.number_of(self.options.process_set)
        return self.options.local(gradient, tf.cast(size, gradient.dtype) if tf.is_tensor(size) else size)

    def _reduce_differentiably(self, gradients: Sequence[Any], variables: Sequence[Any], names: _Names) -> list[Any]:
        if any(sparse.is_sparse(gradient) for gradient in gradients):
            return self._reduce(gradients, variables, names)

        def forward(given: Sequence[Tensor]) -> list[Tensor]:
            return self._reduce(given, variables, names)

        def backward(tape: Tape[Tensor], arriving: Sequence[Tensor]) -> list[Tensor]:
            if self.options.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
                raise InvalidArgumentError("only what was reduced with op=Average or Sum can be differentiated again")
            with nullcontext() if in_graph([None]) else _until_done(self.frontend):
                return self._reduce(arriving, variables, names)  # such a reduction is its own adjoint

        return record(forward, backward, gradients, keep=False)

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any], of: _Names) -> list[Any]:
        names = of.choose(variables)
        parts: list[list[Tensor]] = []  # of each gradient, what is sent
        contexts: list[Any] = []
        for gradient in gradients:
            if sparse.is_sparse(gradient):
                sparse.check(self.options.op, postscale=self.options.gradient_predivide_factor)
                parts.append([gradient.values, gradient.indices])
                contexts.append(None)
            else:
                sent, ctx = self.options.compression.compress(tf.convert_to_tensor(gradient))
                parts.append([sent])
                contexts.append(ctx)
        agreed = functools.partial(of.agreed, self.frontend, self.options.process_set)
        batch = _Batch(self, names, self._groups(names, gradients, variables), agreed, of.variables)
        received = _in_graph(batch, parts) if in_graph([None]) else _eagerly(batch, parts)
        return [
            sparse.combine(gradient, result, self.options.op, self.frontend.number_of(self.options.process_set))
            if sparse.is_sparse(gradient)
            else self.options.compression.decompress(result[0], ctx)
            for gradient, result, ctx in zip(gradients, received, contexts, strict=True)
        ]

    def _names(self, gradients: Sequence[Any], variables: Sequence[Any]) -> _Names:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if not self.is_local(v)]
        begin = label([(str(v.shape), tf.as_dtype(v.dtype).name) for _, v in pairs])
        kinds = ["none" if g is None else "sparse" if sparse.is_sparse(g) else "dense" for g, _ in pairs]
        return _Names(begin, [v for _, v in pairs], kinds)

    def _groups(self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Any]) -> list[list[str]]:
        groups, is_sparse = self.options.groups, [sparse.is_sparse(gradient) for gradient in gradients]
        if isinstance(groups, int):  # of those that can be
            dense = [each for each, no in zip(zip(names, variables, strict=True), is_sparse, strict=True) if not no]
            return named_groups(groups, [name for name, _ in dense], [variable for _, variable in dense])
        chosen = named_groups(groups, names, variables, lambda variable: id(inner(variable)))
        apart = {name for name, yes in zip(names, is_sparse, strict=True) if yes}
        if any(apart.intersection(group) for group in chosen):
            raise InvalidArgumentError(
                "a variable whose gradient is a tf.IndexedSlices cannot be in a group; leave it out of groups=, or use "
                "sparse_as_dense=True"
            )
        return chosen


class _Names:
    """The names of some variables' gradients, as this rank has them and as all ranks have them.

    Args:
        begin: the prefix, which follows from shapes and types.
        variables: all that a step may have gradients of, also those without.
        kinds: of their gradients, see ``agreed_labels``.

    Attributes:
        variables: the argument.
    """

    def __init__(self, begin: str, variables: Sequence[Any], kinds: Sequence[str]) -> None:
        self.variables = variables
        self._kinds = kinds
        self._begin = begin
        self._own = [f"{begin}.{index}" for index in range(len(variables))]
        # Nothing orders two optimizers in a graph of TensorFlow 1, nor what ranks would have to do to agree.
        self._is_settled = in_graph([None]) and not is_ordered()
        if self._is_settled:
            made = labels(begin, [path_of(variable) for variable in variables])
            self._own = [unique_in_graph(name) for name in made]

    def choose(self, variables: Sequence[Any]) -> list[str]:
        """This rank's names, of some of the variables."""
        known = {id(inner(variable)): name for variable, name in zip(self.variables, self._own, strict=True)}
        return [known[id(inner(variable))] for variable in variables]

    def agreed(self, frontend: TensorFlowFrontend, process_set: ProcessSet) -> dict[str, str]:
        """Map each of this rank's names to the common one; collective."""
        everyones = self._own
        if not self._is_settled:
            everyones = agreed_labels(frontend, self._begin, self.variables, process_set, self._kinds)
        return dict(zip(self._own, everyones, strict=True))


class _Batch:
    """The gradients of one place in a program, of which each step reduces a new set.

    Args:
        sync: reduces them.
        names: of the gradients.
        groups: of names, each sent as one.
        agreed: returns what each name stands for in messages; collective.
        variables: that ranks have in common.

    Attributes:
        parts: in an eager step, the tensors of each gradient.
        context: the job in which they are reduced.
    """

    def __init__(
        self,
        sync: GradientSync,
        names: Sequence[str],
        groups: Sequence[Sequence[str]],
        agreed: Callable[[], dict[str, str]],
        variables: Sequence[Any] = (),
    ) -> None:
        self._frontend = sync.frontend
        self._agreed = agreed
        self._options = sync.options
        self._may_compare = self._compares = sync.compares
        self._names = names
        self._groups = groups
        self._variables = variables
        self.parts: Sequence[Sequence[Tensor]] = ()
        self._sparse: dict[int, Pending[Tensor]] = {}
        self._own: dict[int, Sequence[Tensor]] = {}  # gradients, if there is no other rank
        self._step = object()  # stands for the step under way
        self._received: list[list[Tensor]] | None = None  # the step's results
        self._labels: dict[str, str] = {}  # until ranks have agreed
        self._lock = threading.Lock()
        self._open()

    def begin(self) -> None:
        """A step begins: drop what is left over from one that did not finish. Before each step's first ``ready``."""
        self.abandon()
        if self.context is not self._frontend.context:
            self._open()
        self._own = {}
        self._step, self._received = object(), None
        if self._is_shared and not self._labels:
            self._labels = self._agreed()
            self._reducer.release(self._labels)

    def ready(self, index: int, *tensors: Tensor) -> None:
        """Hand a gradient to the engine; returns at once."""
        name = self._names[index]
        with self._lock:  # TensorFlow 1 orders nothing, and has several threads
            if not self._is_shared:
                self._own[index] = tensors
            elif len(tensors) == 1:
                self._reducer.ready(name, tensors[0])
            else:
                held = interrupts.hold()
                try:
                    self._sparse[index] = self._frontend.start(self._gather, tensors, self._labels[name], grouped=True)
                finally:
                    interrupts.release(held)

    def send(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Hand over all gradients, but for those that an interrupted call has handed over."""
        self.parts = parts
        for index in reversed(range(len(parts))):
            is_under_way = index in self._sparse or self._reducer.is_open(self._names[index])
            if not is_under_way and self._received is None:
                self.ready(index, *parts[index])

    def wait(self) -> list[list[Tensor]]:
        """Return each gradient's result, with which a step ends; again, if an interrupted call has received them."""
        results = self._results() if self._received is None else self._received
        self._frontend.end_step()
        return results

    def _results(self) -> list[list[Tensor]]:
        if not self._is_shared:
            # Copies: TensorFlow may write where a result is.
            return [[np.copy(tensor) for tensor in self._own[index]] for index in range(len(self._names))]
        failure = self._reducer.rest()
        # Also when reducing failed: memory must be at rest before the error leaves.
        gathered = {index: _settled(pending) for index, pending in self._sparse.items()}
        # Now that all gradients are known, the last step has changed the last variable, and this one has not begun to.
        if self._compares and failure is None:
            self._compares = not self._compare()
        held = interrupts.hold()
        try:
            reduced = self._reducer.wait()
            gathering, self._sparse = self._sparse, {}
            results = []
            for index, name in enumerate(self._names):
                if name in reduced:
                    results.append([reduced[name]])
                else:
                    error = gathered[index]
                    if isinstance(error, Exception):
                        raise error
                    results.append(gathering[index].result())
            self._received = results
        finally:
            interrupts.release(held)
        return results

    def _compare(self) -> bool:
        """See that ranks have the same weights; tell whether that is done for this job."""
        label = next(iter(self._labels.values()))
        sample = functools.partial(checksum_of, [inner(variable) for variable in self._variables])
        return check_late(self._frontend, self._options.process_set, label, REMEDY, sample, self._step)

    def _open(self) -> None:
        """Begin in a job, or in an elastic job's next epoch, in which process sets may have other numbers."""
        process_set = self._options.process_set
        self.context = self._frontend.context
        self._is_shared = self._frontend.is_shared(process_set)
        self._gather = gathering(process_set)
        self._reducer = make_reducer(self._frontend, self._options, self._groups)
        self._reducer.hold()
        self._labels = {}
        self._compares = self._may_compare  # until that is done in this job

    def abandon(self) -> None:
        """Wait for what is left over from a step that did not finish, and drop it."""
        for pending in self._sparse.values():
            _settled(pending)
        self._sparse = {}
        if self._reducer.open:
            self._reducer.reset()

    def continues(self, other: _Batch, parts: Sequence[Sequence[Tensor]]) -> bool:
        """Tell whether ``other``, given ``parts``, is this step once more, which was interrupted."""
        return (
            self._names == other._names
            and [len(tensors) for tensors in self.parts] == [len(tensors) for tensors in parts]
            and all(inner(a) is inner(b) for a, b in zip(self._variables, other._variables, strict=True))
        )

    def finish(self) -> None:
        """Bring an interrupted step to its end, for the sake of the other ranks."""
        with suppress(Exception):  # the next step raises it, if it is the job's
            self.send(self.parts)
            self.wait()
        self.abandon()


_interrupted: weakref.WeakKeyDictionary[Context, _Batch] = weakref.WeakKeyDictionary()
"""The eager step of the main thread that is under way; when the next one begins, the one that was interrupted."""


@contextmanager
def _until_done(frontend: TensorFlowFrontend) -> Iterator[None]:
    """Surround an eager reduction, whose step is over when it returns, or fails."""
    context = frontend.context
    try:
        yield
        _forget(context)
    except Exception:
        _forget(context)
        raise


def _forget(context: Context) -> None:
    if threading.current_thread() is threading.main_thread():  # no other thread has interrupts
        _interrupted.pop(context, None)


def _settled(pending: Pending[Tensor]) -> Exception | None:
    try:
        pending.result()
    except Exception as error:  # noqa: BLE001 - raised where the result is needed
        return error
    return None


def _eagerly(batch: _Batch, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    context = batch.context
    if threading.current_thread() is threading.main_thread():
        left = _interrupted.get(context)
        if left is not None and left.continues(batch, parts):
            batch = left
        else:
            if left is not None:
                left.finish()
            batch.begin()
            batch.parts = parts
            _interrupted[context] = batch
    else:
        batch.begin()
    try:
        batch.send(parts)
        return batch.wait()
    except Exception:
        batch.abandon()
        raise


def _in_graph(batch: _Batch, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    sent = []
    # Where operators run in the order in which they are made, the first one also begins the step.
    begun = [] if is_ordered() else [effect(batch.begin, [])]
    for index in reversed(range(len(parts))):

        def ready(*arrays: Any, index: int = index) -> None:
            if not begun and index == len(parts) - 1:
                batch.begin()
            batch.ready(index, *arrays)

        with tf.control_dependencies(begun):
            sent.append(effect(ready, parts[index]))

    def wait() -> list[Any]:
        return [array for arrays in batch.wait() for array in arrays]

    flat = [(tensor, len(tensors) > 1) for tensors in parts for tensor in tensors]
    shapes = [tf.TensorShape([None]).concatenate(t.shape[1:]) if gathered else t.shape for t, gathered in flat]
    with tf.control_dependencies(sent):
        outputs = iter(operator(wait, [], [tensor.dtype for tensor, _ in flat], shapes))
    return [[next(outputs) for _ in tensors] for tensors in parts]


def inner(variable: Any) -> Any:
    """Return the one object that stands for a variable: Keras's variables have TensorFlow's inside."""
    inside = getattr(variable, "value", None)
    return variable if inside is None or callable(inside) else inside
