"""The part of gradients that encoding has left out on this rank, kept for their next sums (error feedback).

Within a job, an operation keeps an array beside its buffer: ranks encode the same values of it in every step. When this
ends (in the next epoch of an elastic job, or when gradients begin to travel together), a rank may not encode those
values again. What it has left out is then filed under the gradients' names, and the rank adds it to its own gradients
before they are reduced next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvdgloo._engine.residual import Residual

Values = npt.NDArray[np.float32]


class Residuals:
    """The residuals of one reducer.

    Attributes:
        filed: by the names of gradients, what is to be added to them.
    """

    def __init__(self) -> None:
        self.filed: dict[str, Values] = {}
        self._operations: dict[tuple[str, ...], Residual] = {}

    def operation(self, names: Sequence[str], spans: Sequence[tuple[int, int]] = ()) -> Residual:
        """Return the residual of an operation; of a new one if there is none.

        Args:
            names: of the operation's gradients.
            spans: first element and number of elements of each, if they are parts of one tensor.
        """
        residual = self._operations.get(tuple(names))
        if residual is None or residual.spans != tuple(spans):
            residual = self._operations[tuple(names)] = Residual(self.filed, names, spans)
        return residual

    def file(self) -> None:
        """Keep what operations have left out, and have each begin without it. None of them may be under way."""
        if self._operations:
            self.filed.update(self.all())
        for residual in self._operations.values():
            residual.clear()

    def all(self) -> dict[str, Values]:
        """Return what was left out of each gradient: copies."""
        found = {name: values.copy() for name, values in self.filed.items()}
        for residual in self._operations.values():
            for name, values in residual.by_name():
                kept = found.get(name)
                found[name] = values.copy() if kept is None or kept.size != values.size else kept + values
        return found

    def clear(self) -> None:
        """Forget everything: after a failure it is unknown which values have been sent."""
        self.filed.clear()
        for residual in self._operations.values():
            residual.clear()
