"""Reducing the gradients of a step: what the trainer and the optimizers call.

MXNet has no hooks that fire while the backward pass runs, but its backward pass runs in the background. So
gradients are handed over last weight first, in about the order in which they are computed: each is waited for as the
engine looks at it, and travels while MXNet computes earlier layers' gradients. All are waited for once, at the end.

An elastic job's next epoch is another Context, in which names and reducers are made again: see ``reserved``.

After a Ctrl-C in a step, the other ranks may have made it. So the next step with the same gradients continues the
interrupted one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.spec import gathering
from hvdgloo._job.context import Context
from hvdgloo._platform import interrupts
from hvdgloo._training.options import GradientOptions, divided, make_reducer
from hvdgloo._training.reducer import GradientReducer
from hvdgloo._training.weights import check_late, checksum, samples_of
from hvdgloo.errors import InvalidArgumentError, NotInitializedError
from hvdgloo.mxnet._adapter import Tensor

_REMEDY = (
    "Call hvd.broadcast_parameters(net.collect_params(), root_rank=0) (or with a Module's get_params()) on all ranks "
    "before the first step"
)


class MXNetGradientSync:
    """Averages gradients over the ranks, in place; weights are known by what MXNet numbers or names them by.

    Args:
        frontend: where collectives are submitted.
        options: how gradients are reduced.
        label: begins the gradients' names; the same on all ranks. Objects that may reduce at the same time have
            different ones, see ``reserved``.
        wanted: what is reserved for it in later Contexts; None for the label.

    Attributes:
        step: what has been done of a step, for one that is repeated after an interrupt; to be emptied when it is over.

    Raises:
        InvalidArgumentError: (a ValueError) an option cannot be used.
    """

    def __init__(
        self, frontend: Frontend[Tensor], options: GradientOptions, label: str, wanted: str | None = None
    ) -> None:
        groups = options.groups
        if groups is not None and (not isinstance(groups, int) or isinstance(groups, bool) or groups < 0):
            raise InvalidArgumentError(f"num_groups must be a whole number, 0 or more; got {groups!r}")
        self._frontend = frontend
        self._options = options
        self._step_begins: tuple[Hashable, ...] | None = None  # the first gradients, with which each step begins
        self._reducers: dict[tuple[Hashable, ...], GradientReducer[Tensor]] = {}
        self._label = label
        self._wanted = label if wanted is None else wanted
        self._compared: set[Hashable] = set()  # steps whose weights have been, by their first key
        self._under_way: tuple[Hashable, ...] = ()  # the last gradients that were sent
        self.step: dict[str, Any] = {}
        self._context: Context | None = None  # that the label and the reducers are of
        self._when_job_ends: Callable[[], None] | None = None
        self._reducer(())  # raises for what cannot be used

    @classmethod
    def reserved(cls, frontend: Frontend[Tensor], options: GradientOptions, label: str) -> MXNetGradientSync:
        """Make an object whose label has a number appended if the label was reserved before in this job.

        In an elastic job that is done at its first step in each epoch: ranks step in the same order, but some have made
        their optimizers in an earlier epoch, or before they joined.

        Raises:
            InvalidArgumentError: (a ValueError) an option cannot be used.
            NotInitializedError: before ``init()``.
        """
        context = frontend.context
        if context.config.elastic:
            return cls(frontend, options, label)
        (own,) = frontend.reserve_names([label])
        made = cls(frontend, options, own, label)
        made._bind(context)
        return made

    def __reduce__(self) -> tuple[Callable[..., MXNetGradientSync], tuple[Frontend[Tensor], GradientOptions, str, str]]:
        # With its label: ranks that do not load it must number later ones just as those that do.
        return _loaded, (self._frontend, self._options, self._label, self._wanted)

    @property
    def active(self) -> bool:
        """True if there are other ranks to reduce with, now. A step begins by reading this."""
        context = self._frontend.context
        if context is not self._context:
            self._enter(context)
        return self._frontend.is_shared(self._options.process_set)

    def _enter(self, context: Context) -> None:
        """Go over to another job: take its names, and forget what was under way in the last one."""
        self._reducers.clear()
        self._compared.clear()
        self.step.clear()
        (self._label,) = self._frontend.reserve_names([self._wanted])
        self._bind(context)

    def _bind(self, context: Context) -> None:
        self._context = context
        context.tell_of_end(self)

    def when_job_ends(self, drop: Callable[[], None]) -> None:
        """Have ``drop`` called when an epoch of an elastic job has ended, to forget what came of its gradients."""
        self._when_job_ends = drop

    def job_ended(self) -> None:
        """See ``hvdgloo._job.context.Follower``."""
        for reducer in self._reducers.values():
            reducer.reset()
        if self._when_job_ends is not None and self._context is not None and self._context.config.elastic:
            self._when_job_ends()

    def reduce(self, gradients: Mapping[Hashable, Tensor], weights: Callable[[], Sequence[Tensor]]) -> None:
        """Overwrite gradients with the ranks' average.

        Args:
            gradients: keyed by their weights, the same ones in the same order on all ranks; dense.
            weights: returns the weights, which are compared with the other ranks' once.

        Raises:
            InvalidArgumentError: (a ValueError) one is sparse, or of a type that cannot be sent.
            HorovodInternalError: a reduction failed.
        """
        keys = tuple(gradients)
        if self._step_begins is None:
            self._step_begins = keys
        elif keys == self._step_begins and "this" not in self.step:  # a Module's optimizer is given one by one
            self._frontend.end_step()
        if not self.active or self.step.get("reduced") == keys:
            return
        this = self.step.setdefault("this", object())
        if keys not in self._reducers:
            self._reducers[keys] = self._reducer(keys)
        if keys != self._under_way and self._under_way in self._reducers:
            self._reducers[self._under_way].reset()  # an interrupted step that the program has not repeated
        self._under_way = keys
        reducer = self._reducers[keys]
        try:
            for key in reversed(keys):
                if not reducer.is_open(self._name(key)):
                    reducer.ready(self._name(key), gradients[key])
        except Exception:
            reducer.reset()  # memory is at rest then
            raise
        failure = reducer.rest()
        if failure is None and keys and keys[0] not in self._compared:
            label, sample = self._name(keys[0]), functools.partial(_checksum, weights)
            if check_late(self._frontend, self._options.process_set, label, _REMEDY, sample, this):
                self._compared.add(keys[0])
        held = interrupts.hold()
        try:
            reducer.wait()
            self.step["reduced"] = keys
        finally:
            interrupts.release(held)

    def anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are set on some rank; asked once in a step."""
        if "flags" not in self.step:
            gather = gathering(self._options.process_set)
            own = np.array([flags], np.int64)
            held = interrupts.hold()
            try:
                self.step["flags"] = self._frontend.start_array(gather, own, f"{self._label}.flags")
            finally:
                interrupts.release(held)
        try:
            everyones: npt.NDArray[np.int64] = self.step["flags"]()
        except Exception:
            self.step.clear()
            raise
        return [bool(count) for count in everyones.sum(axis=0)]

    def _reducer(self, keys: tuple[Hashable, ...]) -> GradientReducer[Tensor]:
        groups = divided(self._options.groups, [self._name(key) for key in keys])
        return make_reducer(self._frontend, self._options, groups, self._options.compression, in_place=True)

    def _name(self, key: Hashable) -> str:
        return f"{self._label}.{key}"


def _checksum(weights: Callable[[], Sequence[Tensor]]) -> int | None:
    """Return the checksum of a few elements of each weight; None if there are none."""
    samples = [each.reshape((-1,))[samples_of(each.size)].asnumpy() for each in weights() if each.size]
    return checksum(np.concatenate([each.astype(np.float64) for each in samples])) if samples else None


def _loaded(frontend: Frontend[Tensor], options: GradientOptions, label: str, wanted: str) -> MXNetGradientSync:
    """Make an object from a pickle. In a job, its label is the pickled object's."""
    loaded = MXNetGradientSync(frontend, options, label, wanted)
    try:
        loaded._bind(frontend.context)
    except NotInitializedError:
        pass
    return loaded
