"""A user's function of pandas DataFrames, applied between reading and batching."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdgloo.errors import DataError, MissingDependencyError
from hvdgloo.spark.data._columns import CSR, Array, misfit

if TYPE_CHECKING:
    import pandas as pd

EditField = tuple[str, Any, tuple[int | None, ...], bool]
"""A column after the transformation: name, numpy dtype, shape of one row, and whether it may be null (ignored)."""


class Transformation:
    """Call of the function, with conversion of its result to arrays.

    Args:
        function: takes a DataFrame of some rows, and returns one of the same rows; or a function without parameters
            that returns such a function.
        edit_fields: columns that are added or changed.
        removed_fields: names of columns that are left out of batches.

    Raises:
        MissingDependencyError: pandas is not installed.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        edit_fields: Sequence[EditField] = (),
        removed_fields: Sequence[str] = (),
    ) -> None:
        if function is not None and not _parameters(function):
            function = function()
        self._function: Callable[[pd.DataFrame], pd.DataFrame] | None = function
        self._edited = {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape, *_ in edit_fields}
        self._removed = frozenset(removed_fields)

    def __call__(self, columns: dict[str, Array | CSR]) -> dict[str, Array | CSR]:
        """Transform some rows.

        Raises:
            DataError: the function returned other rows, or columns of another shape than declared.
        """
        if self._function is None:
            return {name: values for name, values in columns.items() if name not in self._removed}
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError("transformation_fn needs pandas: pip install pandas") from error

        rows = len(next(iter(columns.values())))
        dense = {
            name: values.dense(slice(None)) if isinstance(values, CSR) else values for name, values in columns.items()
        }
        # A row of an array column is an array. Copied, since Arrow's memory is read-only and a function may write.
        frame = pd.DataFrame(
            {name: list(values.copy()) if values.ndim > 1 else values.copy() for name, values in dense.items()}
        )
        changed = self._function(frame)
        if not isinstance(changed, pd.DataFrame) or len(changed) != rows:
            what = f"{len(changed)} rows" if isinstance(changed, pd.DataFrame) else f"a {type(changed).__name__}"
            raise DataError(
                f"transformation_fn was given {rows} rows and returned {what}: it must return a DataFrame of the same "
                f"rows, since the steps of an epoch are counted in advance"
            )
        absent = [name for name in self._edited if name not in changed.columns and name not in self._removed]
        if absent:
            raise DataError(f"transformation_fn returns no column {', '.join(map(repr, absent))}")
        return {name: self._array(name, changed[name]) for name in changed.columns if name not in self._removed}

    def _array(self, name: str, series: pd.Series[Any]) -> Array:
        values: Array = series.to_numpy()
        if values.dtype == object and not isinstance(values[0], (bytes, str)):
            rows = [np.asarray(value) for value in values]
            for row in rows:
                if row.shape != rows[0].shape:
                    raise misfit(name, row.shape, rows[0].shape)
            values = np.stack(rows)
        if name in self._edited:
            dtype, shape = self._edited[name]
            wanted = tuple(-1 if length is None else length for length in shape)
            try:
                values = values.reshape(len(values), *wanted).astype(dtype, copy=False)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"transformation_fn's column {name!r} has rows of shape {values.shape[1:]} and type "
                    f"{values.dtype}, but transformation_edit_fields declares {shape} and {dtype}"
                ) from error
        return values


def _parameters(function: Callable[..., Any]) -> int:
    """Return the number of the function's positional parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # A built-in function, which does not return another function.
        return 1
    return sum(p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD for p in parameters)
