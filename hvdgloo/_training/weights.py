"""Detection of ranks that train from different weights because no rank has broadcast them. Nothing else shows it, since
gradients are averaged all the same.

Each rank makes one checksum. It travels, together with its complement, in an exchange that takes the maximum of each
byte, so the result tells all ranks whether all checksums are equal. Only if they are not, ranks gather them.

PyTorch and MXNet programs broadcast before the first step, where the checksum travels with another exchange or in one
of its own. TensorFlow and Keras programs may broadcast after it, when an optimizer's variables exist: there
``LateCheck`` compares weights in the second step.
"""

from __future__ import annotations

import functools
import logging
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, process_set_id
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._platform import interrupts
from hvdgloo._training.exchanges import ResumableExchanges
from hvdgloo.types import Collective, ReduceOp

logger = logging.getLogger(__name__)

SAMPLE = 32
"""The number of elements that are sampled from each tensor: where initial weights differ, nearly all of them do."""

_BYTES = 4

LENGTH = 2 * _BYTES
"""The number of bytes that travel."""


def checksum(samples: npt.NDArray[np.generic]) -> int:
    """Return the checksum of a rank's weights, or of samples of them."""
    return zlib.crc32(np.ascontiguousarray(samples).tobytes())


def to_send(own: int | None) -> npt.NDArray[np.uint8]:
    """Return a rank's part of the exchange; without a checksum, zeros, which do not influence the result."""
    if own is None:
        return np.zeros(LENGTH, np.uint8)
    digits = np.frombuffer(own.to_bytes(_BYTES, "big"), np.uint8)
    return np.concatenate([digits, 255 - digits])


def all_equal(received: npt.NDArray[np.uint8]) -> bool:
    """Tell whether the greatest bytes of all ranks mean that all checksums are equal; also if there are none."""
    greatest, complements = received[:_BYTES].astype(int), received[_BYTES:].astype(int)
    there_are_none = not received.any()
    return there_are_none or bool((greatest == 255 - complements).all())


def start_gathering(
    frontend: Frontend[Any], own: int | None, process_set: ProcessSet, name: str | None = None
) -> Callable[[], npt.NDArray[np.int64]]:
    """Start to gather the ranks' checksums, which differ.

    Returns:
        a function that waits for them, in the order of the process set's ranks; -1 for a rank that has none.
    """
    place = frontend.sharers(process_set).index(frontend.context.rank)
    mine = np.full(len(frontend.sharers(process_set)), -1, np.int64)
    mine[place] = -1 if own is None else own
    # An allgather would be an error if a rank has joined.
    most = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.MAX, process_set=process_set_id(process_set))
    return frontend.start_array(most, mine, name)


def warn(frontend: Frontend[Any], process_set: ProcessSet, checksums: npt.NDArray[np.int64], remedy: str) -> None:
    """Log the warning, on the first rank that has a checksum.

    Args:
        frontend, process_set: as for ``start_gathering``.
        checksums: the result of ``start_gathering``.
        remedy: the call that makes weights equal, and when it is due.
    """
    ranks, values = frontend.sharers(process_set), checksums.tolist()
    if next((rank for rank, value in zip(ranks, values, strict=True) if value >= 0), None) == frontend.context.rank:
        logger.warning("%s", warning(ranks, values, remedy))


def warning(ranks: Sequence[int], checksums: Sequence[int], remedy: str) -> str:
    """Return the sentence for the user.

    Args:
        ranks: global ranks.
        checksums: of these ranks, in order; -1 for a rank that has none. At least two differ.
        remedy: the call that makes weights equal, and when it is due.
    """
    known = [(rank, value) for rank, value in zip(ranks, checksums, strict=True) if value >= 0]
    first, expected = known[0]
    others = [rank for rank, value in known if value != expected]
    more = f" (nor do {len(others) - 1} more)" if len(others) > 1 else ""
    return (
        f"rank {others[0]} does not start from the same weights as rank {first}{more}, and they stay different, since "
        f"only gradients are averaged. {remedy}. If this is intended, HVDGLOO_CHECK_WEIGHTS=0 turns the check off"
    )


_LOOKS = 8
"""The number of steps in which weights are compared before the warning if no rank's weights have changed yet."""


class LateCheck:
    """A comparison of the ranks' weights in the second step of a job, after which they may have been broadcast.

    Weights that were equal in the first step are not expected to be equal to the last bit in the second: hosts may
    round differently. So both are compared, and one of them must be equal.

    A program may reduce several times before it steps and broadcasts. So as long as no rank's weights have changed
    since the first step, the comparison is put off.

    Args:
        frontend: where collectives are submitted.
        process_set: the ranks that share gradients.
        name: what matches the ranks' comparisons.
        remedy: what to do about different weights.
    """

    def __init__(self, frontend: Frontend[Any], process_set: ProcessSet, name: str, remedy: str) -> None:
        self._frontend = frontend
        self._process_set = process_set
        self._name = name
        self._remedy = remedy
        self._first: int | None = None
        self._steps = 0
        self._last: object = None  # the step that was counted last
        self._own: int | None = None
        self._exchanges = ResumableExchanges()
        self._is_different = False
        self._is_done = False

    def step(self, sample: Callable[[], int | None], step: object) -> bool:
        """Compare weights if it is time; every rank calls this in each of its steps, before weights change.

        After an interrupt it is called again in the same step, and goes on.

        Args:
            sample: returns the checksum of this rank's weights, None if there is none.
            step: any object that stands for the step, and for no other one.

        Returns:
            whether this was the last call that has an effect.
        """
        if self._is_done or self._last is step:
            return self._is_done
        if not self._frontend.context.config.check_weights:
            sample = _none  # but the others may have their check on, and wait for this rank
        if self._steps == 0:
            first = sample()
            held = interrupts.hold()
            try:
                self._first, self._steps, self._last = first, 1, step
            finally:
                interrupts.release(held)
            return False
        if not self._is_different:
            self._compare(sample, step)
            if not self._is_different:
                return self._is_done

        def use(checksums: npt.NDArray[np.int64]) -> None:
            self._is_done = True
            warn(self._frontend, self._process_set, checksums, self._remedy)

        gather = functools.partial(start_gathering, self._frontend, self._own, self._process_set, f"{self._name}.which")
        self._exchanges.make("gather", gather, use)
        return True

    def _compare(self, sample: Callable[[], int | None], step: object) -> None:
        """Compare weights, after which they are different, or it is done, or it is put off to the next step."""

        def start() -> Callable[[], npt.NDArray[np.uint8]]:
            own = self._own = sample()
            mine = np.concatenate([to_send(self._first), to_send(own), np.array([own != self._first], np.uint8)])
            most = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.MAX, process_set=process_set_id(self._process_set))
            return self._frontend.start_array(most, mine, self._name)

        def use(received: npt.NDArray[np.uint8]) -> None:
            self._steps += 1
            if all_equal(received[:LENGTH]) or all_equal(received[LENGTH:-1]):
                self._is_done = True
            elif received[-1] or self._steps > _LOOKS:
                self._is_different = True
            else:
                self._last = step

        self._exchanges.make("compare", start, use)


class _Checks:
    """The checks of one Context.

    Attributes:
        late: by name and process set.
        expected: callbacks that will broadcast weights, each by a token.
    """

    def __init__(self) -> None:
        self.late: dict[tuple[str, int], LateCheck] = {}
        self.expected: set[object] = set()


_checks: weakref.WeakKeyDictionary[Any, _Checks] = weakref.WeakKeyDictionary()


def _of(context: object) -> _Checks:
    return _checks.setdefault(context, _Checks())


def expect_broadcast(context: object, token: object) -> None:
    """Put off all late checks: a callback is going to broadcast weights. All ranks call this alike."""
    _of(context).expected.add(token)


def broadcast_made(context: object, token: object) -> None:
    """Undo ``expect_broadcast``."""
    _of(context).expected.discard(token)


def check_late(
    frontend: Frontend[Any],
    process_set: ProcessSet,
    label: str,
    remedy: str,
    sample: Callable[[], int | None],
    step: object,
) -> bool:
    """Have the check of some weights, known by ``label``, see a step: ``LateCheck.step``."""
    checks = _of(frontend.context)
    if checks.expected:
        return False
    key = label, process_set_id(process_set)
    check = checks.late.get(key)
    if check is None:
        check = checks.late[key] = LateCheck(frontend, process_set, f"weights.{label}", remedy)
    return check.step(sample, step)


def samples_of(count: int) -> slice:
    """Return the elements that are sampled from a tensor of ``count`` elements."""
    step = max(1, count // SAMPLE)
    return slice(0, step * SAMPLE, step)


def _none() -> None:
    return None
