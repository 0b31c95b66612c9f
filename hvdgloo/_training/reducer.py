"""The calls that an optimizer's hook, a tape, a trainer and a callback all make: ``ready(name, gradient)`` and
``wait()``.

A gradient becomes ready; once it has done so in as many backward passes as requested, and so have all members of its
group, it is compressed and handed to the engine, and the hook returns. Nothing blocks before ``wait()``, so transfers
overlap with the rest of the backward pass. The reducer knows names, not parameters: where a gradient comes from, and
which zeros replace one that never came, is up to its caller.

A reducer outlives its job: in another Context it starts over, with nothing held back, counted or under way.

It also outlives a Ctrl-C. Nothing is sent without being counted as sent, and ``wait()`` forgets nothing before all of
it has arrived; so a second call returns the results that the interrupted one would have returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.compression import Compressor, NoneCompressor, Steps, wire_of
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.persistent import Pending, PersistentOperation
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo._collectives.residuals import Residuals
from hvdgloo._collectives.spec import CollectiveSpec, resolve_op
from hvdgloo._platform import interrupts
from hvdgloo.errors import GradientsInFlightError, InvalidArgumentError
from hvdgloo.types import Collective, ReduceOp, WireFormat

T = TypeVar("T")


class _Reduction(Generic[T]):
    """Gradients that are reduced as one in every step, a single one or a group, with their persistent operation.

    Attributes:
        label: the operation's label in messages: the first gradient's, and how many others there are.
        names: the gradients' names, in the order in which every rank lists them.
        whole: the tensor that is sent instead of them, if they are parts of one; ...
        spans: ... and their places in it.
        grouped: True if the operation reduces a group of tensors.
        held: gradients of the group that are ready while others are not.
        gradients: what is under way, ...
        sent, contexts: ... what was sent for them if they were compressed, and how to undo that.
        pending: the started operation.
    """

    __slots__ = (
        "contexts",
        "gradients",
        "grouped",
        "held",
        "label",
        "names",
        "operation",
        "pending",
        "sent",
        "spans",
        "whole",
    )

    def __init__(
        self,
        names: tuple[str, ...],
        whole: T | None = None,
        *,
        spans: Sequence[tuple[int, int]] = (),
        grouped: bool = False,
    ) -> None:
        self.names = names
        self.whole, self.spans = whole, spans
        self.grouped = grouped
        self.call(names[0])
        self.held: dict[str, T] = {}
        self.gradients: Sequence[T] = ()
        self.sent: Sequence[T] | None = None
        self.contexts: Sequence[Any] = ()
        self.pending: Pending[T] | Steps[T] | None = None

    def call(self, first: str) -> None:
        """Make the label, from what the first gradient is called in messages."""
        others = len(self.names) - 1
        self.label = f"{first}+{others}" if others else first
        self.operation: PersistentOperation[T] | None = None

    def forget(self) -> None:
        """Release the gradients, which are the caller's alone once the reduction has ended."""
        self.pending, self.gradients, self.sent = None, (), None


class GradientReducer(Generic[T]):
    """Reduces named gradients while they are being computed.

    Args:
        frontend: where collectives are submitted.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        compression: how gradients travel.
        crossing: the compressor that determines how they cross between hosts (``wire_of``), if it is another one: in
            a graph, for example, gradients were compressed before. By default ``compression``.
        predivide_factor: splits the division of an average: gradients are divided by it before they are summed, the sum
            by size / factor afterwards. Guards float16 sums against overflow.
        passes: how many backward passes a gradient becomes ready in before it is sent.
        groups: names that are sent together; a name in no group is sent alone.
        in_place: reduce into the gradients themselves; False leaves them as they are, for frameworks whose tensors
            cannot be written.
        process_set: the ranks that take part.
        gathered: called when several gradients that travel together are all ready, before they are sent, on the thread
            of the last one.

    Raises:
        InvalidArgumentError: (a ValueError) an argument cannot be used.
    """

    def __init__(
        self,
        frontend: Frontend[T],
        *,
        op: int | None = None,
        compression: Compressor[T] = NoneCompressor,
        crossing: object = None,
        predivide_factor: float = 1.0,
        passes: int = 1,
        groups: Iterable[Sequence[str]] = (),
        in_place: bool = True,
        process_set: ProcessSet = global_process_set,
        gathered: Callable[[], None] | None = None,
    ) -> None:
        resolved = resolve_op(None, op)
        if predivide_factor != 1.0 and resolved is not ReduceOp.AVERAGE:
            raise InvalidArgumentError("gradient_predivide_factor divides an average, so it needs op=Average")
        if not predivide_factor > 0:
            raise InvalidArgumentError(f"gradient_predivide_factor must be greater than 0, not {predivide_factor!r}")
        self._frontend = frontend
        self._compression = compression
        self._wire = wire_of(compression if crossing is None else crossing)
        self._in_place = in_place
        self._gathered = gathered
        self._process_set = process_set
        self._operation = CollectiveSpec(
            Collective.ALLREDUCE,
            resolved,
            prescale=1.0 / predivide_factor,
            postscale=float(predivide_factor),
            process_set=process_set_id(process_set),
        )
        self._context: object = None  # the Context that the operation's number of the process set is of
        self._labels: Mapping[str, str] | None = {}  # what gradients are called in messages, if not by their names
        self._postponed: list[tuple[_Reduction[T], Sequence[T]]] = []
        self._groups = _groups(groups)
        # The reduction of each name. Groups' and merged gradients' reductions are permanent; others are made when they
        # are first sent.
        self._reductions: dict[str, _Reduction[T]] = dict(self._groups)
        self._plain = getattr(compression, "compress", None) is NoneCompressor.compress
        self._passes = 1
        self.set_passes(passes)
        # Backward passes still to come, for names that had some; then what has been submitted or is held back for its
        # group, and what has been submitted.
        self._left: dict[str, int] = {}
        self._open: set[str] = set()
        self._started: list[_Reduction[T]] = []
        self._reduced: dict[str, T] = {}  # what has arrived of it
        self._residuals = Residuals()

    def ready(self, name: str, gradient: T, *, final: bool = False) -> None:
        """Record that a backward pass has computed (or accumulated) a gradient. Returns at once.

        Args:
            name: of the gradient, the same on all ranks.
            gradient: not to be read or written until ``wait()`` has returned, if this pass was its last.
            final: send it now, whatever the number of passes so far.

        Raises:
            GradientsInFlightError: it has already been sent and not yet been waited for.
            HorovodInternalError: as ``Frontend.start``.
        """
        context = self._frontend.context
        if context is not self._context:
            self._begin_in(context)
        if name in self._open:
            raise GradientsInFlightError(
                f"the gradient of {name} became ready again while it is being reduced: more backward passes than "
                "backward_passes_per_step ran before step() or synchronize()"
            )
        if not final and self._passes > 1:
            left = self._left.get(name, self._passes) - 1
            if left > 0:
                self._left[name] = left
                return
        if self._left:
            self._left.pop(name, None)
        reduction = self._reductions.get(name)
        if reduction is None:
            reduction = self._reductions[name] = self._made(_Reduction((name,)))
        if len(reduction.names) == 1:
            self._send(reduction, (gradient if reduction.whole is None else reduction.whole,))
            return
        held = reduction.held
        held[name] = gradient
        if len(held) < len(reduction.names):
            self._open.add(name)
            return
        # The last one is not open before all are sent: after an interrupt it becomes ready again.
        try:
            if self._gathered is not None:
                self._gathered()
            if reduction.whole is not None:
                self._send(reduction, (reduction.whole,))
            else:
                self._send(reduction, [held[member] for member in reduction.names])
        except BaseException:
            if reduction.pending is None and all(postponed is not reduction for postponed, _ in self._postponed):
                self._open.difference_update(reduction.names)
                reduction.held = {}
            raise

    def set_groups(self, groups: Iterable[Sequence[str]]) -> None:
        """Send other names together from now on. ``open`` must be empty, and nothing merged."""
        self._residuals.file()
        self._groups = _groups(groups)
        self._reductions = dict(self._groups)

    def merge(self, names: Sequence[str], whole: T, spans: Sequence[tuple[int, int]] = ()) -> None:
        """Send ``whole``, in whose memory these gradients lie, instead of them from now on, when all of them are ready.

        Args:
            names: in no group, and not under way.
            whole: one tensor that contains them.
            spans: the gradients' places in it.
        """
        self._residuals.file()
        reduction = self._made(_Reduction(tuple(names), whole, spans=spans))
        self._reductions.update(dict.fromkeys(reduction.names, reduction))

    def part(self, last: Iterable[tuple[str, T]] = ()) -> list[Pending[T]]:
        """Undo every ``merge``. ``open`` must be empty.

        Args:
            last: a name of each merged reduction, with a tensor that is sent once more in its place. Ranks that have
                all parted for the same reason send the same tensor; a rank that has parted alone contradicts the
                others, so that all raise an error instead of waiting for each other.

        Returns:
            these reductions, in flight.
        """
        held = interrupts.hold()
        try:
            pending = [
                self._frontend.persistent(self._operation, self._reductions[name].label, in_place=True).start([tensor])
                for name, tensor in last
            ]
            self._residuals.file()
            self._reductions = dict(self._groups)
            return pending
        finally:
            interrupts.release(held)

    def hold(self) -> None:
        """Send nothing until ``release``: what gradients are called in this job's messages is not known yet."""
        self._labels = None

    def release(self, labels: Mapping[str, str]) -> None:
        """Send what has become ready since ``hold``, and from now on at once.

        Args:
            labels: what each name stands for in messages, the same on all ranks.

        Raises:
            HorovodInternalError: as ``ready``; what was not sent may become ready again.
        """
        held = interrupts.hold()
        try:
            self._labels = labels
            for reduction in self._reductions.values():
                reduction.call(labels[reduction.names[0]])
            postponed, self._postponed = self._postponed, []
            try:
                while postponed:
                    self._send(*postponed[0])
                    del postponed[0]
            finally:
                for reduction, _ in postponed:
                    self._open.difference_update(reduction.names)
        finally:
            interrupts.release(held)

    def wait(self) -> dict[str, T]:
        """Block until everything that was sent has been reduced; afterwards every name may become ready again.

        Members that wait for the rest of their group stay held back: make the rest ready first.

        Returns:
            the reduced gradients by name; if in place, the tensors that were given. For merged ones, the whole.

        Raises:
            HorovodInternalError: a reduction failed. None is under way any more, so gradients may be touched again.
        """
        failure = self.rest()
        held = interrupts.hold()
        try:
            started, self._started = self._started, []
            reduced, self._reduced = self._reduced, {}
            for reduction in started:
                reduction.forget()
                self._open.difference_update(reduction.names)
        finally:
            interrupts.release(held)
        if failure is not None:
            self._residuals.clear()
            raise failure
        return reduced

    def rest(self) -> Exception | None:
        """Block until nothing is under way, without forgetting that it was sent: ``wait`` returns it.

        Returns:
            the first failure, which ``wait`` raises.
        """
        failure = self._advance()
        for reduction in self._started:
            if reduction.pending is not None:
                try:
                    self._receive(reduction)
                except Exception as error:  # noqa: BLE001 - all memory must be at rest before the first error is raised
                    failure = failure or error
        return failure

    @property
    def open(self) -> frozenset[str]:
        """The names that were sent, or are held back for their group, and have not been waited for."""
        return frozenset(self._open)

    def is_open(self, name: str) -> bool:
        """Tell whether ``name`` is in ``open``."""
        return name in self._open

    @property
    def passes(self) -> int:
        """Backward passes before a gradient is sent."""
        return self._passes

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes, and restart the count.

        Raises:
            InvalidArgumentError: not a whole number from 1.
        """
        check_passes(passes)
        self._passes = passes
        self._left = {}

    def reset(self) -> None:
        """Start over: wait for what is under way, whose results do not matter, nor whether it fails; drop what is held
        back and all counts."""
        try:
            self.wait()
        except Exception:  # noqa: BLE001 - its results are not needed; the next collective has the job's error
            pass
        self._left, self._open, self._postponed = {}, set(), []
        for reduction in self._reductions.values():
            reduction.held = {}

    def left_out(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return what encoding with error feedback has left out of each gradient so far, on all ranks together.

        Collective, and nothing may be under way.
        """
        frontend, mine = self._frontend, self._residuals.all()
        if not frontend.is_shared(self._process_set):
            return mine
        counts: dict[str, int] = {}
        for each in frontend.allgather_object(
            {name: v.size for name, v in mine.items()}, process_set=self._process_set
        ):
            counts = {**each, **counts}
        total = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.SUM, process_set=process_set_id(self._process_set))
        pending = {}
        for name, count in sorted(counts.items()):
            own = mine.get(name)
            if own is None or own.size != count:  # on a rank that has joined later
                own = np.zeros(count, np.float32)
            pending[name] = frontend.start_array(total, own, f"left_out.{name}")
        return {name: wait() for name, wait in pending.items()}

    def set_left_out(self, values: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Have all ranks together add to the next gradients what ``left_out`` has returned."""
        share = np.float32(1 / max(1, len(self._frontend.sharers(self._process_set))))
        self._residuals.clear()
        self._residuals.filed.update(
            {name: array.astype(np.float32).reshape(-1) * share for name, array in values.items()}
        )

    def _begin_in(self, context: object) -> None:
        """Start over in another job, in which the process set has another number."""
        number = process_set_id(self._process_set)  # first of all: an error is to come again
        self.reset()
        self._residuals.file()
        wire = self._frontend.context.engine.wire if self._wire is None else self._wire
        self._operation = self._operation._replace(process_set=number, wire=wire)
        for reduction in self._reductions.values():
            reduction.operation = None
        self._context = context

    def _made(self, reduction: _Reduction[T]) -> _Reduction[T]:
        if self._labels:
            reduction.call(self._labels[reduction.names[0]])
        return reduction

    def _advance(self) -> Exception | None:
        """Have compressors that need several collectives start their next ones, all before the first is waited for."""
        failure: Exception | None = None
        for reduction in self._started:
            pending = reduction.pending
            if pending is not None and not isinstance(pending, Pending):
                try:
                    pending.advance()
                except Exception as error:  # noqa: BLE001 - as in ``wait``
                    failure = failure or error
        return failure

    def _send(self, reduction: _Reduction[T], gradients: Sequence[T]) -> None:
        """Start a reduction, unless names are not known yet, and count its gradients as sent."""
        held = interrupts.hold()
        try:
            if self._labels is None:
                self._postponed.append((reduction, gradients))
            else:
                self._start(reduction, gradients)
            self._open.update(reduction.names)
            if reduction.held:
                reduction.held = {}
        finally:
            interrupts.release(held)

    def _start(self, reduction: _Reduction[T], gradients: Sequence[T]) -> None:
        in_place = self._in_place
        sent: Sequence[T] | None = None
        if not self._plain:
            begin = getattr(self._compression, "begin", None)
            if begin is not None:
                reduction.pending = begin(self._frontend, self._operation, reduction.label, gradients)
                reduction.gradients, reduction.sent = gradients, None
                self._started.append(reduction)
                return
            pairs = [self._compression.compress(gradient) for gradient in gradients]
            sent = [tensor for tensor, _ in pairs]
            reduction.contexts = [context for _, context in pairs]
            # A compressed copy is ours to overwrite. Compressors return the tensor itself where they leave it
            # unchanged.
            in_place = in_place or all(s is not g for s, g in zip(sent, gradients, strict=True))
        operation = reduction.operation
        if operation is None or operation.in_place is not in_place:
            keeps = self._operation.wire is WireFormat.INT4_FEEDBACK
            operation = reduction.operation = self._frontend.persistent(
                self._operation,
                reduction.label,
                in_place=in_place,
                grouped=reduction.grouped,
                residual=self._residuals.operation(reduction.names, reduction.spans) if keeps else None,
            )
        reduction.pending = operation.start(gradients if sent is None else sent)
        reduction.gradients, reduction.sent = gradients, sent
        self._started.append(reduction)

    def _receive(self, reduction: _Reduction[T]) -> None:
        """Wait for what is under way, and keep the results by name; merged gradients share one."""
        pending, sent, reduced = reduction.pending, reduction.sent, self._reduced
        assert pending is not None
        names = reduction.names if reduction.whole is None else (reduction.label,)
        results: Sequence[T] = pending.result() if isinstance(pending, Pending) else pending.wait()
        if sent is None:
            reduced.update(zip(names, results, strict=True))
        else:
            deliver = self._frontend.adapter.deliver
            for name, gradient, context, one, result in zip(
                names, reduction.gradients, reduction.contexts, sent, results, strict=True
            ):
                whole = self._compression.decompress(result, context)
                if self._in_place and one is not gradient:
                    whole = deliver(whole, gradient, in_place=True)
                reduced[name] = whole
        reduction.forget()


def check_passes(passes: int) -> None:
    """Check that gradients can be accumulated over this many backward passes.

    Raises:
        InvalidArgumentError: not a whole number from 1.
    """
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise InvalidArgumentError(f"backward_passes_per_step must be a whole number from 1, not {passes!r}")


def _groups(groups: Iterable[Sequence[str]]) -> dict[str, _Reduction[Any]]:
    index: dict[str, _Reduction[Any]] = {}
    for group in groups:
        reduction: _Reduction[Any] | None = None
        for name in group:
            if name in index:
                raise InvalidArgumentError(f"{name} is in two groups, or twice in one")
            reduction = index[name] = reduction or _Reduction(tuple(group), grouped=True)
    return index
