"""What an optimizer's hook, a tape, a trainer and a callback all call: ``ready(name, gradient)`` and ``wait()``.

A gradient becomes ready; once it has done so in as many backward passes as asked for, and with it all members of its
group, it is compressed and handed to the engine, and the hook returns. Nothing blocks before ``wait()``, so transfers
overlap with the rest of the backward pass. The reducer knows names, not parameters: where a gradient comes from and
what zeros stand in for one that never came is its caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvdgloo._collectives.compression import Compressor, NoneCompressor, Steps
from hvdgloo._collectives.core import Pending
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo._collectives.spec import CollectiveSpec, resolve_op
from hvdgloo.errors import GradientsInFlightError, InvalidArgumentError
from hvdgloo.types import Collective, ReduceOp

T = TypeVar("T")
V = TypeVar("V")


@dataclass
class _Transfer(Generic[T]):
    """Gradients under way together: what was given, what was sent, and how to undo the compression.

    ``names`` are those that became ready, of which merged ones are a single gradient.
    """

    gradients: dict[str, T]
    contexts: Sequence[Any]
    sent: Sequence[T]
    pending: Pending[T] | Steps[T]
    names: Sequence[str]


class GradientReducer(Generic[T]):
    """Reduces named gradients while they are being computed.

    Args:
        frontend: where collectives are submitted.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        compression: how gradients travel.
        predivide_factor: splits the division of an average: gradients are divided by it before they are summed, the sum
            by size / factor afterwards. Guards float16 sums against overflow.
        passes: in how many backward passes a gradient becomes ready before it is sent.
        groups: names that are sent as one; a name that is in none is sent alone.
        in_place: reduce into the gradients themselves; False leaves them as they are, for frameworks whose tensors
            cannot be written.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: (a ValueError) an argument cannot be used.
    """

    def __init__(
        self,
        frontend: Frontend[T],
        *,
        op: int | None = None,
        compression: Compressor[T] = NoneCompressor,
        predivide_factor: float = 1.0,
        passes: int = 1,
        groups: Iterable[Sequence[str]] = (),
        in_place: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        resolved = resolve_op(None, op)
        if predivide_factor != 1.0 and resolved is not ReduceOp.AVERAGE:
            raise InvalidArgumentError("gradient_predivide_factor divides an average, so it needs op=Average")
        if not predivide_factor > 0:
            raise InvalidArgumentError(f"gradient_predivide_factor must be greater than 0, not {predivide_factor!r}")
        self._frontend = frontend
        self._compression = compression
        self._in_place = in_place
        self._operation = CollectiveSpec(
            Collective.ALLREDUCE,
            resolved,
            prescale=1.0 / predivide_factor,
            postscale=float(predivide_factor),
            process_set=process_set_id(process_set),
        )
        self._group_of = _index_groups(groups)
        self._merged: dict[tuple[str, ...], T] = {}
        self._passes = 1
        self.set_passes(passes)
        # Name to backward passes still to come, for names that had some; name to gradient, for members of groups
        # that are not complete; then all that has been submitted or is held back for its group.
        self._left: dict[str, int] = {}
        self._held: dict[tuple[str, ...], dict[str, T]] = {}
        self._open: set[str] = set()
        self._transfers: list[_Transfer[T]] = []

    def ready(self, name: str, gradient: T, *, final: bool = False) -> None:
        """A backward pass has computed (or accumulated) a gradient. Returns at once.

        Args:
            name: of the gradient, the same on all ranks.
            gradient: not to be read or written until ``wait()`` has returned, if this pass was its last.
            final: send it now, whatever the number of passes so far.

        Raises:
            GradientsInFlightError: it has been sent already and not been waited for.
            HorovodInternalError: as ``Frontend.start``.
        """
        if name in self._open:
            raise GradientsInFlightError(
                f"the gradient of {name} became ready again while it is being reduced: more backward passes than "
                "backward_passes_per_step ran before step() or synchronize()"
            )
        if not final:
            left = self._left.get(name, self._passes) - 1
            if left > 0:
                self._left[name] = left
                return
        self._left.pop(name, None)
        group = self._group_of.get(name)
        if group is None:
            self._send({name: gradient}, name, grouped=False)
        else:
            held = self._held.setdefault(group, {})
            held[name] = gradient
            if len(held) == len(group):
                del self._held[group]
                whole = self._merged.get(group)
                try:
                    if whole is not None:
                        self._send({_group_name(group): whole}, _group_name(group), grouped=False, names=group)
                    else:
                        # Every rank has to list the members in the same order, whatever order its hooks fired in.
                        self._send({member: held[member] for member in group}, _group_name(group), grouped=True)
                except BaseException:
                    self._open.difference_update(group)
                    raise
        self._open.add(name)

    def merge(self, names: Sequence[str], whole: T) -> None:
        """Send ``whole`` in place of these gradients, whose memory it is, from now on, when all of them are ready.

        Args:
            names: in no group, and not sent.
            whole: one tensor, in which they lie.
        """
        group = tuple(names)
        self._group_of.update(dict.fromkeys(group, group))
        self._merged[group] = whole

    def part(self) -> None:
        """Undo every ``merge``. Nothing may be open."""
        for group in self._merged:
            for name in group:
                del self._group_of[name]
        self._merged.clear()

    def wait(self) -> dict[str, T]:
        """Block until all that was sent has been reduced; afterwards every name may become ready anew.

        Members that wait for the rest of their group stay held back: make the rest ready first.

        Returns:
            the reduced gradients by name; the very tensors that were given, if in place. Of merged ones the whole.

        Raises:
            HorovodInternalError: a reduction failed. No other is under way any more either, so gradients may be
                touched again.
        """
        transfers, self._transfers = self._transfers, []
        reduced: dict[str, T] = {}
        failure = self._advance(transfers)
        for transfer in transfers:
            self._open.difference_update(transfer.names)
            try:
                reduced.update(self._receive(transfer))
            except Exception as error:  # noqa: BLE001 - all memory must be at rest before the first error leaves
                failure = failure or error
        if failure is not None:
            raise failure
        return reduced

    @property
    def open(self) -> frozenset[str]:
        """Names that were sent, or are held back for their group, and have not been waited for."""
        return frozenset(self._open)

    def is_open(self, name: str) -> bool:
        """Whether ``name`` is in ``open``."""
        return name in self._open

    @property
    def passes(self) -> int:
        """Backward passes before a gradient is sent."""
        return self._passes

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes, and begin to count anew.

        Raises:
            InvalidArgumentError: not a whole number from 1.
        """
        check_passes(passes)
        self._passes = passes
        self._left = {}

    def reset(self) -> None:
        """Begin anew: wait for what is under way, drop what is held back and all counts."""
        try:
            self.wait()
        finally:
            self._left, self._held, self._open = {}, {}, set()

    @staticmethod
    def _advance(transfers: Sequence[_Transfer[T]]) -> Exception | None:
        """Have compressors that need several collectives start the next ones, all before the first is waited for."""
        failure: Exception | None = None
        for transfer in transfers:
            if not isinstance(transfer.pending, Pending):
                try:
                    transfer.pending.advance()
                except Exception as error:  # noqa: BLE001 - as in ``wait``
                    failure = failure or error
        return failure

    def _send(self, gradients: dict[str, T], name: str, *, grouped: bool, names: Sequence[str] = ()) -> None:
        names = names or list(gradients)
        begin = getattr(self._compression, "begin", None)
        if begin is not None:
            tensors = list(gradients.values())
            steps: Steps[T] = begin(self._frontend, self._operation, name, tensors)
            self._transfers.append(_Transfer(gradients, [None] * len(tensors), tensors, steps, names))
            return
        pairs = [self._compression.compress(gradient) for gradient in gradients.values()]
        sent = [tensor for tensor, _ in pairs]
        # A compressed copy is ours to overwrite. Compressors return the very tensor where they leave it alone.
        private = all(s is not g for s, g in zip(sent, gradients.values(), strict=True))
        pending = self._frontend.start(self._operation, sent, name, in_place=self._in_place or private, grouped=grouped)
        self._transfers.append(_Transfer(gradients, [ctx for _, ctx in pairs], sent, pending, names))

    def _receive(self, transfer: _Transfer[T]) -> Mapping[str, T]:
        results = transfer.pending.wait()
        if not isinstance(transfer.pending, Pending):
            return dict(zip(transfer.gradients, results, strict=True))
        deliver = self._frontend.adapter.deliver
        reduced = {}
        for (name, gradient), ctx, sent, result in zip(
            transfer.gradients.items(), transfer.contexts, transfer.sent, results, strict=True
        ):
            whole = self._compression.decompress(result, ctx)
            if self._in_place and sent is not gradient:
                whole = deliver(whole, gradient, in_place=True)
            reduced[name] = whole
        return reduced


def check_passes(passes: int) -> None:
    """Whether gradients can add up over so many backward passes.

    Raises:
        InvalidArgumentError: not a whole number from 1.
    """
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise InvalidArgumentError(f"backward_passes_per_step must be a whole number from 1, not {passes!r}")


def _index_groups(groups: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    index: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for name in group:
            if name in index:
                raise InvalidArgumentError(f"{name} is in two groups, or twice in one")
            index[name] = tuple(group)
    return index


def _group_name(group: tuple[str, ...]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]}+{len(group) - 1}"
