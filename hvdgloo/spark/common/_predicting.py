"""The part of ``transform`` that runs in Spark's Python workers: Arrow batches in, with predictions out.

A worker serves many tasks. It keeps the models that it has loaded, so that it loads each once, not once per partition.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from hvdgloo._platform import pickling
from hvdgloo.errors import ConfigError, DataError
from hvdgloo.spark.data._columns import CSR, convert

if TYPE_CHECKING:
    import pyarrow as pa

Array = NDArray[Any]
Apply = Callable[[list[Array]], list[Array]]

_LOADED: OrderedDict[str, Apply] = OrderedDict()
"""Models that this process has loaded, in order of last use."""

_KEPT = 2
"""Number of models that stay: two, so that a pipeline of two models does not reload them again and again."""


_ROWS = 1024
"""Number of rows per call of a model: an Arrow batch has ten times as many, too many for a large model."""


class Feature(NamedTuple):
    """An input column of the model.

    Attributes:
        name: the column's name, for messages.
        place: its index among the DataFrame's columns.
        size: number of values in a row when the model was trained; None if unknown.
    """

    name: str
    place: int
    size: int | None


class Predictor(Protocol):
    """A model that can be pickled by cloudpickle."""

    def load(self) -> Apply:
        """Load the model.

        Returns:
            a function from an array for each feature column, of shape (rows,) or (rows, ...), to an array for each
            label column, of shape (rows,) or (rows, ...). Its arguments have the columns' own dtypes and may be
            read-only.
        """


def predicting(
    spark: Any, predictor: Predictor, features: Sequence[Feature], kept: Sequence[int], schema: Any
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function for ``DataFrame.mapInArrow``.

    Args:
        spark: the session, through which the model is broadcast.
        features: the model's input columns.
        kept: indices of the columns that are passed on; the outputs follow them.
        schema: Spark's schema of the result, whose columns are named by their indices.
    """
    # Spark sends a broadcast once to each executor, however many tasks use it.
    model = spark.sparkContext.broadcast(pickling.dumps(predictor))
    kinds = [field.dataType.typeName() for field in schema.fields[len(kept) :]]
    return _Map(uuid.uuid4().hex, model, tuple(features), tuple(kept), tuple(schema.names[len(kept) :]), tuple(kinds))


class _Map:
    def __init__(
        self,
        key: str,
        model: Any,
        features: tuple[Feature, ...],
        kept: tuple[int, ...],
        outputs: tuple[str, ...],
        kinds: tuple[str, ...],
    ) -> None:
        self._key = key
        self._model = model
        self._features = features
        self._kept = kept
        self._outputs = outputs
        self._kinds = kinds

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        apply = _loaded(self._key, self._model)
        for batch in batches:
            columns = [batch.column(place) for place in self._kept]
            predictions = self._predictions(apply, batch)
            if len(predictions) != len(self._outputs):
                raise ConfigError(f"the model has {len(predictions)} outputs for {len(self._outputs)} labels")
            columns += [
                as_arrow(name, values, kind, batch.num_rows)
                for name, values, kind in zip(self._outputs, predictions, self._kinds, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, names=[str(place) for place in range(len(columns))])

    def _predictions(self, apply: Apply, batch: pa.RecordBatch) -> list[Array]:
        """Return the model's outputs for all rows, computed part by part."""
        if not batch.num_rows:
            return [np.empty((0,))] * len(self._outputs)
        parts = []
        for begin in range(0, batch.num_rows, _ROWS):
            rows = batch.slice(begin, _ROWS)
            arrays = [_feature(feature.name, rows.column(feature.place)) for feature in self._features]
            try:
                parts.append(apply(arrays))
            except Exception as error:
                # Only now: other sizes may be right, since a transformation_fn may have changed them in training.
                for (name, _, size), array in zip(self._features, arrays, strict=True):
                    if size is not None and array.size != size * len(array):
                        raise DataError(
                            f"the model cannot be applied: column {name!r} has {array.size // len(array)} numbers in a "
                            f"row, but had {size} when the model was trained ({error})"
                        ) from error
                raise
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def _loaded(key: str, model: Any) -> Apply:
    if key not in _LOADED:
        predictor: Predictor = cloudpickle.loads(model.value)
        _LOADED[key] = predictor.load()
        while len(_LOADED) > _KEPT:
            _LOADED.popitem(last=False)
    _LOADED.move_to_end(key)
    return _LOADED[key]


def _feature(name: str, column: pa.Array) -> Array:
    values = convert(name, column)
    return values.dense(slice(None)) if isinstance(values, CSR) else values


_INTEGERS = {"byte": "int8", "short": "int16", "integer": "int32", "long": "int64"}


def as_arrow(name: str, values: Array, kind: str, rows: int) -> pa.Array:
    """Convert predictions to a column of a Spark type.

    Args:
        name: the column's name.
        values: array of shape (rows,) or (rows, ...).
        kind: Spark's name of the type: ``vectorudt``, ``array``, or a numeric type.
        rows: the expected number of rows.

    Raises:
        ConfigError: the model returned another number of rows, or several numbers for a scalar column.
    """
    import pyarrow as pa

    if len(values) != rows:
        raise ConfigError(f"the model returned {len(values)} rows of {name!r} for a batch of {rows}")
    if kind in ("vectorudt", "array"):
        width = values.size // rows if rows else 0
        flat = pa.array(np.ascontiguousarray(values, dtype=np.float64).reshape(-1))
        starts = pa.array(np.arange(rows + 1, dtype=np.int32) * width)
        lists = pa.ListArray.from_arrays(starts, flat)
        return lists if kind == "array" else _dense_vectors(lists)
    if values.size != rows:
        raise ConfigError(f"the model returned {values.shape[1:]} numbers for a row of {name!r}, which takes one")
    flat_values = values.reshape(rows)
    if kind in _INTEGERS:
        return pa.array(_whole(flat_values, np.dtype(_INTEGERS[kind])))
    if kind == "boolean":
        return pa.array(flat_values > 0.5)
    return pa.array(flat_values.astype(np.float32 if kind == "float" else np.float64))


def _whole(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round numbers to integers, clipped to the type's range."""
    rounded = np.rint(values.astype(np.float64))
    with np.errstate(invalid="ignore"):
        whole = rounded.astype(dtype)
    limits = np.iinfo(dtype)
    # Not clipped before the cast: float64 has no 2**63 - 1.
    whole[rounded >= limits.max] = limits.max
    whole[rounded <= limits.min] = limits.min
    return whole


def _dense_vectors(lists: pa.ListArray) -> pa.StructArray:
    """Make Arrow's form of Spark's dense vectors, which have neither size nor indices."""
    import pyarrow as pa

    rows = len(lists)
    return pa.StructArray.from_arrays(
        [pa.array(np.ones(rows, np.int8)), pa.nulls(rows, pa.int32()), pa.nulls(rows, pa.list_(pa.int32())), lists],
        names=["type", "size", "indices", "values"],
    )
