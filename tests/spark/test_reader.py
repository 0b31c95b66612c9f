"""Readers of Parquet: every row once per epoch, the same steps on all ranks, any row groups, bounded memory."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hvdgloo.errors import ConfigError, DataError, StoreError
from hvdgloo.spark.data import ParquetBatches, _reader
from hvdgloo.spark.data._columns import Dense
from hvdgloo.spark.data._dataset import Dataset, RowGroup
from hvdgloo.spark.data._plan import batch_sizes, bounds, order_of_groups, pieces, windows
from tests.support.launching import run_command

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GROUPS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), min_size=1, max_size=4)
"""Files, and the numbers of rows of their row groups; some are empty."""


def written(folder: Path, files: Sequence[Sequence[int]], table: Callable[[np.ndarray], pa.Table] | None = None) -> str:
    """A data set with these row groups; column ``id`` counts its rows from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    first = 0
    for number, groups in enumerate(files):
        writer = None
        for rows in groups:
            ids = np.arange(first, first + rows)
            part = pa.table({"id": ids}) if table is None else table(ids)
            writer = writer or pq.ParquetWriter(folder / f"part-{number:03}.parquet", part.schema)
            # An empty table makes an empty row group.
            writer.write_table(part, row_group_size=max(rows, 1))
            first += rows
        assert writer is not None
        writer.close()
    return str(folder)


def ids(batches: ParquetBatches) -> list[np.ndarray]:
    return [batch["id"] for batch in batches]


# --- arithmetic


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(0, 1000), min_size=1, max_size=60),
    size=st.integers(1, 17),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_ranks_cut_the_line_of_rows_evenly_and_leave_none_out(
    rows: list[int], size: int, seed: int, epoch: int
) -> None:
    counts = np.array(rows)
    order = order_of_groups(len(rows), seed, epoch, shuffle=True)
    cuts = [pieces(counts, order, rank, size) for rank in range(size)]
    lengths = [sum(map(len, cut)) for cut in cuts]
    assert sum(lengths) == sum(rows)
    assert max(lengths) - min(lengths) <= 1
    seen = np.zeros(sum(rows), int)
    starts = np.cumsum([0, *rows])
    for cut in cuts:
        for piece in cut:
            assert 0 <= piece.start < piece.stop <= rows[piece.group]
            seen[starts[piece.group] + piece.start : starts[piece.group] + piece.stop] += 1
    assert (seen == 1).all()


@settings(deadline=None)
@given(total=st.integers(1, 300), size=st.integers(1, 9), batch_size=st.integers(1, 20), window=st.integers(0, 60))
@example(total=5, size=2, batch_size=2, window=2)
@example(total=5, size=2, batch_size=1, window=1)
@example(total=97, size=1, batch_size=16, window=60)
@example(total=19, size=2, batch_size=3, window=0)
def test_all_ranks_take_equally_many_steps_with_something_in_each(
    total: int, size: int, batch_size: int, window: int
) -> None:
    if total < size:
        with pytest.raises(DataError, match="each needs at least one"):
            batch_sizes(total, 0, size, batch_size)
        return
    sizes = [batch_sizes(total, rank, size, batch_size) for rank in range(size)]
    assert len({len(one) for one in sizes}) == 1
    most = -(-total // size)
    assert len(sizes[0]) == (total // size if batch_size == 1 else -(-most // batch_size))
    for rank, one in enumerate(sizes):
        low, high = bounds(total, rank, size)
        assert sum(one) == high - low
        assert min(one) >= 1
        assert max(one) <= max(batch_size, 2)
        assert batch_size < 3 or min(one) >= 2 or sum(one) < 2 * len(one)
        assert all(size == batch_size for size in one[:-3])
        divided = windows(one, window)
        assert [size for part in divided for size in part] == one
        assert all(len(part) == 1 or sum(part) <= window for part in divided)


# --- files


@SLOW
@given(
    files=GROUPS,
    size=st.integers(1, 5),
    batch_size=st.integers(1, 20),
    window=st.one_of(st.none(), st.integers(0, 60)),
    seed=st.integers(0, 99),
    keep=st.booleans(),
)
def test_every_row_is_read_once_in_every_epoch(
    tmp_path: Path,
    files: list[list[int]],
    size: int,
    batch_size: int,
    window: int | None,
    seed: int,
    keep: bool,
) -> None:
    total = sum(map(sum, files))
    path = written(tmp_path / "data", files)
    if total < size:
        with pytest.raises(DataError, match=f"{total} rows cannot be divided among {size} ranks"):
            ParquetBatches(path, size=size)
        return
    readers = [
        ParquetBatches(
            path,
            rank=rank,
            size=size,
            batch_size=batch_size,
            shuffle_buffer_size=window,
            seed=seed,
            inmemory_cache_all=keep,
        )
        for rank in range(size)
    ]
    assert len({len(reader) for reader in readers}) == 1
    assert max(reader.rows for reader in readers) - min(reader.rows for reader in readers) <= 1
    for _ in range(2):
        read = [ids(reader) for reader in readers]
        assert [len(one) for one in read] == [len(readers[0])] * size
        assert [sum(map(len, one)) for one in read] == [reader.rows for reader in readers]
        assert sorted(np.concatenate([batch for one in read for batch in one])) == list(range(total))


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    path = written(tmp_path, [[30, 50], [20]])

    def order(seed: int, epoch: int) -> list[int]:
        reader = ParquetBatches(path, batch_size=7, seed=seed)
        reader.set_epoch(epoch)
        return [int(value) for batch in ids(reader) for value in batch]

    assert order(1, 3) == order(1, 3)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6
    going_on = ParquetBatches(path, batch_size=7, seed=1)
    assert [np.concatenate(ids(going_on)).tolist() for _ in range(3)] == [order(1, epoch) for epoch in range(3)]


def test_rows_are_shuffled_within_a_window_and_row_groups_among_each_other(tmp_path: Path) -> None:
    path = written(tmp_path, [[16] * 8])
    read = ids(ParquetBatches(path, batch_size=4, shuffle_buffer_size=16, seed=5))
    groups = [{int(value) // 16 for batch in read[i : i + 4] for value in batch} for i in range(0, 32, 4)]
    # A window is one row group here: its rows are together, in another order, and the groups' order is another one.
    assert all(len(group) == 1 for group in groups)
    assert [group.pop() for group in groups] not in (list(range(8)), list(range(8))[::-1])
    assert all(np.any(np.diff(np.concatenate(read[i : i + 4])) != 1) for i in range(0, 32, 4))


@pytest.mark.parametrize("options", [{"shuffle": False}, {"shuffle_buffer_size": 0}])
def test_without_shuffling_rows_come_in_the_order_of_files(tmp_path: Path, options: Mapping[str, Any]) -> None:
    path = written(tmp_path, [[5, 30], [9]])
    readers = [ParquetBatches(path, rank=rank, size=2, batch_size=6, **options) for rank in range(2)]
    assert np.concatenate([batch for reader in readers for batch in ids(reader)]).tolist() == list(range(44))


def test_more_steps_than_there_are_go_round_into_the_next_shuffle(tmp_path: Path) -> None:
    path = written(tmp_path, [[20]])
    reader = ParquetBatches(path, batch_size=5, steps_per_epoch=6)
    assert len(reader) == 6
    first, second = ids(reader), ids(reader)
    assert len(first) == len(second) == 6
    assert sorted(np.concatenate(first[:4])) == list(range(20))
    assert np.concatenate(first[4:]).tolist() != np.concatenate(first[:2]).tolist()
    few = ParquetBatches(path, batch_size=5, steps_per_epoch=2)
    assert [len(ids(few)), len(ids(few))] == [2, 2]
    few.set_epoch(0)
    assert np.concatenate(ids(few)).tolist() != np.concatenate(ids(few)).tolist()


def test_a_batch_belongs_to_its_user(tmp_path: Path) -> None:
    reader = ParquetBatches(written(tmp_path, [[12]]), batch_size=4, shuffle=False, inmemory_cache_all=True)
    for batch in reader:
        batch["id"][:] = -1
    assert np.concatenate(ids(reader)).tolist() == list(range(12))


# --- columns

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, entries: Mapping[int, float]) -> dict[str, Any]:
    return {"type": 0, "size": size, "indices": list(entries), "values": list(entries.values())}


def table_of(columns: Mapping[str, Any]) -> Callable[[np.ndarray], pa.Table]:
    """Tables whose columns have these rows, by their number."""
    return lambda numbers: pa.table(
        {name: column.take(pa.array(numbers % len(column))) for name, column in columns.items()} | {"id": numbers}
    )


ROWS = np.array([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0], [0.0, 5.0, 0.0], [7.0, 8.0, 9.0]])
COLUMNS: dict[str, tuple[pa.Array, np.ndarray]] = {
    "dense": (pa.array([dense(*row) for row in ROWS], VECTOR), ROWS),
    "sparse": (pa.array([sparse(3, {i: v for i, v in enumerate(row) if v}) for row in ROWS], VECTOR), ROWS),
    "mixed": (
        pa.array([dense(*ROWS[0]), sparse(3, {}), sparse(3, {1: 5.0}), dense(*ROWS[3])], VECTOR),
        ROWS,
    ),
    "doubles": (pa.array(ROWS.tolist(), pa.list_(pa.float64())), ROWS),
    "floats": (pa.array(ROWS.tolist(), pa.large_list(pa.float32())), ROWS.astype(np.float32)),
    "fixed": (pa.array(ROWS.tolist(), pa.list_(pa.float64(), 3)), ROWS),
    "flags": (pa.array((ROWS > 0).tolist(), pa.list_(pa.bool_())), ROWS > 0),
    "squares": (
        pa.array(np.arange(16).reshape(4, 2, 2).tolist(), pa.list_(pa.list_(pa.int16()))),
        np.arange(16, dtype=np.int16).reshape(4, 2, 2),
    ),
    "flag": (pa.array([True, False, False, True]), np.array([True, False, False, True])),
    "byte": (pa.array([1, 2, 3, 4], pa.int8()), np.array([1, 2, 3, 4], np.int8)),
    "long": (pa.array([1, 2, 3, 1 << 60]), np.array([1, 2, 3, 1 << 60])),
    "half": (pa.array(np.array([1, 2, 3, 4], np.float16)), np.array([1, 2, 3, 4], np.float16)),
    "named": (pa.array([5, 6, 5, 7]).dictionary_encode(), np.array([5, 6, 5, 7])),
    "price": (pa.array([1, 2, 3, 4]).cast(pa.decimal128(21, 2)), np.array([1.0, 2.0, 3.0, 4.0])),
    "binary": (pa.array([b"", b"a", b"bc", b"\0"]), np.array([b"", b"a", b"bc", b"\0"], object)),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("keep", [False, True])
def test_a_column_is_an_array_with_its_rows_first(tmp_path: Path, name: str, keep: bool) -> None:
    column, expected = COLUMNS[name]
    path = written(tmp_path, [[13, 9], [30]], table_of({name: column}))
    reader = ParquetBatches(path, [name, "id"], batch_size=8, shuffle_buffer_size=20, inmemory_cache_all=keep)
    assert reader.schema[name] == (expected.dtype, expected.shape[1:])
    for batch in reader:
        values = batch[name]
        assert values.dtype == expected.dtype
        assert values.flags.c_contiguous
        assert values.flags.writeable
        np.testing.assert_array_equal(values, expected[batch["id"] % len(expected)])


def test_numbers_can_be_had_in_one_type(tmp_path: Path) -> None:
    columns = {name: column for name, (column, _) in COLUMNS.items()}
    path = written(tmp_path, [[13, 9], [30]], table_of(columns))
    (batch,) = ParquetBatches(path, batch_size=60, shuffle=False, dtype=np.float32)
    for name, (_, expected) in COLUMNS.items():
        is_number = expected.dtype != object
        assert batch[name].dtype == (np.float32 if is_number else object)
        shown = expected[np.arange(52) % len(expected)]
        np.testing.assert_array_equal(batch[name], shown.astype(np.float32) if is_number else shown)


def test_a_window_of_float32_takes_half_of_the_memory(tmp_path: Path) -> None:
    path = written(tmp_path, [[100]], table_of({"dense": pa.array([dense(*range(64))], VECTOR)}))
    sizes = []
    for dtype in (np.float64, np.float32):
        window = next(ParquetBatches(path, ["dense"], dtype=dtype)._fill(np.array([0]), [100]))
        sizes.append(sum(array.nbytes for array in vars(window["dense"]).values() if isinstance(array, np.ndarray)))
    assert sizes == [100 * 64 * 8, 100 * 64 * 4]


def test_sparse_vectors_stay_sparse_until_they_are_in_a_batch(tmp_path: Path) -> None:
    """A row of 100,000 numbers, three of them not zero: a window of 512 rows as numbers would be 400 MB."""
    width, rows = 100_000, 512
    vectors = pa.array([sparse(width, {i: 1.0, i + 5: 2.0, width - 1: i}) for i in range(rows)], VECTOR)
    path = written(tmp_path, [[rows]], table_of({"wide": vectors}))
    reader = ParquetBatches(path, batch_size=2, shuffle_buffer_size=rows)
    window = next(reader._fill(np.array([0]), [rows]))
    assert sum(array.nbytes for array in vars(window["wide"]).values() if isinstance(array, np.ndarray)) < 100_000
    batch = next(iter(reader))
    for row, number in zip(batch["wide"], batch["id"], strict=True):
        assert np.flatnonzero(row).tolist() == [number, number + 5, *([width - 1] if number else [])]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None, 3, None]), "column 'bad' is null in 2 rows"),
        (pa.array([dense(1.0), None, dense(2.0), None], VECTOR), "column 'bad' is null in 2 rows"),
        (pa.array([[1.0, None], [1.0, 2.0], [None, None], [1.0, 2.0]]), "column 'bad' is null in 2 rows"),
        (pa.array([[1.0], None, [2.0], [3.0]]), "column 'bad' is null in 1 row:"),
        (pa.array([[1.0], [1.0, 2.0], [2.0], [3.0]]), "'bad' has rows of 1 and of 2 elements"),
        (pa.array([dense(1.0, 2.0), dense(1.0)], VECTOR), "'bad' has rows of 1 and of 2 elements"),
        (pa.array([dense(1.0, 2.0), sparse(3, {})], VECTOR), "'bad' has rows of 2 and of 3 elements"),
        (pa.array([sparse(2, {0: 1.0}), sparse(3, {0: 1.0})], VECTOR), "'bad' has rows of 2 and of 3 elements"),
        (pa.array(["a", "b"]), "column 'bad' is of type string.*StringIndexer"),
        (pa.array([["a"], ["b"]]), "StringIndexer"),
        (pa.array([0, 1], pa.timestamp("us")), "column 'bad' is of type timestamp"),
        (pa.array([{"x": 1}, {"x": 2}]), "column 'bad' is of type struct"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_cannot_be_batched_are_named(tmp_path: Path, column: pa.Array, message: str) -> None:
    path = written(tmp_path, [[len(column)]], table_of({"bad": column}))
    with pytest.raises(DataError, match=message):
        list(ParquetBatches(path))


def test_rows_of_another_length_further_on_are_found_as_they_are_read(tmp_path: Path) -> None:
    def table(numbers: np.ndarray) -> pa.Table:
        return pa.table({"a": pa.array([[1.0] * (2 if number < 90 else 3) for number in numbers])})

    reader = ParquetBatches(written(tmp_path, [[90], [10]], table), shuffle=False)
    with pytest.raises(DataError, match="'a' has rows of 2 and of 3 elements"):
        list(reader)


def test_files_of_other_programs_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, [[10]])
    for name in ("_SUCCESS", "._SUCCESS.crc", "_hvdgloo_metadata.json", ".part.crc"):
        (tmp_path / name).write_bytes(b"none of Parquet's")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "half.parquet").write_bytes(b"half")
    assert sum(map(len, ids(ParquetBatches(path)))) == 10
    assert sum(map(len, ids(ParquetBatches(f"{path}/part-000.parquet")))) == 10


def test_files_may_differ_in_whether_values_can_be_null(tmp_path: Path) -> None:
    for number, nullable in enumerate((True, False)):
        elements = pa.list_(pa.field("element", pa.float64(), nullable))
        schema = pa.schema([pa.field("x", pa.int64(), nullable), pa.field("a", elements, nullable)])
        pq.write_table(pa.table({"x": [number], "a": [[1.0, 2.0]]}, schema=schema), tmp_path / f"{number}.parquet")
    (batch,) = ParquetBatches(str(tmp_path), shuffle=False)
    assert batch["x"].tolist() == [0, 1]
    assert batch["a"].shape == (2, 2)


def test_what_is_no_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"no data set at {tmp_path}/none"):
        ParquetBatches(f"{tmp_path}/none")
    with pytest.raises(DataError, match="contains no Parquet file"):
        ParquetBatches(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"no Parquet at all")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        ParquetBatches(str(tmp_path))
    path = written(tmp_path, [[3]])
    with pytest.raises(DataError, match="has no column 'x', 'y'; it has id"):
        ParquetBatches(path, ["x", "id", "y"])
    pq.write_table(pa.table({"id": pa.array([1.0])}), tmp_path / "z.parquet")
    with pytest.raises(DataError, match=r"'id' is int64 in .*part-000\.parquet, double in .*z\.parquet"):
        ParquetBatches(path)
    path = written(tmp_path, [[3], [500, 500]])
    damaged = tmp_path / "part-001.parquet"
    content = bytearray(damaged.read_bytes())
    begin = pq.read_metadata(damaged).row_group(1).column(0).dictionary_page_offset
    content[begin : begin + 64] = b"\xff" * 64
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"row group 1 of .*part-001\.parquet cannot be read: "):
        list(ParquetBatches(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "size": 2}, "rank=2"),
        ({"seed": -1}, "seed=-1"),
        ({"shuffle_buffer_size": -5}, "shuffle_buffer_size=-5"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"num_workers": -1}, "num_workers=-1"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParquetBatches(str(tmp_path), **arguments)


# --- transformations


def test_a_transformation_changes_adds_and_removes_columns(tmp_path: Path) -> None:
    def change(frame: Any) -> Any:
        frame["image"] = frame["pixels"].map(lambda row: row.reshape(2, 2) / 2)
        frame["one_hot"] = [np.eye(3)[number % 3] for number in frame["id"]]
        frame["length"] = frame["name"].str.len()
        return frame

    def table(numbers: np.ndarray) -> pa.Table:
        pixels = pa.array(np.repeat(numbers, 4).reshape(-1, 4).tolist(), pa.list_(pa.int32()))
        return pa.table({"id": numbers, "pixels": pixels, "name": ["x" * number for number in numbers]})

    path = written(tmp_path, [[20, 11]], table)
    for function in (change, lambda: change):
        reader = ParquetBatches(
            path,
            batch_size=8,
            transformation_fn=function,
            edit_fields=[("image", np.float32, (2, 2), False), ("one_hot", np.uint8, (3,), False)],
            removed_fields=["pixels", "name"],
        )
        assert reader.schema == {
            "id": (np.dtype(np.int64), ()),
            "image": (np.dtype(np.float32), (2, 2)),
            "one_hot": (np.dtype(np.uint8), (3,)),
            "length": (np.dtype(np.int64), ()),
        }
        seen = list(reader)
        for batch in seen:
            assert {name: (values.dtype, values.shape[1:]) for name, values in batch.items()} == reader.schema
            np.testing.assert_array_equal(batch["image"][:, 1, 1], batch["id"] / 2)
            np.testing.assert_array_equal(batch["one_hot"].argmax(1), batch["id"] % 3)
            np.testing.assert_array_equal(batch["length"], batch["id"])
        assert sorted(np.concatenate([batch["id"] for batch in seen])) == list(range(31))


def test_a_transformation_is_given_vectors_as_arrays_it_may_write(tmp_path: Path) -> None:
    def double(frame: Any) -> Any:
        for row in frame["mixed"]:
            row *= 2
        return frame

    column, expected = COLUMNS["mixed"]
    path = written(tmp_path, [[8]], table_of({"mixed": column}))
    for batch in ParquetBatches(path, transformation_fn=double):
        np.testing.assert_array_equal(batch["mixed"], 2 * expected[batch["id"] % 4])


@pytest.mark.parametrize(
    ("function", "fields", "message"),
    [
        (lambda frame: frame[frame["id"] % 2 == 0], [], "was given 10 rows and returned 5 rows"),
        (lambda frame: None, [], "returned a NoneType"),
        (lambda frame: frame, [("x", np.float32, (), False)], "returns no column 'x'"),
        (
            lambda frame: frame,
            [("id", np.float32, (2,), False)],
            r"'id' has rows of shape \(\) and type int64, but transformation_edit_fields declares \(2,\)",
        ),
        (
            lambda frame: frame.assign(x=[np.zeros(1 + i % 2) for i in frame["id"]]),
            [],
            "'x' has rows of 1 and of 2 elements",
        ),
    ],
)
def test_a_transformation_that_returns_something_else_is_told(
    tmp_path: Path, function: Callable[..., Any], fields: Any, message: str
) -> None:
    path = written(tmp_path, [[10]])
    with pytest.raises(DataError, match=message):
        ParquetBatches(path, transformation_fn=function, edit_fields=fields)


def test_a_transformation_s_numbers_are_not_cut_to_the_type_of_its_first_rows(tmp_path: Path) -> None:
    def halved(frame: Any) -> Any:
        numbers = frame["id"]
        return frame.assign(x=numbers / 2 if numbers.max() >= 100 else numbers)

    path = written(tmp_path, [[100], [10]])
    with pytest.raises(DataError, match=r"'x' of type int64 for some rows and float64 for others.*edit_fields"):
        list(ParquetBatches(path, transformation_fn=halved, shuffle=False))
    reader = ParquetBatches(
        path, transformation_fn=halved, shuffle=False, edit_fields=[("x", np.float32, (), False)], batch_size=110
    )
    assert next(iter(reader))["x"][-1] == 109 / 2


# --- threads and memory


def _reading() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hvdgloo-reader")]


def test_an_abandoned_iteration_ends_its_thread(tmp_path: Path) -> None:
    reader = ParquetBatches(written(tmp_path, [[10] * 10]), batch_size=5, shuffle_buffer_size=10)
    iterator = iter(reader)
    next(iterator)
    assert _reading()
    del iterator
    gc.collect()
    assert not _reading()
    assert len(ids(reader)) == len(reader)
    assert not _reading()


def test_an_error_in_the_thread_is_raised_in_the_loop(tmp_path: Path) -> None:
    calls = []

    def fail(frame: Any) -> Any:
        calls.append(threading.current_thread().name)
        if len(calls) > 2:
            raise ZeroDivisionError("the user's own")
        return frame

    reader = ParquetBatches(
        written(tmp_path, [[100] * 5]), batch_size=5, shuffle_buffer_size=100, transformation_fn=fail
    )
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        list(reader)
    assert calls[-1].startswith("hvdgloo-reader")
    assert not _reading()


def test_there_are_never_three_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Dense] = weakref.WeakSet()
    most = []

    class Counted(Dense):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr(_reader, "Dense", Counted)
    reader = ParquetBatches(written(tmp_path, [[10] * 8]), batch_size=5, shuffle_buffer_size=10)
    assert len(ids(reader)) == 16
    assert len(most) == 8
    assert max(most) == 2


def test_a_row_group_of_a_small_data_set_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = Dataset.read

    def counted(self: Dataset, group: RowGroup, *arguments: Any, **options: Any) -> Any:
        read.append(group.index)
        return plain(self, group, *arguments, **options)

    path = written(tmp_path, [[10, 7, 0, 20, 5, 8]])
    reader = ParquetBatches(path, batch_size=5, rank=1, size=2, shuffle_buffer_size=50)
    monkeypatch.setattr(Dataset, "read", counted)
    ids(reader)
    assert 1 < len(read) < 5, "no more than this epoch needs"
    for _ in range(20):
        ids(reader)
    assert sorted(read) == [0, 1, 3, 4, 5]
    assert not _reading()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("steps", [None, 2, 11])
def test_batches_are_the_same_whether_a_data_set_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, shuffle: bool
) -> None:
    columns = table_of({name: COLUMNS[name][0] for name in ("dense", "sparse", "flag", "binary")})
    path = written(tmp_path, [[10, 7], [0, 20, 5], [9]], columns)
    options: Any = {"batch_size": 4, "rank": 1, "size": 3, "steps_per_epoch": steps, "shuffle": shuffle}
    held, plain = ParquetBatches(path, **options), ParquetBatches(path, **options)
    monkeypatch.setattr(plain, "_fits", False)
    for epoch in (0, 1, 2, 1, 7):
        held.set_epoch(epoch)
        plain.set_epoch(epoch)
        for one, other in zip(held, plain, strict=True):
            for name, values in other.items():
                np.testing.assert_array_equal(one[name], values)
                assert one[name].dtype == values.dtype
    assert held._held is not None
    held.close()
    assert held._held is None
    assert plain._held is None


def test_a_larger_data_set_and_one_that_is_transformed_are_read_in_each_epoch(tmp_path: Path) -> None:
    path = written(tmp_path, [[10] * 4])
    for reader in (
        ParquetBatches(path, batch_size=5, shuffle_buffer_size=39),
        ParquetBatches(path, batch_size=5, transformation_fn=lambda frame: frame),
    ):
        for _ in range(2):
            assert len(ids(reader)) == 8
        assert reader._held is None


def test_a_row_group_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reader, "_CHUNK", 1)
    reader = ParquetBatches(written(tmp_path, [[200, 200]]), batch_size=50, shuffle=False)
    plain = Dataset.read

    def torn(*arguments: Any, **options: Any) -> Any:
        batches = plain(*arguments, **options)
        yield next(batches)
        raise StoreError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(Dataset, "read", torn)
        with pytest.raises(StoreError, match="the disk is gone"):
            ids(reader)
    np.testing.assert_array_equal(np.concatenate(ids(reader)), np.arange(400))


MEMORY = """
import sys
from hvdgloo.spark.data import ParquetBatches

path, window, columns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
row = columns * 8
reader = ParquetBatches(path, batch_size=256, shuffle_buffer_size=window // row)

# getrusage() would count what the parent had when it started this process.
def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))

start = memory("VmRSS")
rows = sum(len(batch["a"]) for batch in reader)
print(rows, memory("VmHWM") - start)
"""


def test_memory_is_bounded_by_the_window(tmp_path: Path) -> None:
    """Ten windows of data: 2.5 windows and 64 MB at most, whatever row groups there are."""
    width, window = 128, 48 << 20
    rows = 10 * window // (8 * width)
    values = np.random.default_rng(0).random(rows // 20 * width)
    lists = pa.ListArray.from_arrays(np.arange(0, len(values) + 1, width, dtype=np.int32), values)
    # Two row groups are larger than a window.
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema({"a": lists.type}), use_dictionary=False) as writer:
        for _ in range(20):
            writer.write_table(pa.table({"a": lists}), row_group_size=rows // 60)
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(window), str(width)]
    done = run_command(command, timeout=300)
    assert done.returncode == 0, done.stderr
    read, grown = map(int, done.stdout.split())
    assert read == rows // 20 * 20
    assert grown <= 2.5 * window + (64 << 20)
