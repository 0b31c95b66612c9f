"""Writing a DataFrame as Parquet to a store. Spark's JVM does this; no row passes through Python."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdgloo.errors import ConfigError, DataError, StoreError
from hvdgloo.spark.common._files import Files
from hvdgloo.spark.data import _columns
from hvdgloo.spark.data._filesystems import scheme_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ROW_GROUP = 16 << 20
"""Size of a row group in bytes. Readers hold whole row groups, and shuffle among them."""

_FILE_ERRORS = re.compile(
    r"(java\.io\.(IO|FileNotFound|UncheckedIO)Exception|java\.nio\.file\.\w+|java\.net\.\w+Exception|"
    r"org\.apache\.hadoop\.\w[\w.]*Exception|java\.lang\.ClassNotFoundException: Class org\.apache\.hadoop\.fs)[^\n]*"
)
"""Errors of Hadoop's file systems. All others are due to the DataFrame, and are raised as Spark raises them."""

_MANY = 1 << 30

_LENGTHS = 4
"""Number of different lengths of a ragged column that are reported."""

_SPLIT = "hvdgloo_split"
"""Column that tells on which side of the validation split a row is; it occurs only in names of directories."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Description of a data set to be written.

    Attributes:
        columns: the columns' names.
        train, val: URLs of the two sides.
        validation: the fraction of rows for validation, or the name of a column that tells whether a row is.
        seed: seed for choosing that fraction.
        partitions: the most files, and tasks that write them.
        ranks: number of ranks that will read.
    """

    columns: Sequence[str]
    train: str
    val: str
    validation: float | str | None
    seed: int
    partitions: int
    ranks: int


@dataclasses.dataclass(frozen=True)
class Written:
    """Facts about a data set that was written.

    Attributes:
        rows: number of rows on both sides together.
        values: the largest number of values in a row, for each column of arrays or vectors.
    """

    rows: int
    values: dict[str, int]


def write(df: DataFrame, plan: Plan, files: Files) -> Written:
    """Write the rows, checking them in the same pass; ``df`` is evaluated once.

    Raises:
        DataError: rows of a column differ in length, or the validation column has nulls.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    kinds = {field.name: field.dataType for field in df.schema.fields}
    selected = [column(name) for name in plan.columns]
    if plan.validation is not None:
        selected.append(_side(plan.validation, kinds, plan.seed).alias(_SPLIT))
    sizes = {name: sizes for name in plan.columns if (sizes := _sizes(name, kinds[name])) is not None}
    metrics = [F.count(F.lit(1)).alias("rows")]
    for number, (length, values) in enumerate(sizes.values()):
        metrics += [
            F.min(length).alias(f"shortest{number}"),
            F.max(length).alias(f"longest{number}"),
            F.max(values).alias(f"values{number}"),
        ]
    if plan.validation is not None:
        metrics.append(F.sum(column(_SPLIT).isNull().cast("long")).alias("unsaid"))
    observation = Observation()
    rows = _spread(df.select(*selected).observe(observation, *metrics), df, plan)
    _write(rows, plan, files)

    seen = observation.get
    if seen.get("unsaid"):
        raise DataError(
            f"validation column {plan.validation!r} is null in {seen['unsaid']} rows: it must tell for each row "
            f"whether it is for validation"
        )
    for number, name in enumerate(sizes):
        if seen[f"shortest{number}"] != seen[f"longest{number}"]:
            raise _ragged(df, plan, files, name, kinds[name])
    return Written(seen["rows"], {name: seen[f"values{number}"] or 0 for number, name in enumerate(sizes)})


def column(name: str) -> Column:
    """Return a column by its name, in which a dot is just a character."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.col(f"`{name.replace('`', '``')}`")


def _side(validation: float | str, kinds: dict[str, Any], seed: int) -> Column:
    """Return a column that is true for validation rows."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import BooleanType

    if not isinstance(validation, str):
        return F.rand(seed) < validation
    if isinstance(kinds[validation], BooleanType):
        return column(validation)
    return column(validation) > 0


def _sizes(name: str, kind: Any) -> tuple[Column, Column] | None:
    """Return columns of the length of a column's rows and of the number of values stored; None for scalars.

    Both are null for null rows, for which Spark's size would be -1 where ``spark.sql.ansi.enabled`` is false.
    """
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import ArrayType

    if isinstance(kind, ArrayType):
        length = F.when(column(name).isNotNull(), F.size(column(name)))
        return length, length
    if not isinstance(kind, VectorUDT):
        return None
    if not hasattr(F, "unwrap_udt"):
        from pyspark.ml.functions import vector_to_array

        length = F.when(column(name).isNotNull(), F.size(vector_to_array(column(name))))
        return length, length
    parts = F.unwrap_udt(column(name))
    values = F.when(column(name).isNotNull(), F.size(parts["values"]))
    return F.coalesce(parts["size"], values), values


def _ragged(df: DataFrame, plan: Plan, files: Files, name: str, kind: Any) -> DataError:
    """Make the error about different lengths, which tells how often each one occurs."""
    sizes = _sizes(name, kind)
    assert sizes is not None
    counts = (
        _read(df, plan, files)
        .where(column(name).isNotNull())
        .groupBy(sizes[0].alias("length"))
        .count()
        .orderBy("count", ascending=False)
        .take(_LENGTHS)
    )
    told = ", ".join(f"{length} elements in {count} {'row' if count == 1 else 'rows'}" for length, count in counts)
    return DataError(
        f"column {name!r} has rows of different lengths ({told}): all rows of a column need the same number of "
        f"elements (pad or cut them)"
    )


def nulls(df: DataFrame, plan: Plan, files: Files, name: str) -> DataError:
    """Make the error about a column with missing values according to the footers, with the number of null rows."""
    count = _read(df, plan, files).where(_has_null(column(name), df.schema[name].dataType)).count()
    return _columns.nulls(name, count) if count else DataError(f"column {name!r} has arrays without elements")


def _has_null(value: Column, kind: Any) -> Column:
    """Return a column that is true for values that are null or arrays containing a null."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import ArrayType

    if not isinstance(kind, ArrayType):
        return value.isNull()
    return value.isNull() | F.exists(value, lambda element: _has_null(element, kind.elementType))


def _read(df: DataFrame, plan: Plan, files: Files) -> DataFrame:
    """Read back both sides of the data set, so that ``df`` is not evaluated again."""
    written = [spark_url(df, url) for url in (plan.train, plan.val) if files.exists(url)]
    return df.sparkSession.read.parquet(*written)


def _spread(rows: DataFrame, df: DataFrame, plan: Plan) -> DataFrame:
    """Limit the number of files to the plan's; rows are moved only if there would be fewer files than ranks."""
    if _partitions(df) < plan.ranks:
        return rows.repartition(plan.ranks)
    return rows.coalesce(plan.partitions)


def _partitions(df: DataFrame) -> int:
    """Return the number of partitions. Asking an adaptive plan would run its shuffles, so it counts as many."""
    executed: Any = df._jdf.queryExecution().executedPlan()
    if executed.getClass().getSimpleName() == "AdaptiveSparkPlanExec":
        return _MANY
    count: int = df.rdd.getNumPartitions()
    return count


def _write(rows: DataFrame, plan: Plan, files: Files) -> None:
    for url in (plan.train, plan.val):
        files.delete(url)
    if plan.validation is None:
        _save(rows, plan.train)
        return
    # Both sides are written at once and then moved into place. Two writes would evaluate the DataFrame twice, and rows
    # of a nondeterministic one could end up on both sides or on neither.
    together = f"{plan.train}.{secrets.token_hex(4)}.part"
    try:
        _save(rows, together, _SPLIT)
        for value, url in (("false", plan.train), ("true", plan.val)):
            folder = f"{together}/{_SPLIT}={value}"
            if files.exists(folder):
                files.move(folder, url)
    finally:
        files.delete(together)


def _save(rows: DataFrame, url: str, *partition: str) -> None:
    from py4j.protocol import Py4JJavaError

    writer = rows.write.mode("overwrite").option("parquet.block.size", _ROW_GROUP).partitionBy(*partition)
    try:
        writer.parquet(spark_url(rows, url))
    except Py4JJavaError as error:
        reason = _reason(error.java_exception)
        if reason is None:
            raise
        raise StoreError(f"Spark cannot write to {url}: {reason}") from error


def _reason(error: Any) -> str | None:
    """Find the message of a Hadoop file system in an error of the JVM and its causes; None if there is none."""
    while error is not None:
        found = _FILE_ERRORS.search(str(error.toString()))
        if found is not None:
            return found[0]
        error = error.getCause()
    return None


def spark_url(df: DataFrame, url: str) -> str:
    """Convert a URL for Spark: Hadoop's file system for S3 is ``s3a``, unless one was configured for ``s3``."""
    scheme = scheme_of(url)
    if scheme == "memory":
        raise ConfigError(f"{url} is in this process's memory, to which Spark cannot write: use another store")
    if scheme == "s3":
        hadoop: Any = df.sparkSession._jsc.hadoopConfiguration()
        if not hadoop.get("fs.s3.impl"):
            return "s3a" + url.removeprefix("s3")
    return url
