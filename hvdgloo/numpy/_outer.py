"""OuterOptimizer: the outer optimizer of local SGD and DiLoCo for any training loop, whatever steps in it.

The values of TensorFlow's, Keras's and MXNet's variables are copied into numpy arrays: outer steps are rare, so copies
cost little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdgloo._collectives.compression import Compressor
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._training import weights
from hvdgloo._training.outer import Outer, OuterOptions
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.numpy._adapter import Array
from hvdgloo.numpy._compression import Compression
from hvdgloo.numpy._frontend import FRONTEND

_REMEDY = "Broadcast the variables from rank 0 before hvd.OuterOptimizer is made"


def _read(variable: Any) -> Array:
    """Return a variable's value, perhaps in the variable's own memory."""
    if hasattr(variable, "list_ctx") and hasattr(variable, "data"):  # a Gluon parameter
        variable = variable.data()
    for method in ("asnumpy", "numpy"):  # MXNet; TensorFlow and Keras
        if hasattr(variable, method):
            return np.asarray(getattr(variable, method)())
    return np.asarray(variable)


def _write(variable: Any, value: Array) -> None:
    for method in ("assign", "set_data"):  # TensorFlow and Keras; a Gluon parameter
        if hasattr(variable, method):
            getattr(variable, method)(value)
            return
    variable[...] = value


class _Variables:
    """A program's variables, for an ``Outer``."""

    def __init__(self, trained: Mapping[str, Any], averaged: Mapping[str, Any]) -> None:
        self._trained, self._averaged = list(trained), list(averaged)
        self._variables = {**trained, **averaged}

    def trained(self) -> Sequence[str]:
        return self._trained

    def averaged(self) -> Sequence[str]:
        return self._averaged

    def copied(self) -> Sequence[tuple[str, Array]]:
        return ()

    def describe(self, name: str) -> str:
        value = _read(self._variables[name])
        return f"{value.dtype.name}{list(value.shape)}"

    def value(self, name: str) -> Array:
        value = _read(self._variables[name])
        return np.array(value, np.float32 if value.dtype.itemsize < 4 else value.dtype)

    def nbytes(self, name: str) -> int:
        value = _read(self._variables[name])
        return value.size * max(4, value.dtype.itemsize)

    def change(self, name: str, before: Array, after: Array | None = None) -> Array:
        now = self.value(name) if after is None else after
        with np.errstate(invalid="ignore"):
            change = np.asarray(before - now)
        if not _is_finite(change):
            change[before == now] = 0  # inf - inf
        return change

    def assign(self, name: str, value: Array) -> None:
        variable = self._variables[name]
        _write(variable, np.asarray(value).astype(_read(variable).dtype))

    def adopt(self, name: str, value: Any) -> Array:
        own = self.value(name)
        if np.shape(value) != own.shape:
            raise InvalidArgumentError(
                f"the outer state's {name} is {list(np.shape(value))}, but the variable here has the shape "
                f"{list(own.shape)}; load the state of the same variables"
            )
        return np.array(value, own.dtype)

    def is_finite(self, values: Sequence[Array]) -> bool:
        return all(_is_finite(value) for value in values)

    def norm(self, values: Sequence[Array]) -> float:
        return math.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in values))

    def checksum(self) -> int | None:
        found = [self.value(name).ravel() for name in self._trained]
        samples = [value[weights.samples_of(value.size)].astype(np.float64) for value in found if value.size]
        return weights.checksum(np.concatenate(samples)) if samples else None


def _is_finite(value: Array) -> bool:
    # A sum reads each element once. Finite elements may add up to an infinity, but never the other way round.
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.isfinite(value.sum())) or bool(np.isfinite(value).all())


class OuterOptimizer:
    """The outer optimizer of local SGD or DiLoCo for a training loop of your own.

    ::

        outer = hvd.OuterOptimizer([weights, bias], sync_every=8)
        for batch in batches:
            train_on(batch)      # changes the variables, on this rank alone
            outer.step()         # every eighth call averages what all ranks have changed
        outer.finish()           # before evaluating or saving, and at the end

    It averages what the ranks have changed since the last outer step, as ``hvdgloo.torch``'s ``LocalSGD`` does, and
    afterwards the variables have the same bits on all ranks. Make it on all ranks once they have the same values, after
    a broadcast. In an elastic job commit only when ``is_synchronized``, and keep ``state_dict()`` in the state.

    With ``fragments`` or ``overlap``, variables are the same on all ranks only after ``finish()``: call it before a
    commit, too.

    Args:
        variables: floating-point numpy arrays, which are written; or variables of TensorFlow, Keras or MXNet. A list in
            the same order on all ranks, or a dict by name.
        statistics: variables that are averaged, but not trained, such as batch normalisation's.
        sync_every, outer_lr, outer_momentum, outer_clip, start, fragments, overlap, compression, process_set: as for
            ``LocalSGD``. Statistics are averaged with the last fragment.

    Raises:
        InvalidArgumentError: (a ValueError) an argument cannot be used.
        MismatchError: ranks have different arguments or variables.
        NotInitializedError: before ``init()``.
    """

    frontend: Frontend[Array] = FRONTEND

    def __init__(
        self,
        variables: Iterable[Any] | Mapping[str, Any],
        sync_every: int,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        outer_clip: float | None = None,
        start: int = 0,
        fragments: int = 1,
        overlap: int = 0,
        compression: Compressor[Array] = Compression.none,
        process_set: ProcessSet = global_process_set,
        statistics: Iterable[Any] | Mapping[str, Any] = (),
    ) -> None:
        trained, averaged = _named(variables), {f"statistics.{name}": v for name, v in _named(statistics).items()}
        if not trained:
            raise InvalidArgumentError("there are no variables to average; pass a list or a dict of them")
        for name, variable in (*trained.items(), *averaged.items()):
            _check(name, variable)
        options = OuterOptions(
            sync_every, outer_lr, outer_momentum, outer_clip, start, compression, process_set, fragments, overlap
        )
        self.frontend.context  # noqa: B018 - raises before init()
        self._outer = Outer(self.frontend, _Variables(trained, averaged), options, inner="rank", remedy=_REMEDY)
        self._outer.begin()

    def step(self) -> None:
        """Count an inner step, after it; every ``sync_every``-th call makes an outer step, with all ranks. With
        ``fragments``, each of them has its own in a round; with ``overlap``, a later call completes it.

        Raises:
            HorovodInternalError: the exchange failed.
        """
        self._outer.begin()
        self._outer.count()
        if self._outer.due:
            self._outer.sync()
        self.frontend.end_step()

    def finish(self) -> None:
        """Complete what is under way, and make an outer step if there was an inner one since all ranks had the same
        values; collective."""
        self._outer.begin()
        self._outer.finish()

    @property
    def is_synchronized(self) -> bool:
        """True if there was no inner step since all ranks had the same values: after an outer step, or with
        ``fragments`` or ``overlap`` after ``finish()``."""
        return self._outer.is_synchronized

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, beside the variables."""
        return self._outer.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Return to what ``state_dict`` has returned; on all ranks.

        Raises:
            InvalidArgumentError: (a ValueError) it is the state of other variables; nothing has changed.
        """
        self._outer.load(state_dict)


def _named(variables: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    return dict(variables) if isinstance(variables, Mapping) else {str(i): each for i, each in enumerate(variables)}


def _check(name: str, variable: Any) -> None:
    try:
        value = _read(variable)
    except Exception as error:
        raise InvalidArgumentError(f"variable {name} cannot be read as a numpy array: {error}") from error
    # By name: the bfloat16 of ml_dtypes is of no kind that numpy knows.
    if not (value.dtype.kind == "f" or value.dtype.name == "bfloat16"):
        raise InvalidArgumentError(
            f"variable {name} is of type {value.dtype.name}; only floating-point ones have averages"
        )
    can_be_written = isinstance(variable, np.ndarray) and variable.flags.writeable
    if not (can_be_written or any(hasattr(variable, each) for each in ("assign", "set_data", "asnumpy"))):
        raise InvalidArgumentError(
            f"variable {name} is a {type(variable).__name__} that cannot be written in place; pass a numpy array, or a "
            "variable of TensorFlow, Keras or MXNet"
        )
