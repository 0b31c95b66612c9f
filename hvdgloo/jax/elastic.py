"""Elastic training with JAX: ``hvd.elastic`` after ``import hvdgloo.jax as hvd``.

::

    @hvd.elastic.run
    def train(state):
        while state.step < steps:
            state.params, state.opt_state = step(state.params, state.opt_state, next(data))
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), step=0))

Compiled functions need not be compiled again when the workers have changed, because a collective is given the job as it
runs. Where a function's shapes depend on the number of workers, or it calls ``hvd.size()``, ``hvd.rank()`` or the like,
all are traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from hvdgloo._collectives.arrays import broadcast_arrays
from hvdgloo.elastic import ObjectState, State, run_fn
from hvdgloo.elastic._values import copied
from hvdgloo.elastic._variables import VariablesState, failure_in
from hvdgloo.errors import HorovodInternalError
from hvdgloo.jax._primitive import wait_for_compiled
from hvdgloo.numpy import _frontend as _numpy_frontend

__all__ = ["JaxState", "ObjectState", "State", "run"]

T = TypeVar("T")
Tree = Any
Array = npt.NDArray[Any]


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Make a training function elastic: it goes on when workers are lost or come; see ``hvdgloo.elastic.run_fn``.

    Args:
        func: takes a state, and whatever else it is given.
    """
    return run_fn(func, failure=_failure_in)


def _failure_in(error: BaseException) -> HorovodInternalError | None:
    failure = failure_in(error)
    if failure is not None:
        wait_for_compiled()  # so that nothing of the failed step runs in the job's next epoch
    return failure


@dataclass(frozen=True)
class _Place:
    """The place of an array in a tree whose arrays are kept elsewhere.

    Attributes:
        is_numpy: the array is numpy's, not JAX's.
        key: the implementation of a typed PRNG key, whose numbers are kept; otherwise None.
    """

    is_numpy: bool = False
    key: str | None = None


def _place_of(leaf: Any) -> _Place | None:
    """Return a leaf's place; None if it is a plain object."""
    if isinstance(leaf, jax.Array):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return _Place(key=str(jax.random.key_impl(leaf)) if is_key else None)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return _Place(is_numpy=True)
    return leaf if isinstance(leaf, _Place) else None


def _arrays_of(value: Tree) -> list[Any]:
    """Return the arrays in a tree, in the tree's order."""
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # a dictionary whose keys JAX cannot sort
        return []
    return [leaf for leaf in leaves if _place_of(leaf) is not None]


def _without_arrays(value: Tree) -> Tree:
    """Return a tree with places instead of its arrays."""
    if not _arrays_of(value):
        return value
    return jax.tree.map(lambda leaf: leaf if (place := _place_of(leaf)) is None else place, value)


def _with_arrays(tree: Tree, arrays: Iterator[tuple[Array, Any]]) -> Tree:
    """Return a tree with copies of arrays in their places.

    Args:
        arrays: all arrays, with their devices; as many as the tree has places are taken.
    """
    if not _arrays_of(tree):
        return tree

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        array, device = next(arrays)
        if leaf.is_numpy:
            return np.array(array)
        # A copy, because JAX may take over the memory that it is given, and the next commit writes into this one.
        made = jax.device_put(np.array(array), device)
        return made if leaf.key is None else jax.random.wrap_key_data(made, impl=leaf.key)

    return jax.tree.map(filled, tree)


def _value(leaf: Any) -> Array:
    place = _place_of(leaf)
    return np.asarray(leaf if place is None or place.key is None else jax.random.key_data(leaf))


def _device_of(leaf: Any) -> Any:
    """Return where an array was put; None if JAX may choose."""
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


class JaxState(VariablesState):
    """The progress of a training with JAX.

    Args:
        kwargs: attributes and their first values: pytrees, such as parameters and an optimizer's state, and plain
            objects; see ``hvdgloo.elastic.ObjectState``. Assign each step's new trees to them.

    A commit copies the arrays into memory that is kept. The workers that join get the newest trees, of whatever
    structure and shapes these are. A PRNG key is sent like any other array, so all workers have the same;
    ``jax.random.fold_in(key, hvd.rank())`` gives each worker one of its own. For a module of flax NNX, keep
    ``nnx.state(model)``, and ``nnx.update`` the model with it where the training function begins.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._devices: list[Any] = []
        super().__init__(_numpy_frontend.FRONTEND, **kwargs)

    def save(self) -> None:
        """Keep a copy of the arrays, and of all else.

        Raises:
            InvalidArgumentError: (a ValueError) an attribute can be neither copied nor pickled.
        """
        wait_for_compiled()
        super().save()
        self._devices = [_device_of(leaf) for leaf in self._variables()]

    def restore(self) -> None:
        """Give the attributes the values that were saved last."""
        self._assign(copied(self._saved_state), self._kept, self._devices)

    def sync(self) -> None:
        """Give all workers the attributes of one, and save them; collective."""
        wait_for_compiled()
        if self._saved_state and not self._progress.unchanged:
            self._receive(self._progress.root)
        self.save()

    def _receive(self, root: int) -> None:
        own = self._variables()
        values = self._read(own)
        described = [(value.shape, value.dtype) for value in values]
        trees, sizes = self._bcast_object((self._live(), described), root)
        if described != sizes:
            values = [np.empty(shape, dtype) for shape, dtype in sizes]
        # As bytes, so that every type of JAX's can be sent.
        sent = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
        received = broadcast_arrays(self._frontend, sent, root, "elastic.variables")
        if self._frontend.rank() == root:
            return
        arrays = [raw.view(dtype).reshape(shape) for raw, (shape, dtype) in zip(received, sizes, strict=True)]
        devices = [_device_of(leaf) for leaf in own] if described == sizes else [None] * len(arrays)
        self._saved_state = dict.fromkeys(trees)
        self._assign(trees, arrays, devices)

    def _assign(self, trees: Mapping[str, Tree], arrays: Sequence[Array], devices: Sequence[Any]) -> None:
        remaining = zip(arrays, devices, strict=True)
        for name, tree in trees.items():
            setattr(self, name, _with_arrays(tree, remaining))

    def _live(self) -> dict[str, Any]:
        return {name: _without_arrays(value) for name, value in super()._live().items()}

    def _variables(self) -> list[Any]:
        return [leaf for name in self._saved_state for leaf in _arrays_of(getattr(self, name))]

    def _read(self, variables: Sequence[Any]) -> list[Array]:
        return [_value(leaf) for leaf in variables]
