"""DataFrames in stores: written once by Spark alone, divided once, and looked at before any rank trains."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvdgloo.errors import ConfigError, DataError, StoreError
from hvdgloo.spark.common import _claims as claims
from hvdgloo.spark.common import _writing, constants, util
from hvdgloo.spark.common.cache import TrainingDataCache
from hvdgloo.spark.common.datamodule import ParquetDataModule
from hvdgloo.spark.common.store import Store
from hvdgloo.spark.common.util import (
    check_shape_compatibility,
    check_validation,
    clear_training_cache,
    data_type_to_str,
    get_dataset_properties,
    get_output_cols,
    get_simple_meta_from_parquet,
    get_spark_df_output_schema,
    host_hash,
    metadata_from_json,
    metadata_to_json,
    prepare_data,
    to_list,
)

ROWS = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    clear_training_cache()
    yield Store.create(str(tmp_path))
    clear_training_cache()


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    from pyspark.ml.linalg import Vectors

    rows = [
        (
            i,
            float(i),
            i % 3 == 0,
            Vectors.dense([i, 1.0, 2.0]),
            Vectors.sparse(3, {1: float(i)}),
            Vectors.dense([0.0, i, 0.0]) if i % 2 else Vectors.sparse(3, {1: float(i)}),
            [float(i), 1.0],
            bytearray(b"%d" % i),
        )
        for i in range(ROWS)
    ]
    names = ["id", "y", "third", "dense", "sparse", "mixed", "array", "binary"]
    made = spark.createDataFrame(rows, names).repartition(2).cache()
    made.count()
    return made


FEATURES = ["id", "third", "dense", "sparse", "mixed", "array", "binary"]


def read(store: Store, path: str) -> dict[str, np.ndarray]:
    batches = list(store.to_remote("r").batches(path, batch_size=7))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_columns_come_out_of_the_store_as_they_went_in(store: Store, df: Any) -> None:
    with prepare_data(2, store, df, ["y"], FEATURES) as number:
        assert number == 0
        rows, val_rows, metadata, row_bytes = get_dataset_properties(number)
        found = read(store, store.get_train_data_path(number))
    ids = found["id"]
    assert sorted(ids) == list(range(ROWS))
    np.testing.assert_array_equal(found["y"], ids)
    np.testing.assert_array_equal(found["third"], ids % 3 == 0)
    zeros, ones = np.zeros(ROWS), np.ones(ROWS)
    np.testing.assert_array_equal(found["dense"], np.stack([ids, ones, 2 * ones], 1))
    for name in ("sparse", "mixed"):
        np.testing.assert_array_equal(found[name], np.stack([zeros, ids, zeros], 1))
    np.testing.assert_array_equal(found["array"], np.stack([ids, ones], 1))
    assert found["binary"].tolist() == [b"%d" % i for i in ids]
    assert (rows, val_rows) == (ROWS, 0)
    assert row_bytes > 0
    told = {
        name: (data_type_to_str(entry["spark_data_type"]), entry["shape"], entry["intermediate_format"])
        for name, entry in metadata.items()
    }
    assert told == {
        "y": ("Double", 1, constants.NOCHANGE),
        "id": ("Long", 1, constants.NOCHANGE),
        "third": ("Boolean", 1, constants.NOCHANGE),
        "dense": ("Vector", 3, constants.ARRAY),
        "sparse": ("Vector", 3, constants.ARRAY),
        "mixed": ("Vector", 3, constants.ARRAY),
        "array": ("Array", 2, constants.ARRAY),
        "binary": ("Binary", None, constants.NOCHANGE),
    }
    assert [name for name, entry in metadata.items() if entry["is_sparse_vector_only"]] == ["sparse"]
    assert metadata["sparse"]["max_size"] == 1


def test_what_is_known_of_the_columns_is_json_beside_the_data(store: Store, df: Any) -> None:
    with prepare_data(2, store, df, ["y"], FEATURES, compress_sparse=True) as number:
        properties = get_dataset_properties(number)
        path = store.get_train_data_path(number)
    assert properties[2]["sparse"]["intermediate_format"] == constants.CUSTOM_SPARSE
    content = json.loads(store.read(store.get_data_metadata_path(path)))
    assert content["train_rows"] == ROWS
    assert content["columns"]["dense"]["spark_data_type"] == "DenseVector"
    # With it a later program knows what footers do not say; without it, what they say.
    assert get_simple_meta_from_parquet(store, ["y"], FEATURES, dataset_idx=number) == properties
    store.write_text(store.get_data_metadata_path(path), "no JSON")
    _, _, metadata, _ = get_simple_meta_from_parquet(store, ["y"], FEATURES, dataset_idx=number)
    for name, entry in metadata.items():
        assert entry["spark_data_type"] is properties[2][name]["spark_data_type"]
        assert entry["shape"] == properties[2][name]["shape"]
    # Whatever else models add to it goes there and back, too.
    metadata["y"]["output_shape"] = [3]
    assert metadata_from_json(metadata_to_json(metadata)) == metadata
    files = [name for _, _, names in os.walk(store.prefix_path.removeprefix("file://")) for name in names]
    assert not [name for name in files if name.endswith((".pkl", ".pickle"))]


@pytest.mark.parametrize("seed", [None, 7])
def test_a_fraction_is_validated_on_and_no_row_is_on_both_sides_or_lost(
    store: Store, spark: Any, seed: int | None
) -> None:
    """Of a DataFrame whose rows are others each time it is evaluated: it is evaluated once."""
    from pyspark.sql import functions as F  # noqa: N812

    evaluated = spark.sparkContext.accumulator(0)

    def count(value):  # type: ignore[no-untyped-def] # Spark reads annotations
        evaluated.add(1)
        return value

    counted = F.udf(count, "long").asNondeterministic()
    changing = spark.range(1000, numPartitions=3).select(counted("id").alias("id"), F.expr("uuid()").alias("u"))
    changing = changing.withColumn("x", F.hash("u").cast("double"))
    with prepare_data(2, store, changing, ["x"], ["id"], validation=0.2, seed=seed) as number:
        rows, val_rows, _, _ = get_dataset_properties(number)
        train = read(store, store.get_train_data_path(number))
        val = read(store, store.get_val_data_path(number))
    assert (len(train["id"]), len(val["id"])) == (rows, val_rows)
    assert sorted([*train["id"], *val["id"]]) == list(range(1000))
    assert not {*train["x"]} & {*val["x"]}
    assert 120 < val_rows < 280
    assert evaluated.value == 1000


def test_the_same_seed_validates_on_the_same_rows(store: Store, df: Any) -> None:
    def chosen(seed: int) -> list[int]:
        with prepare_data(2, store, df, ["y"], ["id"], validation=0.5, seed=seed) as number:
            return sorted(read(store, store.get_val_data_path(number))["id"])

    first = chosen(1)
    clear_training_cache()
    assert chosen(1) == first
    assert chosen(1) != chosen(2)


@pytest.mark.parametrize("column", ["third", "number"])
def test_a_column_says_which_rows_are_validated_on(store: Store, df: Any, column: str) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    marked = df.withColumn("number", F.col("third").cast("double") - 0.5)
    with prepare_data(2, store, marked, ["y"], ["id"], validation=column) as number:
        train = read(store, store.get_train_data_path(number))
        val = read(store, store.get_val_data_path(number))
    assert sorted(val["id"]) == list(range(0, ROWS, 3))
    assert sorted(train["id"]) == [i for i in range(ROWS) if i % 3]
    assert column not in train


def test_a_weight_and_odd_names_are_read_too(store: Store, df: Any) -> None:
    odd = df.withColumnRenamed("id", "the.id").withColumnRenamed("third", "a `third`")
    with prepare_data(2, store, odd, ["y"], ["the.id", "array"], sample_weight_col="a `third`") as number:
        found = read(store, store.get_train_data_path(number))
    assert set(found) == {"y", "the.id", "array", "a `third`"}
    np.testing.assert_array_equal(found["the.id"] % 3 == 0, found["a `third`"])


def test_few_partitions_are_as_good_as_many(store: Store, spark: Any) -> None:
    one = spark.range(40, numPartitions=1).selectExpr("id", "cast(id as double) y")
    with prepare_data(3, store, one, ["y"], ["id"], partitions_per_process=1) as number:
        path = store.get_train_data_path(number)
        assert len(store.get_parquet_dataset(path).files) == 3
        readers = [store.to_remote("r").batches(path, rank=rank, size=3) for rank in range(3)]
        assert sorted(value for reader in readers for batch in reader for value in batch["id"]) == list(range(40))
    many = spark.range(40, numPartitions=8).selectExpr("id", "cast(id as double) y")
    with prepare_data(2, store, many, ["y"], ["id"], partitions_per_process=2) as number:
        assert len(store.get_parquet_dataset(store.get_train_data_path(number)).files) == 4
    # What a shuffle makes is not run twice only to count its partitions.
    shuffled = many.groupBy("id").agg({"y": "max"}).withColumnRenamed("max(y)", "y")
    with prepare_data(2, store, shuffled, ["y"], ["id"]) as number:
        assert get_dataset_properties(number)[0] == 40


def test_no_row_passes_through_python_and_nothing_is_pickled(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F  # noqa: N812

    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/there/is/no/python")
    df = spark.range(20).select("id", F.rand(1).alias("y"), array_to_vector(F.array(F.rand(2))).alias("vector"))
    with pytest.raises(Exception, match="/there/is/no/python"):
        df.rdd.map(lambda row: row).count()
    with prepare_data(2, Store.create(str(tmp_path)), df, ["y"], ["vector"], validation=0.5) as number:
        assert sum(get_dataset_properties(number)[:2]) == 20
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert {path.suffix for path in files if path.name != "_SUCCESS"} == {".parquet", ".json"}


def test_a_well_compressed_data_set_is_a_good_one(store: Store, spark: Any) -> None:
    """Fewer bytes than rows, which Horovod takes for corrupt."""
    rows = 50_000
    df = spark.range(rows, numPartitions=2).selectExpr("1D y", "true x")
    with prepare_data(2, store, df, ["y"], ["x"]) as number:
        path = store.get_train_data_path(number)
        assert get_dataset_properties(number)[0] == rows
        folder = Path(store.get_full_path(path).removeprefix("file://"))
        assert sum(file.stat().st_size for file in folder.glob("*.parquet")) < rows
        found = read(store, path)
    assert (len(found["x"]), found["y"].sum()) == (rows, rows)


# --- what cannot be trained on


def _changed(expression: str, name: str = "y") -> Callable[[Any], Any]:
    """Of three rows a column is ``expression``."""
    from pyspark.sql import functions as F  # noqa: N812

    return lambda df: df.withColumn(name, F.when(df["id"] < 3, F.expr(expression)).otherwise(df[name]))


BAD: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "label": (lambda df: df, {"labels": ["nope"]}, "the DataFrame has no column 'nope'; it has id, y"),
    "validation": (lambda df: df, {"validation": "nope"}, "the DataFrame has no column 'nope'"),
    "vectors say nothing": (lambda df: df, {"validation": "dense"}, "'dense' is of type vector"),
    "strings": (lambda df: df.selectExpr("id", "cast(y as string) y"), {}, "column 'y' holds strings.*StringIndexer"),
    "dates": (lambda df: df.selectExpr("id", "current_date() y"), {}, "column 'y' is of type date"),
    "null": (_changed("null"), {}, "column 'y' is null in 3 rows"),
    "null vectors": (_changed("null", "mixed"), {}, "column 'mixed' is null in 3 rows"),
    "null arrays": (_changed("null", "array"), {}, "column 'array' is null in 3 rows"),
    "null in arrays": (_changed("array(1D, null)", "array"), {}, "column 'array' is null in 3 rows"),
    "null validation": (_changed("null", "third"), {"validation": "third"}, "'third' is null in 3 rows"),
    "ragged": (
        _changed("array(1D)", "array"),
        {},
        r"'array' has rows of different lengths \(2 elements in 57 rows, 1 elements in 3 rows\)",
    ),
    "ragged, divided": (_changed("array(1D)", "array"), {"validation": 0.5}, "1 elements in 3 rows"),
    "no rows": (lambda df: df.where("y < 0"), {}, "the DataFrame has no rows"),
    "few rows": (lambda df: df.where("y < 2"), {"ranks": 3}, "2 training rows cannot be divided among 3 ranks"),
    "empty split": (lambda df: df, {"validation": 1e-9}, "leaves 0 validation rows, but 2 ranks need"),
    "all validated on": (
        lambda df: df.selectExpr("*", "true v"),
        {"validation": "v"},
        "no rows are left for training",
    ),
}


@pytest.fixture
def lenient(spark: Any) -> Iterator[None]:
    """Spark as it is by default before 4.0: the size of null is -1."""
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", "false")
    yield
    spark.conf.set("spark.sql.ansi.enabled", before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("null", "array")], "column 'array' is null in 3 rows"),
        ([("null", "mixed")], "column 'mixed' is null in 3 rows"),
        ([("if(id < 1, null, array(1D))", "array")], r"2 elements in 57 rows, 1 elements in 2 rows\)"),
    ],
    ids=["arrays", "vectors", "ragged besides"],
)
def test_nulls_are_no_rows_of_another_length_where_their_size_is_minus_one(
    store: Store, df: Any, lenient: None, changes: list[tuple[str, str]], message: str
) -> None:
    frame = df
    for expression, name in changes:
        frame = _changed(expression, name)(frame)
    with pytest.raises(DataError, match=message), prepare_data(2, store, frame, ["y"], ["array", "mixed"]):
        pass


def test_nulls_within_nested_arrays_are_counted(store: Store, df: Any) -> None:
    nested = df.selectExpr("y", "if(id < 3, array(array(1D, null)), array(array(1D, 2D))) n")
    with (
        pytest.raises(DataError, match="column 'n' is null in 3 rows"),
        prepare_data(2, store, nested, ["y"], ["n"]),
    ):
        pass


def test_a_column_is_not_taken_for_a_field_of_another(store: Store, df: Any) -> None:
    """Parquet calls the field ``type`` of a vector ``v`` as Spark calls a column ``v.type``."""
    frame = df.selectExpr("y", "mixed v", "if(id < 3, null, 1D) `v.type`")
    with prepare_data(2, store, frame, ["y"], ["v"]):
        pass
    with (
        pytest.raises(DataError, match=r"column 'v\.type' is null in 3 rows"),
        prepare_data(2, store, frame, ["y"], ["v", "v.type"]),
    ):
        pass


@pytest.mark.parametrize("what", BAD)
def test_data_that_cannot_be_trained_on_are_named_before_training(store: Store, df: Any, what: str) -> None:
    change, options, message = BAD[what]
    frame, ranks, labels = change(df), options.get("ranks", 2), options.get("labels", ["y"])
    features = [name for name in ("id", "array", "mixed") if name in frame.columns]
    with (
        pytest.raises(DataError, match=message),
        prepare_data(ranks, store, frame, labels, features, options.get("validation")),
    ):
        pass


def test_ragged_vectors_are_counted(store: Store, spark: Any) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([1.0, 2.0]), 1.0), (Vectors.sparse(3, {0: 1.0}), 1.0), (Vectors.dense([1.0, 2.0]), 2.0)]
    with (
        pytest.raises(DataError, match=r"2 elements in 2 rows, 3 elements in 1 row\)"),
        prepare_data(1, store, spark.createDataFrame(rows, ["v", "y"]), ["y"], ["v"]),
    ):
        pass
    # What cannot be trained on does not stay.
    assert os.listdir(store.prefix_path.removeprefix("file://")) == []


@pytest.mark.parametrize("validation", [1.0, -0.1, True, 5, [0.1], ""])
def test_a_validation_that_is_neither_fraction_nor_column_is_refused(validation: Any) -> None:
    with pytest.raises(ConfigError, match=r"give a fraction of the rows in \[0, 1\), or the name of a column"):
        check_validation(validation)


def test_a_validation_may_be_a_text_or_none() -> None:
    assert [check_validation(value) for value in (None, 0, 0.0, "0", 0.25, "0.25", "column")] == [
        *[None] * 4,
        0.25,
        0.25,
        "column",
    ]


def test_labels_and_features_are_needed(store: Store, df: Any) -> None:
    for labels, features, message in (([], ["id"], "label_cols is empty"), (["y"], [], "feature_cols is empty")):
        with pytest.raises(ConfigError, match=message), prepare_data(2, store, df, labels, features):
            pass


# --- stores that will not do


def test_a_store_that_executors_do_not_share_is_found_before_training(
    store: Store, df: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("executor")
    monkeypatch.setattr(_writing, "spark_url", lambda df, url: f"file://{elsewhere}/data")
    with (
        pytest.raises(StoreError, match=f"Spark wrote {ROWS} rows to .*, but the driver finds 0 there: a store must"),
        prepare_data(2, store, df, ["y"], ["id"]),
    ):
        pass


def test_a_store_that_cannot_be_written_is_found_before_spark_starts(tmp_path: Path, df: Any) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(StoreError, match="cannot be written by the driver"),
        prepare_data(2, Store.create(f"{tmp_path}/file/me"), df, ["y"], ["id"]),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="in this process's memory, to which Spark cannot write"),
        prepare_data(2, Store.create("memory://me"), df, ["y"], ["id"]),
    ):
        pass


def test_what_spark_cannot_write_is_told_in_a_sentence(
    store: Store, df: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for url, message in (
        (f"file://{tmp_path}/file/data", r"Spark cannot write to .*Exception"),
        ("s3a://bucket/data", r"Spark cannot write to .*org\.apache\.hadoop\.fs\.s3a\.S3AFileSystem not found"),
    ):
        monkeypatch.setattr(_writing, "spark_url", lambda df, _, url=url: url)
        with pytest.raises(StoreError, match=message) as raised, prepare_data(2, store, df, ["y"], ["id"]):
            pass
        assert "\n" not in str(raised.value)


def test_a_dataframe_that_fails_fails_as_it_does_elsewhere(store: Store, df: Any) -> None:
    from pyspark.errors import PythonException
    from pyspark.sql import functions as F  # noqa: N812

    def fail(value):  # type: ignore[no-untyped-def] # Spark reads annotations
        raise LookupError("the user's own")

    failing = df.withColumn("y", F.udf(fail, "double")("y"))
    with pytest.raises(PythonException, match="the user's own"), prepare_data(2, store, failing, ["y"], ["id"]):
        pass


def test_s3_is_s3a_to_spark_unless_it_was_told_otherwise(df: Any) -> None:
    assert _writing.spark_url(df, "s3://bucket/me") == "s3a://bucket/me"
    assert _writing.spark_url(df, "gs://bucket/me") == "gs://bucket/me"
    hadoop = df.sparkSession._jsc.hadoopConfiguration()
    hadoop.set("fs.s3.impl", "org.example.Emrfs")
    try:
        assert _writing.spark_url(df, "s3://bucket/me") == "s3://bucket/me"
    finally:
        hadoop.unset("fs.s3.impl")


# --- several at once


def test_the_same_dataframe_is_written_once(store: Store, df: Any) -> None:
    def stamp(number: int) -> list[tuple[str, int]]:
        files = store.get_parquet_dataset(store.get_train_data_path(number)).files
        return sorted((file, os.stat(file).st_ino) for file in files)

    with prepare_data(2, store, df, ["y"], ["id"]) as number:
        first = stamp(number)
    with prepare_data(2, store, df, ["y"], ["id"]) as number:
        assert stamp(number) == first
        # Other columns are another data set, and this one is in use.
        with prepare_data(2, store, df, ["y"], ["dense"]) as other:
            assert other != number
            assert stamp(number) == first
    store.delete(store.get_train_data_path(number))
    with prepare_data(2, store, df, ["y"], ["id"]) as number:
        assert sorted(read(store, store.get_train_data_path(number))["id"]) == list(range(ROWS))


def test_two_estimators_use_one_store_at_once(store: Store, spark: Any) -> None:
    """Each reads its own rows while the other one's are there as well."""
    both = threading.Barrier(2, timeout=240)

    def fit(first: int) -> tuple[int, list[int]]:
        frame = spark.range(first, first + 30).selectExpr("id", "cast(id as double) y")
        with prepare_data(2, store, frame, ["y"], ["id"], validation=0.3) as number:
            both.wait()
            paths = store.get_train_data_path(number), store.get_val_data_path(number)
            found = sorted(value for path in paths for value in read(store, path)["id"])
            both.wait()
        return number, found

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(fit, (0, 1000)))
    assert {number for number, _ in done} == {0, 1}
    assert [found for _, found in done] == [list(range(30)), list(range(1000, 1030))]


def nothing() -> None:
    """Gives back a number that no other program could have."""


def test_programs_that_share_a_store_take_different_data_sets(
    store: Store, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program has a cache of its own, and all of them begin with 0."""

    def fit(first: int, cache: TrainingDataCache) -> Any:
        frame = spark.range(first, first + 30).selectExpr("id", "cast(id as double) y")
        frames.append(frame)
        return use(frame, cache)

    @contextlib.contextmanager
    def use(frame: Any, cache: TrainingDataCache) -> Iterator[tuple[int, list[int]]]:
        monkeypatch.setattr(util, "_cache", cache)
        with prepare_data(2, store, frame, ["y"], ["id"]) as number:
            yield number, sorted(read(store, store.get_train_data_path(number))["id"])

    frames: list[Any] = []
    one, other = TrainingDataCache(), TrainingDataCache()
    with fit(0, one) as first, fit(100, other) as second:
        assert first == (0, list(range(30)))
        assert second == (1, list(range(100, 130)))
    assert not [name for name in os.listdir(store.prefix_path.removeprefix("file://")) if "in-use" in name]
    # It is not used any more, so another one may have it; its former owner notices that.
    with fit(200, other) as third:
        assert third == (0, list(range(200, 230)))
        with use(frames[0], one) as again:
            assert again == (1, list(range(30)))
    with use(frames[0], one) as again:
        assert again == (1, list(range(30)))


def test_paths_that_are_the_same_for_all_data_sets_serve_one_at_a_time(store: Store, df: Any, spark: Any) -> None:
    path = store.get_train_data_path()
    store.get_train_data_path = lambda idx=None: path  # type: ignore[method-assign]
    with (
        prepare_data(2, store, df, ["y"], ["id"]),
        pytest.raises(StoreError, match=rf"^process {os.getpid()} on .* is training on the data set at {path}"),
        prepare_data(2, store, spark.range(9).selectExpr("id", "id as y"), ["y"], ["id"]),
    ):
        raise AssertionError("both have it")


def test_claims_of_programs_that_have_ended_do_not_count(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url = store.get_train_data_path(0)

    def leave(**changes: Any) -> None:
        found = claims.claim(store.files, url)
        assert not isinstance(found, claims.Claim)
        (name,) = (name for name in store.files.names(store.prefix_path) if "in-use" in name)
        content = json.loads(store.read(f"{store.prefix_path}/{name}"))
        found()
        store.write_text(f"{url}.in-use-other", json.dumps(content | changes))

    def counts() -> bool:
        found = claims.claim(store.files, url)
        if isinstance(found, claims.Claim):
            return True
        found()
        return False

    week = 7 * 24 * 3600
    for changes, expected in (
        ({}, True),
        ({"started": 1.0}, False),  # the number of a process that has ended, and was given to another one
        ({"host": "elsewhere", "pid": 1}, True),
        ({"host": "elsewhere", "made": time.time() - week - 60}, False),
        ({"of a later version": 1}, False),
    ):
        leave(**changes)
        assert counts() == expected
        assert store.exists(f"{url}.in-use-other") == expected
        store.delete(f"{url}.in-use-other")


def test_who_asks_for_a_data_set_that_is_being_written_waits_for_it() -> None:
    cache, writing, go_on = TrainingDataCache(), threading.Event(), threading.Event()
    written = []

    def write(number: int, token: str) -> Any:
        writing.set()
        assert go_on.wait(60)
        written.append(number)
        return 1, 0, {}, 1.0

    def use() -> int:
        with cache.use("key", write, is_there=lambda *_: True, claim=lambda number: nothing) as number:
            assert cache.properties(number)[0] == 1
            return number

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(use)
        assert writing.wait(60)
        second = threads.submit(use)
        go_on.set()
        assert first.result(60) == second.result(60) == 0
    assert written == [0]


def test_a_number_that_is_free_is_used_again() -> None:
    cache = TrainingDataCache()

    def use(key: str) -> Any:
        return cache.use(
            key, lambda number, token: (len(key), 0, {}, 1.0), is_there=lambda *_: True, claim=lambda number: nothing
        )

    with use("a") as a, use("bb") as b:
        assert (a, b) == (0, 1)
    with use("ccc") as c:
        assert (c, cache.properties(0)[0]) == (0, 3)
    with pytest.raises(ConfigError, match="no data set 7 has been prepared"):
        cache.properties(7)
    cache.clear()
    with pytest.raises(ConfigError, match="no data set 0"):
        cache.properties(0)


# --- Parquet of others


def test_any_flat_parquet_will_do(store: Store) -> None:
    path = Path(store.get_train_data_path().removeprefix("file://"))
    path.mkdir(parents=True)
    columns = {
        "y": pa.array([1, 2, 3], pa.int32()),
        "x": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32())),
        "text": pa.array(["a", "b", "c"]),
        "gaps": pa.array([1.0, None, 3.0]),
        "price": pa.array([1, 2, 3]).cast(pa.decimal128(21, 2)),
    }
    pq.write_table(pa.table(columns), path / "a.parquet", row_group_size=2)
    rows, val_rows, metadata, row_bytes = get_simple_meta_from_parquet(store, ["y"], ["x"], "price")
    assert (rows, val_rows) == (3, 0)
    assert row_bytes > 0
    assert [data_type_to_str(metadata[name]["spark_data_type"]) for name in ("y", "x", "price")] == [
        "Int",
        "Array",
        "Decimal",
    ]
    assert (metadata["x"]["shape"], metadata["x"]["is_sparse_vector_only"]) == (2, False)
    for features, message in (
        (["text"], "'text' is of type string"),
        (["gaps"], "'gaps' is null in 1 row:"),
        (["nope"], "has no column 'nope'"),
    ):
        with pytest.raises(DataError, match=message):
            get_simple_meta_from_parquet(store, ["y"], features)
    with pytest.raises(DataError, match="no Parquet files with training rows at"):
        get_simple_meta_from_parquet(store, ["y"], ["x"], dataset_idx=5)


# --- small things that estimators use


def _metadata(**shapes: int | None) -> dict[str, dict[str, Any]]:
    return {name: {"shape": shape} for name, shape in shapes.items()}


def test_columns_that_fit_a_model_pass() -> None:
    metadata = _metadata(image=784, one=1, label=10, binary=None)
    shapes: list[list[int | None]]
    for shapes in ([[-1, 1, 28, 28]], [[None, 784]], [[-1, 28, None]]):
        check_shape_compatibility(metadata, ["image"], ["one"], shapes)
    check_shape_compatibility(metadata, ["one", "binary"], ["label"], [[-1], [-1, 5]], [[-1, 10]], [[-1, 10]])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"input_shapes": [[-1, 783]]}, r"feature column 'image' has 784 values .* the model's input 0 of shape"),
        ({"input_shapes": [[-1, 5, None]]}, "do not fit"),
        ({"input_shapes": [[-1, 784], [-1, 1]]}, r"1 feature columns \(image\), but 2 shapes of the model's input"),
        (
            {"output_shapes": [[-1, 10]]},
            "label column 'one' has 1 value in a row, which do not fit the model's output 0",
        ),
        ({"label_shapes": [[-1, 2]]}, "do not fit label_shapes 0"),
    ],
)
def test_columns_that_do_not_fit_a_model_are_named(shapes: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_shape_compatibility(_metadata(image=784, one=1), ["image"], ["one"], **shapes)


def test_outputs_have_their_labels_types(spark: Any) -> None:
    from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
    from pyspark.sql.types import ArrayType, DoubleType, IntegerType, LongType, StructField, StructType

    kinds: list[tuple[Any, list[int] | None, Any]] = [
        (IntegerType, None, IntegerType()),
        (LongType, [1], LongType()),
        (DoubleType, [10], VectorUDT()),
        (DenseVector, [1], VectorUDT()),
        (SparseVector, None, VectorUDT()),
        (ArrayType, [3], ArrayType(DoubleType())),
    ]
    metadata = {
        str(i): {"spark_data_type": kind} | ({} if shape is None else {"output_shape": shape})
        for i, (kind, shape, _) in enumerate(kinds)
    }
    labels = list(metadata)
    given = StructType([StructField("x", LongType()), StructField("0__output", VectorUDT())])
    schema = get_spark_df_output_schema(given, labels, get_output_cols(labels), metadata)
    assert schema.names == ["x", *(f"{i}__output" for i in range(len(kinds)))]
    assert [field.dataType for field in schema.fields[1:]] == [expected for _, _, expected in kinds]


def test_lists_and_names_are_completed() -> None:
    assert to_list(None, 3) is None
    assert to_list(1, 3) == to_list([1], 3) == [1, 1, 1]
    assert to_list([1, 2], 2) == [1, 2]
    with pytest.raises(ConfigError, match="there are 2 values, but one or 3 are needed"):
        to_list([1, 2], 3)
    assert get_output_cols(["a", "b"]) == ["a__output", "b__output"]
    assert get_output_cols(["a"], ["c"]) == ["c"]
    with pytest.raises(ConfigError, match="1 output columns"):
        get_output_cols(["a", "b"], ["c"])
    assert host_hash() == host_hash()
    assert host_hash("a") != host_hash("b")


def test_a_data_module_gives_what_the_estimators_reader_gives(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(20)}), tmp_path / "a.parquet")
    with ParquetDataModule(
        train_dir=str(tmp_path), val_dir=str(tmp_path), train_batch_size=3, cur_shard=1, shard_count=2, later="x"
    ) as module:
        train, val = module.train_data(), module.val_data()
        assert val is not None
        assert (len(train), len(val)) == (4, 1)
        assert sorted(value for batch in val for value in batch["x"]) == list(range(10, 20))
        assert module.extra == {"later": "x"}
    assert ParquetDataModule(str(tmp_path), "", has_val=False).val_data() is None
