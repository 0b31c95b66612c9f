"""Division of a batch into buckets, which travel together.

``plan`` is a pure function of the common order, so every rank forms the same buckets without further messages. Fusing
saves the fixed cost of a collective and costs a copy in and out; a tensor that is large enough to amortise that fixed
cost by itself travels alone, in its own memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdgloo._engine.messages import Response
from hvdgloo.types import Collective

_MOST_PLANS = 256
"""Plans that are kept: the batches of a step differ a little from one to the next."""

LONE_BYTES = 1 << 22
"""A tensor of at least this size is not copied into a bucket."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of one operation: ``responses[operation].request.tensors[tensor]``."""

    operation: int
    tensor: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that one backend call handles, in order."""

    collective: Collective
    parts: tuple[Part, ...]

    @cached_property
    def nbytes(self) -> int:
        """The size of all results."""
        return sum(part.nbytes for part in self.parts)


class _Open:
    """A bucket that still has room for tensors."""

    def __init__(self, collective: Collective, part: Part) -> None:
        self.collective = collective
        self.parts = [part]
        self.nbytes = part.nbytes


def plan(
    responses: Iterable[Response],
    limit: int,
    *,
    separate_groups: bool = False,
    alone: Callable[[Response, int], bool] | None = None,
) -> list[Bucket]:
    """Divide one batch of agreed operations into buckets.

    Args:
        responses: without errors, in the common order.
        limit: the largest fused bucket in bytes; 0 sends each tensor alone.
        separate_groups: tensors of an explicit group are fused only with each other.
        alone: whether a tensor of a response must not be fused with others.

    Returns:
        buckets in the order in which they must be executed. Every tensor is in exactly one; an operation without
        tensors (a barrier) is a bucket of its own with a single part, ``Part(operation, -1, 0)``.
    """
    buckets: list[_Open] = []
    # By process set: a rank plans only for the sets it belongs to, so they must not influence each other.
    accepting: defaultdict[int, dict[str, _Open]] = defaultdict(dict)
    lone_bytes = min(LONE_BYTES, limit)
    for operation, response in enumerate(responses):
        request = response.request
        if not request.tensors:
            accepting[request.process_set].clear()  # nothing may overtake a barrier
            buckets.append(_Open(request.collective, Part(operation, -1, 0)))
            continue
        fusible = request.collective.fusible
        apart = f" {operation}" if separate_groups and len(request.tensors) > 1 else ""
        for tensor, nbytes in enumerate(response.sizes):
            part = Part(operation, tensor, nbytes)
            if not fusible or nbytes >= lone_bytes or (alone is not None and alone(response, tensor)):
                buckets.append(_Open(request.collective, part))
                continue
            kind = response.kinds[tensor] + apart
            bucket = accepting[request.process_set].get(kind)
            if bucket is None or bucket.nbytes + nbytes > limit:
                accepting[request.process_set][kind] = bucket = _Open(request.collective, part)
                buckets.append(bucket)
            else:
                bucket.parts.append(part)
                bucket.nbytes += nbytes
    return [Bucket(bucket.collective, tuple(bucket.parts)) for bucket in buckets]


class Planner:
    """Plans batches, and keeps the plans of numbered operations, since a program repeats its steps.

    Args:
        limit, separate_groups, alone: as for ``plan``.
    """

    def __init__(self, limit: int, *, separate_groups: bool, alone: Callable[[Response, int], bool] | None) -> None:
        self.limit = limit
        self._separate_groups = separate_groups
        self._alone = alone
        self._plans: dict[tuple[int, ...], Sequence[Bucket]] = {}

    def set_limit(self, limit: int) -> None:
        """Plan with another limit from now on."""
        self.limit = limit
        self._plans.clear()

    def plan(self, batch: Sequence[tuple[Response, object]]) -> Sequence[Bucket]:
        """Divide a batch, the responses and what is to be done for each, into buckets."""
        numbers = tuple([response.signature for response, _ in batch])
        buckets = self._plans.get(numbers)
        if buckets is None:
            responses = [response for response, _ in batch]
            buckets = plan(responses, self.limit, separate_groups=self._separate_groups, alone=self._alone)
            if -1 not in numbers:
                if len(self._plans) >= _MOST_PLANS:
                    self._plans.clear()
                self._plans[numbers] = buckets
        return buckets
