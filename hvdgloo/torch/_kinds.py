"""Agreement on how gradients travel, in a Context's first step together with a comparison of the ranks' weights."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.spec import reduction
from hvdgloo._training.exchanges import ResumableExchanges
from hvdgloo._training.weights import all_equal, start_gathering, to_send, warn
from hvdgloo.torch._parameters import HookedParameters, ReductionOptions
from hvdgloo.torch._weights import checksum_of
from hvdgloo.types import ReduceOp

_REMEDY = "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) on all ranks before the first step"


class Kind(enum.IntEnum):
    """Form in which a parameter's gradient travels; the greatest value of any rank holds for all."""

    NONE = 0  # no gradient so far
    SPARSE = 1
    DENSE = 2


def kind_of(parameter: torch.Tensor, options: ReductionOptions) -> Kind:
    """Return the kind of a parameter's gradient on this rank."""
    if parameter.grad is None:
        return Kind.NONE
    return Kind.SPARSE if parameter.grad.is_sparse and not options.sparse_as_dense else Kind.DENSE


@dataclass(eq=False)
class GradientKinds:
    """The kinds of an optimizer's gradients.

    Attributes:
        agreed: by name, those on which the ranks of this Context have agreed.
    """

    _frontend: Frontend[torch.Tensor]
    _parameters: HookedParameters
    _options: ReductionOptions
    _exchanges: ResumableExchanges
    agreed: dict[str, Kind] = field(default_factory=dict)
    _asked_about: Sequence[str] = ()  # names in the last question
    _is_new: bool = True  # no step in this Context so far
    _differs: bool = False  # the ranks' weights were found to differ, and no warning was logged yet

    def start_over(self) -> None:
        """Forget what the ranks of an earlier Context have agreed on."""
        self.agreed.clear()
        self._is_new, self._differs = True, False

    def learn(self) -> None:
        """Agree on how gradients travel that no rank has had so far: a rank that lacks one cannot know.

        A gradient that is dense on some rank is sent as dense by all from then on: that rank may already have sent it.
        """
        unknown = {name: p for name, p in self._parameters.tracked.items() if name not in self.agreed}
        if self._options.sparse_as_dense or self._options.op == ReduceOp.ADASUM:
            self.agreed.update(dict.fromkeys(unknown, Kind.DENSE))
            unknown = {}
        if not (unknown or self._is_new or "kinds" in self._exchanges):
            return
        is_new, own = self._is_new, None
        if is_new and self._frontend.context.config.check_weights:
            own = checksum_of(self._parameters.all.values())

        def ask() -> Callable[[], npt.NDArray[np.uint8]]:
            kinds = np.array([kind_of(parameter, self._options) for parameter in unknown.values()], np.uint8)
            most = reduction(None, ReduceOp.MAX, 1.0, 1.0, self._options.process_set)
            self._asked_about = list(unknown)
            return self._frontend.start_array(most, np.concatenate([kinds, to_send(own)]) if is_new else kinds, None)

        def use(most: npt.NDArray[np.uint8]) -> None:
            names = self._asked_about
            kinds = {name: Kind(kind) for name, kind in zip(names, most.tolist(), strict=False)}
            self.agreed.update({name: kind for name, kind in kinds.items() if kind != Kind.NONE})
            self._is_new, self._differs = False, is_new and not all_equal(most[len(names) :])

        self._exchanges.make("kinds", ask, use)
        if self._differs:
            self._tell_of_weights(own)

    def _tell_of_weights(self, own: int | None) -> None:
        """Warn of different weights, on one rank."""

        def use(checksums: npt.NDArray[np.int64]) -> None:
            self._differs = False
            warn(self._frontend, self._options.process_set, checksums, _REMEDY)

        gather = functools.partial(start_gathering, self._frontend, own, self._options.process_set)
        self._exchanges.make("weights", gather, use)
