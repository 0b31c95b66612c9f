"""Conversion of a batch's columns to a model's inputs and targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdgloo.errors import ConfigError

Array = NDArray[Any]
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Slot:
    """An input or an output of a model.

    Args:
        name: name for messages, and the key where the model takes a dictionary.
        shape: shape without the batch dimension, with None for any length; None if the model does not define it.
        dtype: numpy's name of the dtype; None if the model does not define it.
        is_given: True if the user gave the shape, not the model.
        takes_rows: True if an input of unknown shape takes rows of numbers, so that a single number is a row of one.
    """

    name: str
    shape: Shape | None
    dtype: str | None
    is_given: bool = False
    takes_rows: bool = False


@dataclass(frozen=True)
class Side:
    """The inputs, or the outputs, of a model, in the order of the columns that belong to them.

    Args:
        slots: one for each column.
        keyed: True if the model has a dictionary of them.
    """

    slots: tuple[Slot, ...]
    keyed: bool

    def structure(self, arrays: Sequence[Array]) -> Any:
        """Return a single array unchanged, and several as a tuple or a dictionary."""
        if self.keyed:
            return {slot.name: array for slot, array in zip(self.slots, arrays, strict=True)}
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    def arrays(self, structure: Any) -> list[Any]:
        """Return a model's results as a list; the inverse of ``structure``.

        Raises:
            ConfigError: (a ValueError) they are a dictionary without the columns' names.
        """
        if isinstance(structure, Mapping):
            names = [slot.name for slot in self.slots]
            if set(names) <= set(structure):
                return [structure[name] for name in names]
            if len(names) == len(structure) == 1:
                return list(structure.values())
            raise ConfigError(
                f"the model returns a dictionary of {', '.join(map(repr, structure))}, but label_cols are "
                f"{', '.join(map(repr, names))}: name its outputs like the labels, or return them in the labels' order"
            )
        return list(structure) if isinstance(structure, (list, tuple)) else [structure]


@dataclass(frozen=True)
class Layout:
    """Correspondence of columns to inputs and targets.

    Args:
        inputs: the inputs for the feature columns.
        targets: the targets for the label columns, which are reshaped to these shapes where they fit.
        floatx: the library's default floating-point type.
    """

    inputs: Side
    targets: Side
    floatx: str

    def features(self, columns: Sequence[Array]) -> Any:
        """Return a batch's inputs in the model's shapes, from columns of shape (rows,) or (rows, ...)."""
        return self.inputs.structure(
            [
                _reshaped(column, (1,) if slot.takes_rows and column.ndim == 1 else slot.shape).astype(
                    slot.dtype or self.floatx, copy=False
                )
                for column, slot in zip(columns, self.inputs.slots, strict=True)
            ]
        )

    def labels(self, columns: Sequence[Array]) -> Any:
        """Return a batch's targets. A label of another size than the output (a class for scores) keeps its shape."""
        return self.targets.structure(
            [
                (_reshaped(column, slot.shape) if _fits(column, slot.shape) else column).astype(self.floatx, copy=False)
                for column, slot in zip(columns, self.targets.slots, strict=True)
            ]
        )


def layout_of(
    model: Any,
    floatx: str,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    label_shapes: Sequence[Sequence[int]] | None,
) -> Layout:
    """Return the layout for a model.

    Args:
        label_shapes: each label's shape, with or without a first -1 for the batch; None for the outputs' shapes.

    Raises:
        ConfigError: (a ValueError) the number of columns differs from the inputs', outputs' or ``label_shapes``'.
    """
    inputs = _side(model, "input", "feature_cols", feature_cols)
    outputs = _side(model, "output", "label_cols", label_cols)
    if label_shapes is not None:
        if len(label_shapes) != len(label_cols):
            raise ConfigError(
                f"label_shapes has {len(label_shapes)} shapes for {len(label_cols)} label_cols: give one for each label"
            )
        slots = [
            Slot(slot.name, tuple(shape[1:] if shape[:1] == [-1] else shape), slot.dtype, is_given=True)
            for slot, shape in zip(outputs.slots, map(list, label_shapes), strict=True)
        ]
        outputs = Side(tuple(slots), outputs.keyed)
    return Layout(inputs, outputs, floatx)


def check_shapes(
    layout: Layout, sizes: Mapping[str, int | None], feature_cols: Sequence[str], label_cols: Sequence[str]
) -> None:
    """Check that columns fit the inputs and the labels' shapes, if the user gives any.

    Args:
        sizes: number of values in a row, by column; None, or no entry, if unknown.

    Raises:
        ConfigError: (a ValueError) a column does not fit; the text has its size and the input's.
    """
    for name, slot in zip(feature_cols, layout.inputs.slots, strict=True):
        _check_size(name, sizes.get(name), slot.shape, f"input {slot.name!r} of the model takes")
    for name, slot in zip(label_cols, layout.targets.slots, strict=True):
        if slot.is_given:
            _check_size(name, sizes.get(name), slot.shape, "label_shapes says")


def _check_size(name: str, size: int | None, shape: Shape | None, whose: str) -> None:
    if shape is None or size is None:
        return
    known = math.prod(length for length in shape if length is not None)
    if known != size if None not in shape else not known or size % known:
        spelled = ", ".join("any" if length is None else str(length) for length in shape)
        raise ConfigError(
            f"column {name!r} has {size} number{'s' * (size != 1)} in a row, but {whose} ({spelled}), which is {known}"
            f"{' times any number' if None in shape else ''}"
        )


def _side(model: Any, what: str, argument: str, columns: Sequence[str]) -> Side:
    try:
        structure = getattr(model, what)
    except (AttributeError, ValueError):  # a Sequential, a model of the user's own class, or one that is not built
        structure = getattr(model, f"{what}s", None)
    keyed = isinstance(structure, Mapping)
    if structure is None:
        return _called_with(model, columns) if what == "input" else Side(_unknown(columns), keyed=False)
    if isinstance(structure, Mapping):
        order = columns if set(columns) == set(structure) else list(structure)
        named = [(key, structure[key]) for key in order]
    else:
        tensors = structure if isinstance(structure, (list, tuple)) else [structure]
        named = [(tensor.name, tensor) for tensor in tensors]
    if len(named) != len(columns):
        raise ConfigError(
            f"{argument} has {len(columns)} columns, {', '.join(columns)}, but the model has {len(named)} {what}s, "
            f"{', '.join(name for name, _ in named)}; give one column for each"
        )
    return Side(tuple(Slot(name, tuple(tensor.shape[1:]), _dtype(tensor)) for name, tensor in named), keyed)


def _unknown(columns: Sequence[str], takes_rows: Sequence[bool] = ()) -> tuple[Slot, ...]:
    return tuple(
        Slot(name, None, None, takes_rows=rows)
        for name, rows in zip(columns, takes_rows or [False] * len(columns), strict=True)
    )


def _called_with(model: Any, columns: Sequence[str]) -> Side:
    """Return the inputs of a model of the user's own class, from Keras's record of its first call.

    That call may have been on other rows than the data's, so only the number of axes is used.
    """
    shapes = (model.get_build_config() or {}).get("input_shape")
    keyed = False
    if isinstance(shapes, Mapping) and set(shapes) == set(columns):
        shapes, keyed = [shapes[name] for name in columns], True
    elif _is_shape(shapes):
        shapes = [shapes]
    if not isinstance(shapes, Sequence) or len(shapes) != len(columns) or not all(map(_is_shape, shapes)):
        return Side(_unknown(columns), keyed=False)
    return Side(_unknown(columns, [len(shape) == 2 for shape in shapes]), keyed)


def _is_shape(value: Any) -> bool:
    return isinstance(value, Sequence) and all(size is None or isinstance(size, int) for size in value)


def _dtype(tensor: Any) -> str | None:
    name = str(getattr(tensor.dtype, "name", tensor.dtype))
    return name if name in np.sctypeDict else None  # bfloat16 is not in it; Keras casts to it


def _reshaped(column: Array, shape: Shape | None) -> Array:
    if shape is None or shape.count(None) > 1:
        return column
    return column.reshape(len(column), *(-1 if size is None else size for size in shape))


def _fits(column: Array, shape: Shape | None) -> bool:
    return shape is not None and None not in shape and column[0].size == math.prod(map(int, shape))  # type: ignore[arg-type]
