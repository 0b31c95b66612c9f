"""Metadata of a data set's columns: from footers and a few rows, and as JSON next to the data."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hvdgloo.errors import DataError, StoreError
from hvdgloo.spark.common import constants
from hvdgloo.spark.common._files import Files
from hvdgloo.spark.data import _columns
from hvdgloo.spark.data._dataset import Dataset

if TYPE_CHECKING:
    import pyarrow as pa

Metadata = dict[str, dict[str, Any]]

_SAMPLE = 64
"""Number of rows from which a column's shape is taken. Ranks check all others as they read them."""


def describe(
    dataset: Dataset, columns: Sequence[str], *, compress_sparse: bool = False, max_sizes: dict[str, int] | None = None
) -> Metadata:
    """Return the metadata of these columns.

    Args:
        max_sizes: the largest number of entries in a row, for columns where it is known.

    Raises:
        DataError: a column is unknown, not numeric, or has nulls.
    """
    dataset.check_columns(columns)
    for name in columns:
        _columns.check_type(name, dataset.schema.field(name).type)
    for name, count in null_counts(dataset, columns).items():
        raise _columns.nulls(name, count)
    sample = dataset.sample(columns, _SAMPLE)
    return {
        name: _column(dataset, name, sample[name], compress_sparse, (max_sizes or {}).get(name)) for name in columns
    }


def _column(dataset: Dataset, name: str, sample: Any, compress_sparse: bool, max_size: int | None) -> dict[str, Any]:
    kind = dataset.schema.field(name).type
    sparse_only = _columns.is_vector(kind) and not _holds_dense_vectors(dataset, name)
    shape: int | None = 1
    if isinstance(sample, _columns.CSR):
        shape = sample.width
    elif sample.ndim > 1:
        shape = functools.reduce(lambda a, b: a * b, sample.shape[1:], 1)
    elif _columns.is_binary(kind):
        shape = None
    if sparse_only and compress_sparse:
        form = constants.CUSTOM_SPARSE
    elif _columns.is_vector(kind) or _columns.is_list(kind):
        form = constants.ARRAY
    else:
        form = constants.NOCHANGE
    return {
        "spark_data_type": _spark_type(_spark_name(kind, sparse_only)),
        "is_sparse_vector_only": sparse_only,
        "shape": shape,
        "intermediate_format": form,
        "max_size": shape if max_size is None else max_size,
    }


def _leaves(dataset: Dataset, name: str) -> list[tuple[int, str]]:
    """Return the numbers of a column's Parquet columns, and their paths without the column's name."""
    # By number, since the path of a field "b" of a column "a" is the same as a column "a.b".
    schema = next(iter(dataset.footers.values())).schema
    first = 0
    for field in dataset.schema:
        last = first + _leaf_count(field.type)
        if field.name == name:
            return [(index, schema.column(index).path[len(name) + 1 :]) for index in range(first, last)]
        first = last
    return []


def _leaf_count(kind: pa.DataType) -> int:
    return sum(_leaf_count(kind.field(index).type) for index in range(kind.num_fields)) if kind.num_fields else 1


def _statistics(dataset: Dataset, leaf: int) -> Iterable[Any]:
    """Yield the statistics of a Parquet column in each nonempty row group; None where the writer omitted them."""
    for footer in dataset.footers.values():
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            if group.num_rows:
                yield group.column(leaf).statistics


def null_counts(dataset: Dataset, columns: Sequence[str]) -> dict[str, int]:
    """Return, from the footers, the columns with nulls or with arrays containing nulls, and the least number of nulls.

    Empty arrays are counted, too, since Parquet counts entries without a value.
    """
    found = {}
    for name in columns:
        kind = dataset.schema.field(name).type
        for leaf, path in _leaves(dataset, name):
            # A dense vector has no size and no indices.
            if _columns.is_vector(kind) and path != "type":
                continue
            count = sum(
                statistics.null_count
                for statistics in _statistics(dataset, leaf)
                if statistics is not None and statistics.has_null_count
            )
            if count:
                found[name] = count
    return found


def _holds_dense_vectors(dataset: Dataset, name: str) -> bool:
    leaf = next(leaf for leaf, path in _leaves(dataset, name) if path == "type")
    return any(
        statistics is None or not statistics.has_min_max or statistics.max != 0
        for statistics in _statistics(dataset, leaf)
    )


def _spark_name(kind: pa.DataType, sparse_only: bool) -> str:
    import pyarrow as pa

    if _columns.is_vector(kind):
        return "SparseVector" if sparse_only else "DenseVector"
    if _columns.is_list(kind):
        return "ArrayType"
    if _columns.is_binary(kind):
        return "BinaryType"
    if pa.types.is_decimal(kind):
        return "DecimalType"
    names = {
        pa.bool_(): "BooleanType",
        pa.int8(): "ByteType",
        pa.int16(): "ShortType",
        pa.uint8(): "ShortType",
        pa.int32(): "IntegerType",
        pa.uint16(): "IntegerType",
        pa.float16(): "FloatType",
        pa.float32(): "FloatType",
        pa.float64(): "DoubleType",
    }
    return names.get(kind, "LongType")


def spark_type_of(kind: Any, entry: dict[str, Any]) -> Any:
    """Return Spark's class for a column of this Spark type."""
    from pyspark.ml.linalg import VectorUDT

    if isinstance(kind, VectorUDT):
        return _spark_type("SparseVector" if entry["is_sparse_vector_only"] else "DenseVector")
    return type(kind)


def _spark_type(name: str) -> Any:
    """Return Spark's class of this name."""
    from pyspark.ml import linalg
    from pyspark.sql import types

    known = {
        "SparseVector": linalg.SparseVector,
        "DenseVector": linalg.DenseVector,
        "VectorUDT": linalg.VectorUDT,
        **{kind.__name__: kind for kind in vars(types).values() if _is_type(kind, types.DataType)},
    }
    if name not in known:  # it may have been read from a file
        raise DataError(f"{name!r} is not a Spark type: the metadata are damaged, or of another version of Spark")
    return known[name]


def _is_type(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def metadata_to_json(metadata: Metadata) -> str:
    """Convert metadata to JSON, which has Spark's types by name."""
    named = {
        name: {**entry, "spark_data_type": getattr(entry["spark_data_type"], "__name__", entry["spark_data_type"])}
        for name, entry in metadata.items()
    }
    return json.dumps(named)


def metadata_from_json(text: str) -> Metadata:
    """Read metadata from the JSON of ``metadata_to_json``."""
    return {
        name: {**entry, "spark_data_type": _spark_type(entry["spark_data_type"])}
        for name, entry in json.loads(text).items()
    }


def save(
    files: Files, url: str, train_rows: int, val_rows: int, row_bytes: float, metadata: Metadata, token: str
) -> None:
    """Write the description of a data set next to it, with a token by which its writer recognises it."""
    content = {
        "version": 1,
        "token": token,
        "train_rows": train_rows,
        "val_rows": val_rows,
        "row_bytes": row_bytes,
        "columns": json.loads(metadata_to_json(metadata)),
    }
    files.write(url, json.dumps(content, indent=1).encode())


def token(files: Files, url: str) -> str | None:
    """Return the token of the description that ``save`` wrote at ``url``; None if there is none."""
    with contextlib.suppress(StoreError, ValueError, KeyError, TypeError):
        return str(json.loads(files.read(url))["token"])
    return None


def saved(files: Files, url: str, train_rows: int, val_rows: int) -> Metadata:
    """Return the metadata that ``save`` wrote; empty if they are of other data or cannot be read."""
    with contextlib.suppress(StoreError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(files.read(url))
        if (content["version"], content["train_rows"], content["val_rows"]) == (1, train_rows, val_rows):
            return metadata_from_json(json.dumps(content["columns"]))
    return {}
