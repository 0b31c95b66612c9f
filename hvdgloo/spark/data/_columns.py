"""Conversion of Arrow's columns to numpy arrays, and the memory in which they are kept.

A column is dense (an array with one row each), sparse (compressed sparse rows, made dense batch by batch) or holds
objects (binary values). Only binary values are processed row by row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdgloo.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Array = NDArray[Any]
Indices = NDArray[np.int64]

VECTOR_FIELDS = ["type", "size", "indices", "values"]
"""Fields of the struct as which Spark writes a vector of ``pyspark.ml.linalg``."""

_SPARSE = 0
"""Value of ``type`` in a sparse vector's struct; a dense vector's has 1, and null for ``size`` and ``indices``."""


@dataclasses.dataclass(frozen=True)
class CSR:
    """Rows of sparse vectors, one after the other.

    Attributes:
        starts: int64, one more than rows: index of each row's first entry.
        positions: int32: each entry's position in its row.
        values: each entry's value.
        width: length of every row.
    """

    starts: Indices
    positions: NDArray[np.int32]
    values: Array
    width: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.positions.nbytes + self.values.nbytes

    def __getitem__(self, rows: slice) -> CSR:
        """Return consecutive rows, without copying their entries."""
        begin, end, _ = rows.indices(len(self))
        first, last = self.starts[begin], self.starts[end]
        return CSR(
            self.starts[begin : end + 1] - first, self.positions[first:last], self.values[first:last], self.width
        )

    def dense(self, rows: Indices | slice) -> Array:
        """Return these rows as an array of shape (rows, width)."""
        begins, ends = self.starts[:-1][rows], self.starts[1:][rows]
        counts = ends - begins
        total = int(counts.sum())
        out = np.zeros((len(counts), self.width), self.values.dtype)
        if total:
            row = np.repeat(np.arange(len(counts)), counts)
            # An entry's index is its row's start plus the number of the row's entries before it.
            before = np.cumsum(counts) - counts
            entries = np.arange(total) + np.repeat(begins - before, counts)
            out[row, self.positions[entries]] = self.values[entries]
        return out


def is_vector(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds vectors of ``pyspark.ml.linalg``."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind)) and [field.name for field in kind] == VECTOR_FIELDS


def is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Return whether a model can take values of this type as numbers; decimal ones become float64."""
    import pyarrow as pa

    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def is_binary(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def check_type(name: str, kind: pa.DataType, *, text: bool = False) -> None:
    """Check that a column of this type can be read for training.

    Raises:
        DataError: it cannot; the text tells what to do.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(kind) and not is_text(kind):
        kind = kind.value_type
    if is_vector(kind) or is_number(kind) or is_binary(kind) or (text and is_text(kind)):
        return
    inner = kind
    while is_list(inner):
        inner = inner.value_type
    if inner is not kind and is_number(inner):
        return
    if is_text(inner):
        advice = "convert its strings to numbers first (pyspark.ml.feature.StringIndexer does that)"
    else:
        advice = "columns of numbers, booleans, arrays of them, vectors and binary values can be read"
    raise DataError(f"column {name!r} is of type {kind}, which no model accepts: {advice}")


def nulls(name: str, count: int) -> DataError:
    return DataError(
        f"column {name!r} is null in {count} {'row' if count == 1 else 'rows'}: drop these rows, or fill in a value "
        f"(DataFrame.dropna, DataFrame.fillna)"
    )


def ragged(name: str, lengths: tuple[int, int]) -> DataError:
    shorter, longer = sorted(lengths)
    return DataError(
        f"column {name!r} has rows of {shorter} and of {longer} elements: all rows of a column need the same number "
        f"(pad or cut them)"
    )


def convert(name: str, array: pa.Array) -> Array | CSR:
    """Convert a column to a numpy array.

    Returns:
        An array with one row for each of the column's: dtype and shape are the column's own, float64 of two dimensions
        for vectors, object for binary values and strings; or a CSR for vectors at least one of which is sparse. The
        memory may be Arrow's, and so read-only.

    Raises:
        DataError: there is a null, or rows differ in length.
    """
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        raise nulls(name, array.null_count)
    if is_vector(array.type):
        return _vectors(name, array)
    if is_list(array.type):
        return _lists(name, array)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    converted: Array = array.to_numpy(zero_copy_only=False)
    return converted


def _lists(name: str, array: pa.Array) -> Array:
    import pyarrow as pa

    rows = len(array)
    width = array.type.list_size if pa.types.is_fixed_size_list(array.type) else _width(name, array)
    # Not .values, which ignores a slice's bounds.
    inner = array.flatten()
    if inner.null_count:
        position = np.flatnonzero(inner.is_null().to_numpy(zero_copy_only=False))
        raise nulls(name, len(np.unique(position // max(width, 1))))
    values = convert(name, inner)
    assert isinstance(values, np.ndarray)
    return values.reshape(rows, width, *values.shape[1:])


def _width(name: str, lists: pa.Array) -> int:
    """Return the common length of all lists."""
    if not len(lists):
        return 0
    offsets = lists.offsets.to_numpy()
    lengths = np.diff(offsets)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest != longest:
        raise ragged(name, (shortest, longest))
    return longest


def _vectors(name: str, array: pa.StructArray) -> Array | CSR:
    kinds = array.field("type").to_numpy(zero_copy_only=False)
    sparse = kinds == _SPARSE
    if not sparse.any():
        return _lists(name, array.field("values"))
    sizes = array.field("size")
    lists = array.field("values")
    starts = lists.offsets.to_numpy().astype(np.int64)
    starts -= starts[0]
    counts = np.diff(starts)
    widths = np.where(sparse, sizes.fill_null(0).to_numpy(zero_copy_only=False), counts)
    if widths.min() != widths.max():
        raise ragged(name, (int(widths.min()), int(widths.max())))
    width = int(widths[0])
    values = lists.flatten().to_numpy(zero_copy_only=False)
    given = array.field("indices").flatten().to_numpy(zero_copy_only=False)
    if sparse.all():
        positions = given.astype(np.int32, copy=False)
    else:
        # A dense row has all positions in order; a sparse row's positions are the next ones in the indices.
        positions = np.empty(len(values), np.int32)
        entries_sparse = np.repeat(sparse, counts)
        positions[entries_sparse] = given
        positions[~entries_sparse] = np.tile(np.arange(width, dtype=np.int32), int((~sparse).sum()))
    return CSR(starts, positions, values, width)


class Column(Protocol):
    """A column of a window: memory for its rows, filled from the start."""

    def put(self, values: Array | CSR) -> None:
        """Append rows."""

    def take(self, rows: Indices | slice) -> Array:
        """Return a copy of these rows."""


class Dense:
    """Column of rows of equal shape, in memory that is allocated once."""

    def __init__(self, name: str, rows: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._name = name
        self._rows = np.empty((rows, *shape), dtype)
        self._filled = 0

    def put(self, values: Array | CSR) -> None:
        if isinstance(values, CSR):
            values = values.dense(slice(None))
        if values.shape[1:] != self._rows.shape[1:]:
            raise misfit(self._name, values.shape[1:], self._rows.shape[1:])
        # Only a transformation can return several types, of which the first may not be able to hold the others.
        if not np.can_cast(values.dtype, self._rows.dtype, "same_kind"):
            raise DataError(
                f"transformation_fn returns column {self._name!r} of type {self._rows.dtype} for some rows and "
                f"{values.dtype} for others: declare its type in transformation_edit_fields"
            )
        self._rows[self._filled : self._filled + len(values)] = values
        self._filled += len(values)

    def take(self, rows: Indices | slice) -> Array:
        taken: Array = self._rows[rows].copy() if isinstance(rows, slice) else self._rows.take(rows, axis=0)
        return taken


class Sparse:
    """Column of sparse vectors, in memory that grows with each ``put``, since rows' numbers of entries are unknown."""

    def __init__(self, name: str, rows: int, dtype: np.dtype[Any], width: int) -> None:
        self._name = name
        self._width = width
        self._filled = 0
        self._starts = np.zeros(rows + 1, np.int64)
        self._positions = np.empty(0, np.int32)
        self._values = np.empty(0, dtype)

    def put(self, values: Array | CSR) -> None:
        if not isinstance(values, CSR):
            rows, width = values.shape
            positions = np.tile(np.arange(width, dtype=np.int32), rows)
            values = CSR(np.arange(rows + 1) * width, positions, values.reshape(-1), width)
        if values.width != self._width:
            raise misfit(self._name, (values.width,), (self._width,))
        held = len(self._values)
        self._starts[self._filled : self._filled + len(values) + 1] = values.starts + held
        self._filled += len(values)
        # Grown in place: concatenating would need memory for a second window.
        for mine, new in ((self._positions, values.positions), (self._values, values.values)):
            mine.resize(held + len(new), refcheck=False)
            mine[held:] = new

    def take(self, rows: Indices | slice) -> Array:
        return CSR(self._starts, self._positions, self._values, self._width).dense(rows)


def misfit(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> DataError:
    if len(shape) == len(expected) == 1:
        return ragged(name, (shape[0], expected[0]))
    return DataError(f"column {name!r} has rows of shape {shape} and of shape {expected}: all rows need the same shape")
