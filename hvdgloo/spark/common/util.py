"""Preparation of data for the estimators: checks, the data set in the store, and its metadata."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvdgloo.errors import ConfigError, DataError, StoreError
from hvdgloo.rendezvous import host_identity
from hvdgloo.spark import _session
from hvdgloo.spark.common import _claims as claims
from hvdgloo.spark.common import _metadata, _writing
from hvdgloo.spark.common._claims import Release
from hvdgloo.spark.common._metadata import Metadata, metadata_from_json, metadata_to_json
from hvdgloo.spark.common.cache import Properties, TrainingDataCache
from hvdgloo.spark.common.store import Store, is_databricks
from hvdgloo.spark.data._dataset import Dataset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = [
    "check_dataset",
    "check_shape_compatibility",
    "check_validation",
    "clear_training_cache",
    "data_type_to_str",
    "get_dataset_properties",
    "get_output_cols",
    "get_simple_meta_from_parquet",
    "get_spark_df_output_schema",
    "host_hash",
    "is_databricks",
    "metadata_from_json",
    "metadata_to_json",
    "prepare_data",
    "to_list",
]

logger = logging.getLogger(__name__)

_cache = TrainingDataCache()


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Store,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    *,
    seed: int | None = None,
) -> Iterator[int]:
    """Write a DataFrame to the store as Parquet, unless the same DataFrame object was written there before.

    Spark writes the columns as they are, including vectors. The DataFrame is evaluated once, for training and
    validation rows together.

    Args:
        num_processes: number of ranks that will read.
        validation: the fraction of rows for validation, chosen at random; or a column that is true, or above 0, in
            these rows.
        compress_sparse: mark columns of sparse vectors as sparse in the metadata. Values that are sparse in the
            DataFrame are sparse in the store and in the readers' memory in any case.
        partitions_per_process: the most files for each rank.
        verbose: above 1, log the numbers of rows.
        seed: seed for choosing validation rows.

    Yields:
        The data set's number, for ``store.get_train_data_path`` and ``get_dataset_properties``. While the context lasts
        no other data set gets the number.

    Raises:
        DataError: the data cannot be trained on: unknown columns, strings, nulls, rows of different lengths, fewer rows
            than ranks, no validation rows.
        ConfigError: ``validation`` is of the wrong type, or ``df`` is not a Spark DataFrame.
        LaunchError: its session has ended.
        StoreError: the store cannot be written, or the driver does not see the executors' files.
    """
    if not label_columns:
        raise ConfigError("label_cols is empty: name the columns that the model learns to predict")
    if not feature_columns:
        raise ConfigError("feature_cols is empty: name the model's input columns")
    check_dataframe(df, "fit")
    validation = check_validation(validation, df)
    columns = _columns(label_columns, feature_columns, sample_weight_col)
    _check_names(df, columns)
    check_types(df, columns)
    with store.probed():
        pass
    train, val = (store.get_full_path(path()) for path in (store.get_train_data_path, store.get_val_data_path))
    # The DataFrame itself, not a hash of it: an id or a plan can recur for other rows.
    key = (df, train, val, tuple(columns), validation, seed, compress_sparse, num_processes, partitions_per_process)

    def write(number: int, token: str) -> Properties:
        plan = _writing.Plan(
            columns,
            store.get_full_path(store.get_train_data_path(number)),
            store.get_full_path(store.get_val_data_path(number)),
            validation,
            seed or 0,
            max(1, num_processes * partitions_per_process),
            num_processes,
        )
        return _written(store, df, plan, compress_sparse, token)

    def is_there(number: int, token: str) -> bool:
        path = store.get_full_path(store.get_train_data_path(number))
        known = _metadata.token(store.files, store.get_data_metadata_path(path))
        return known == token and store.is_parquet_dataset(path)

    tried: set[str] = set()

    def claim(number: int) -> Release | None:
        url = store.get_full_path(store.get_train_data_path(number))
        claimed = claims.claim(store.files, url)
        if not isinstance(claimed, claims.Claim):
            return claimed
        if url in tried:  # the user's own paths, which are the same for all numbers
            raise StoreError(f"{claimed} is training on the data set at {url}: give each training paths of its own")
        tried.add(url)
        return None

    with _cache.use(key, write, is_there=is_there, claim=claim) as number:
        rows, val_rows, _, _ = _cache.properties(number)
        check_dataset(num_processes, rows, val_rows, validation)
        if verbose > 1:
            logger.info("%d rows to train on, %d to validate on", rows, val_rows)
        yield number


def _written(store: Store, df: DataFrame, plan: _writing.Plan, compress_sparse: bool, token: str) -> Properties:
    """Write a data set and check the result; a data set that cannot be trained on is deleted."""
    try:
        written = _writing.write(df, plan, store.files)
        return _looked_at(store, df, plan, written, compress_sparse, token)
    except BaseException:
        for url in (plan.train, plan.val):
            with contextlib.suppress(StoreError):
                store.files.delete(url)
        raise


def _looked_at(
    store: Store, df: DataFrame, plan: _writing.Plan, written: _writing.Written, compress_sparse: bool, token: str
) -> Properties:
    sides = {url: _dataset(store, url) for url in (plan.train, plan.val)}
    found = {url: dataset for url, dataset in sides.items() if dataset is not None}
    rows = {url: found[url].total_rows if url in found else 0 for url in sides}
    if sum(rows.values()) != written.rows:
        raise StoreError(
            f"Spark wrote {written.rows} rows to {plan.train}, but the driver finds {sum(rows.values())} there: "
            f"a store must be on a file system that the driver and all executors share (NFS, HDFS, S3, ...)"
        )
    if not rows[plan.train]:
        raise DataError("no rows are left for training" if written.rows else "the DataFrame has no rows")
    for dataset in found.values():
        for name in _metadata.null_counts(dataset, plan.columns):
            raise _writing.nulls(df, plan, store.files, name)
    metadata = _metadata.describe(
        found[plan.train], plan.columns, compress_sparse=compress_sparse, max_sizes=written.values
    )
    for name in plan.columns:
        metadata[name]["spark_data_type"] = _metadata.spark_type_of(df.schema[name].dataType, metadata[name])
    row_bytes = found[plan.train].row_bytes
    description = store.get_data_metadata_path(plan.train)
    _metadata.save(store.files, description, rows[plan.train], rows[plan.val], row_bytes, metadata, token)
    return rows[plan.train], rows[plan.val], metadata, row_bytes


def _dataset(store: Store, url: str) -> Dataset | None:
    """Open the data set at ``url``; return None if there is none."""
    if not store.files.exists(url):
        return None
    try:
        return Dataset.open(url, options=store.storage_options)
    except DataError:
        # Spark leaves a directory without Parquet files where there were no rows.
        return None


def get_dataset_properties(dataset_idx: int) -> Properties:
    """Return the properties of a data set that ``prepare_data`` wrote.

    Returns:
        the numbers of training and validation rows, the metadata, and the average size of a row in bytes.
    """
    return _cache.properties(dataset_idx)


def clear_training_cache() -> None:
    """Forget the data sets that ``prepare_data`` wrote, so that it writes them again. The files stay."""
    _cache.clear()


def get_simple_meta_from_parquet(
    store: Store,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
) -> Properties:
    """Read the properties of any Parquet files at the store's paths from their footers; see ``get_dataset_properties``.

    Raises:
        DataError: there are no rows, or a column is unknown, not numeric, or has nulls.
    """
    columns = _columns(label_columns, feature_columns, sample_weight_col)
    url = store.get_full_path(store.get_train_data_path(dataset_idx))
    train = _dataset(store, url)
    if train is None or not train.total_rows:
        raise DataError(f"there are no Parquet files with training rows at {url}")
    val = _dataset(store, store.get_full_path(store.get_val_data_path(dataset_idx)))
    if val is not None and val.total_rows:
        _metadata.describe(val, columns)
    val_rows = 0 if val is None else val.total_rows
    metadata = _metadata.describe(train, columns)
    known = _metadata.saved(store.files, store.get_data_metadata_path(url), train.total_rows, val_rows)
    metadata.update({name: known[name] for name in columns if name in known})
    return train.total_rows, val_rows, metadata, train.row_bytes


def check_dataset(num_processes: int, train_rows: int, val_rows: int, validation: float | str | None) -> None:
    """Check that each rank gets at least one row.

    Raises:
        DataError: there are fewer training rows than ranks, or fewer validation rows although there is validation.
    """
    if train_rows < num_processes:
        raise DataError(
            f"{train_rows} training rows cannot be divided among {num_processes} ranks: each needs at least one"
        )
    if validation and val_rows < num_processes:
        chosen = f"column {validation!r}" if isinstance(validation, str) else f"validation={validation}"
        raise DataError(f"{chosen} leaves {val_rows} validation rows, but {num_processes} ranks need at least one each")


def check_validation(validation: float | str | None, df: DataFrame | None = None) -> float | str | None:
    """Return ``validation`` as a fraction or a column; None for no validation.

    Raises:
        ConfigError: it is neither a number in [0, 1) nor a name.
        DataError: there is no such column in ``df``, or it holds neither booleans nor numbers.
    """
    if isinstance(validation, str) and (df is None or validation not in df.columns):
        # Earlier versions of Horovod converted fractions to strings.
        with contextlib.suppress(ValueError):
            validation = float(validation)
    if validation is None:
        return None
    if isinstance(validation, str) and validation:
        if df is not None:
            from pyspark.sql.types import BooleanType, NumericType

            _check_names(df, [validation])
            kind = df.schema[validation].dataType
            if not isinstance(kind, (BooleanType, NumericType)):
                raise DataError(
                    f"validation column {validation!r} is of type {kind.simpleString()}: it must hold booleans, or "
                    f"numbers above 0 for validation rows"
                )
        return validation
    if isinstance(validation, bool) or not isinstance(validation, (int, float)) or not 0 <= validation < 1:
        raise ConfigError(f"validation={validation!r}: give a fraction of the rows in [0, 1), or the name of a column")
    return float(validation) or None


def check_shape_compatibility(
    metadata: Metadata,
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Sequence[int | None]] | None = None,
    output_shapes: Sequence[Sequence[int | None]] | None = None,
    label_shapes: Sequence[Sequence[int | None]] | None = None,
) -> None:
    """Compare columns with a model's inputs and outputs. The first dimension of a shape is the batch.

    Raises:
        DataError: a column's size does not match its shape, or the numbers of shapes and columns differ.
    """
    for what, columns, shapes, whose in (
        ("feature", feature_columns, input_shapes, "the model's input"),
        ("label", label_columns, output_shapes, "the model's output"),
        ("label", label_columns, label_shapes, "label_shapes"),
    ):
        if shapes is None:
            continue
        if len(shapes) != len(columns):
            raise DataError(
                f"there are {len(columns)} {what} columns ({', '.join(columns)}), but {len(shapes)} shapes of {whose}"
            )
        for index, (name, shape) in enumerate(zip(columns, shapes, strict=True)):
            size = metadata[name]["shape"]
            if size is not None and not _fits(size, shape):
                raise DataError(
                    f"{what} column {name!r} has {size} {'value' if size == 1 else 'values'} in a row, which do not "
                    f"fit {whose} {index} of shape {tuple(shape)}"
                )


def _fits(size: int, shape: Sequence[int | None]) -> bool:
    """Return whether rows of ``size`` values fit a shape whose first dimension is the batch."""
    inner = list(shape[1:])
    fixed = math.prod(length for length in inner if length is not None and length >= 0)
    if any(length is None or length < 0 for length in inner):
        return size % max(fixed, 1) == 0
    return size == fixed


def to_list(value: Any, length: int) -> list[Any] | None:
    """Return ``value`` as a list of this length: a single value is repeated, None stays None.

    Raises:
        ConfigError: it is a list of another length.
    """
    if value is None:
        return None
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(values) == 1:
        return values * length
    if len(values) != length:
        raise ConfigError(f"there are {len(values)} values, but one or {length} are needed: {value!r}")
    return values


def get_output_cols(label_columns: Sequence[str], output_columns: Sequence[str] | None = None) -> list[str]:
    """Return the columns that a model adds: ``output_columns``, or by default ``<label>__output``.

    Raises:
        ConfigError: their number differs from the labels'.
    """
    if not output_columns:
        return [f"{name}__output" for name in label_columns]
    if len(output_columns) != len(label_columns):
        raise ConfigError(
            f"there are {len(output_columns)} output columns ({', '.join(output_columns)}), but {len(label_columns)} "
            f"label columns ({', '.join(label_columns)})"
        )
    return list(output_columns)


def get_spark_df_output_schema(
    input_schema: StructType, label_columns: Sequence[str], output_columns: Sequence[str], metadata: Metadata
) -> StructType:
    """Return the schema of a DataFrame with a model's outputs. Existing columns of the same names are replaced.

    An output has its label's type: a vector for vectors, an array of float64 for arrays. For a numeric label it is a
    number of the same type if the model returns one for each row (``output_shape`` in the metadata), and a vector if it
    returns several.
    """
    from pyspark.sql.types import StructField, StructType

    kept = [field for field in input_schema.fields if field.name not in set(output_columns)]
    added = [
        StructField(output, _output_type(metadata[label]), True)
        for label, output in zip(label_columns, output_columns, strict=True)
    ]
    return StructType(kept + added)


def _output_type(entry: dict[str, Any]) -> Any:
    from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
    from pyspark.sql.types import ArrayType, DecimalType, DoubleType

    kind = entry["spark_data_type"]
    if kind is ArrayType:
        return ArrayType(DoubleType())
    if kind in (DenseVector, SparseVector, VectorUDT) or math.prod(entry.get("output_shape") or ()) != 1:
        return VectorUDT()
    # Decimal numbers are read as float64.
    return DoubleType() if kind is DecimalType else kind()


def data_type_to_str(kind: Any) -> str:
    """Return a type from ``metadata`` as one word: Vector, Array, Double, Float, Int, Long, Boolean, Binary, ..."""
    name = getattr(kind, "__name__", None) or type(kind).__name__
    if name in ("DenseVector", "SparseVector", "VectorUDT"):
        return "Vector"
    name = name.removesuffix("Type")
    return "Int" if name == "Integer" else name


def host_hash(salt: str | None = None) -> str:
    """Return a text that is equal in processes that can share memory, unless their ``salt`` differs."""
    return host_identity() if salt is None else f"{host_identity()}-{salt}"


def _columns(labels: Sequence[str], features: Sequence[str], weights: str | None) -> list[str]:
    """Return every column that is read, without duplicates."""
    return list(dict.fromkeys([*labels, *features, *([weights] if weights else [])]))


def _check_names(df: DataFrame, columns: Sequence[str]) -> None:
    unknown = [name for name in columns if name not in df.columns]
    if unknown:
        raise DataError(f"the DataFrame has no column {', '.join(map(repr, unknown))}; it has {', '.join(df.columns)}")


def check_dataframe(df: DataFrame, method: str) -> None:
    """Check that a method's argument is a usable DataFrame.

    Raises:
        ConfigError: it is not a Spark DataFrame, or belongs to Spark Connect.
        LaunchError: its session has ended.
    """
    from pyspark.sql import DataFrame

    if not isinstance(df, DataFrame) and not type(df).__module__.startswith("pyspark.sql.connect"):
        kind = f"{type(df).__module__.partition('.')[0]}.{type(df).__qualname__}"
        hint = "; spark.createDataFrame(df) converts it" if kind == "pandas.DataFrame" else ""
        raise ConfigError(f"{method}(df): give a Spark DataFrame, not {kind.removeprefix('builtins.')}{hint}")
    _session.active(df.sparkSession)


def check_types(df: DataFrame, columns: Sequence[str]) -> None:
    """Check the types in a DataFrame's schema.

    Raises:
        DataError: a column holds values that no model accepts.
    """
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import ArrayType, BinaryType, BooleanType, NumericType, StringType

    for name in columns:
        kind = df.schema[name].dataType
        if isinstance(kind, (VectorUDT, BinaryType)):
            continue
        while isinstance(kind, ArrayType):
            kind = kind.elementType
        if isinstance(kind, StringType):
            raise DataError(
                f"column {name!r} holds strings, which no model accepts: convert them to numbers first "
                f"(pyspark.ml.feature.StringIndexer does that)"
            )
        if not isinstance(kind, (NumericType, BooleanType)):
            raise DataError(
                f"column {name!r} is of type {df.schema[name].dataType.simpleString()}, which no model accepts: "
                f"columns of numbers, booleans, arrays of them, vectors and binary values can be read"
            )
