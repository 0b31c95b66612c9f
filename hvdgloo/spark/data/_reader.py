"""Reader of a Parquet data set for one rank: shuffled batches in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdgloo._platform.machine import memory_limit
from hvdgloo.errors import ConfigError, DataError
from hvdgloo.spark.data._columns import CSR, Array, Column, Dense, Indices, Sparse, check_type, convert
from hvdgloo.spark.data._dataset import Dataset
from hvdgloo.spark.data._filesystems import Options
from hvdgloo.spark.data._plan import Piece, batch_sizes, bounds, order_of_groups, pieces, windows
from hvdgloo.spark.data._transform import EditField, Transformation

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

Batch = dict[str, Array]
Window = dict[str, Column]

_WINDOW = 256 << 20
"""Largest size in bytes of a window whose number of rows is not given."""

_SEQUENTIAL = 16 << 20
"""Size in bytes of a window that is not shuffled, and so does not have to be large."""

_CHUNK = 4 << 20
"""Number of bytes that are decoded at a time."""

_SAMPLE = 64
"""Number of rows from which shapes and sizes are determined."""


class ParquetBatches:
    """The batches of one rank: an iterable over ``{column: array}``, one epoch each time it is iterated over.

    All ranks together read every row once per epoch. Their numbers of rows differ by at most one, and all take the same
    number of steps. Any Parquet files of flat columns will do, with any number of row groups: files written by Spark,
    including vectors, or by other programs.

    An array in a batch has the batch's rows as its first dimension, and belongs to the caller. Scalars have no further
    dimension, arrays and vectors (dense, sparse and mixed; float64) have one, binary values are ``bytes`` in an array
    of objects. dtypes are the file's, unless ``dtype`` is given; decimal numbers are float64.

    With ``shuffle``, the order depends on ``seed`` and epoch: row groups are read in a random order, the same for all
    ranks, and rows are drawn at random from a window of the next ones. A thread fills the next window while batches are
    drawn from the current one. So memory use is two windows plus the data being decoded, however large the data set.

    Row groups of a data set that is no larger than one window stay in memory for later epochs once they have been read,
    unless there is a ``transformation_fn``, which may be random.

    Args:
        path: a directory or file, as a local path or a URL; with ``filesystem``, a path within it.
        columns: the columns to read; None for all.
        batch_size: rows of a batch; the last of an epoch may be shorter. (If ``batch_size`` is 1 and a rank has one
            row fewer than others, the others' last batch has two.)
        rank, size: rank and number of the readers that share the data set.
        shuffle: False to read rows in the order of the files.
        seed: seed of the order; 0 or larger.
        shuffle_buffer_size: rows of the window; 0 for no shuffling; None for as many as fit into an eighth of the
            memory that this process may use, but at most 256 MB.
        inmemory_cache_all: keep this rank's rows in memory and only change their order in each epoch. All epochs then
            have the same rows.
        steps_per_epoch: batches in an epoch, if not as many as there are. A larger number continues into the next
            shuffle; after a smaller one the next epoch starts with another shuffle.
        transformation_fn: takes a pandas DataFrame of some rows and returns one of the same rows; or a function
            without parameters that returns such a function.
        edit_fields: columns that transformation_fn adds or changes: tuples of a name, a numpy dtype, a row's shape, and
            whether it may be null.
        removed_fields: names of columns that transformation_fn needs but batches do not.
        num_workers: with more than one, columns are decoded by several threads.
        dtype: dtype of all numbers in batches, and in windows: float32 needs half of float64's memory.
        filesystem: a file system of ``pyarrow.fs``.
        storage_options: options for fsspec, with a URL.

    Attributes:
        rows: this rank's number of rows in one pass over the data.
        total_rows: all ranks' number of rows.
        schema: ``{column: (dtype, shape of a row)}`` of batches.

    Raises:
        DataError: there is no Parquet file, a column is unknown or not numeric, or there are fewer rows than ranks;
            during iteration: a null, or rows of different lengths.
        StoreError: there is nothing at ``path``.
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[str] | None = None,
        *,
        batch_size: int = 32,
        rank: int = 0,
        size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        shuffle_buffer_size: int | None = None,
        inmemory_cache_all: bool = False,
        steps_per_epoch: int | None = None,
        transformation_fn: Callable[..., Any] | None = None,
        edit_fields: Sequence[EditField] | None = None,
        removed_fields: Sequence[str] | None = None,
        num_workers: int = 2,
        dtype: Any = None,
        filesystem: FileSystem | None = None,
        storage_options: Options | None = None,
    ) -> None:
        _check(batch_size, rank, size, seed, shuffle_buffer_size, steps_per_epoch, num_workers)
        self._dataset = Dataset.open(path, filesystem, storage_options)
        self._columns = list(dict.fromkeys(self._dataset.schema.names if columns is None else columns))
        self._dataset.check_columns(self._columns)
        for name in self._columns:
            kind = self._dataset.schema.field(name).type
            check_type(name, kind, text=transformation_fn is not None)
        self._shuffle = shuffle and shuffle_buffer_size != 0
        self._seed = seed
        self._rank, self._size = rank, size
        self._keep = inmemory_cache_all
        self._threads = num_workers > 1
        self._transformation = Transformation(transformation_fn, edit_fields or (), removed_fields or ())
        self._dtype = None if dtype is None else np.dtype(dtype)
        self._epoch = 0
        self._all: Window | None = None
        self._held: _Held | None = None

        self.total_rows = self._dataset.total_rows
        self._sizes = batch_sizes(self.total_rows, rank, size, batch_size)
        low, high = bounds(self.total_rows, rank, size)
        self.rows = high - low
        self._steps = steps_per_epoch or len(self._sizes)

        sample, row_bytes = self._sample()
        self._sparse = {name for name, values in sample.items() if isinstance(values, CSR)}
        self.schema: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            name: (values.values.dtype, (values.width,))
            if isinstance(values, CSR)
            else (values.dtype, values.shape[1:])
            for name, values in sample.items()
        }
        self._chunk = max(_SAMPLE, min(_CHUNK // row_bytes, 1 << 16))
        self._window = self._rows_of_a_window(shuffle_buffer_size, row_bytes)
        self._fits = self.total_rows <= self._window and transformation_fn is None

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which is the same on every rank."""
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next iteration yields; without a call, epochs count from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        passes = -(-self._steps // len(self._sizes))
        batches = itertools.chain.from_iterable(
            self._pass(number) for number in range(epoch * passes, (epoch + 1) * passes)
        )
        return itertools.islice(batches, self._steps)

    def close(self) -> None:
        """Free the rows that are kept. Iterations end their threads themselves."""
        self._all = self._held = None

    def __enter__(self) -> ParquetBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sample(self) -> tuple[dict[str, Array | CSR], int]:
        """Return some rows in the form of batches, and the average size of a row in bytes, rounded up."""
        sample = self._transformation(self._dataset.sample(self._columns, _SAMPLE))
        if not sample:
            raise DataError(f"no column of {self._dataset.url} is left to read")
        if self._dtype is not None:
            sample = {name: _cast(values, self._dtype) for name, values in sample.items()}
        rows = len(next(iter(sample.values())))
        row_bytes = -(-sum(_nbytes(values) for values in sample.values()) // rows)
        return sample, max(row_bytes, 1)

    def _rows_of_a_window(self, given: int | None, row_bytes: int) -> int:
        if given and self._shuffle:
            return given
        if not self._shuffle:
            return _SEQUENTIAL // row_bytes
        limit = memory_limit()
        return min(_WINDOW, limit // 8 if limit else _WINDOW) // row_bytes

    def _pass(self, number: int) -> Iterator[Batch]:
        """Yield the batches of one pass over the data."""
        if self._keep:
            yield from self._draw(self._kept(), self._sizes, number, 0)
            return
        order = order_of_groups(len(self._dataset.groups), self._seed, number, shuffle=self._shuffle)
        if self._fits:
            window, places = self._looked_up(pieces(self._dataset.rows, order, self._rank, self._size))
            yield from self._draw(window, self._sizes, number, 0, places)
            return
        divided = windows(self._sizes, self._window)
        with (
            contextlib.closing(self._fill(order, [sum(sizes) for sizes in divided])) as filled,
            ThreadPoolExecutor(1, "hvdgloo-reader") as thread,
        ):
            # The next window is filled while this one is used. The one before was freed first: there are never three.
            coming = thread.submit(next, filled)
            for index, sizes in enumerate(divided):
                window = coming.result()
                if index + 1 < len(divided):
                    coming = thread.submit(next, filled)
                yield from self._draw(window, sizes, number, index)
                del window

    def _kept(self) -> Window:
        if self._all is None:
            order = order_of_groups(len(self._dataset.groups), self._seed, 0, shuffle=self._shuffle)
            self._all = next(self._fill(order, [self.rows]))
        return self._all

    def _looked_up(self, cut: Sequence[Piece]) -> tuple[Window, Indices]:
        """Return the window of all row groups read so far, including this part's, and the part's rows in it."""
        held = self._held = self._held or _Held(self._room(self.total_rows))
        try:
            for piece in cut:
                if piece.group not in held.begins:
                    whole = Piece(piece.group, 0, int(self._dataset.rows[piece.group]))
                    for chunk in self._chunks([whole]):
                        for name, column in held.window.items():
                            column.put(chunk[name])
                    held.begins[piece.group] = held.rows
                    held.rows += len(whole)
        except BaseException:
            self._held = None  # it may contain an incomplete row group
            raise
        begins = held.begins
        return held.window, np.concatenate(
            [np.arange(begins[piece.group] + piece.start, begins[piece.group] + piece.stop) for piece in cut]
        )

    def _draw(
        self, window: Window, sizes: Sequence[int], number: int, index: int, places: Indices | None = None
    ) -> Iterator[Batch]:
        """Divide a window into batches.

        Args:
            places: indices of the batches' rows in the window, if it contains others, too.
        """
        rows = sum(sizes)
        if self._shuffle:
            order = np.random.default_rng([self._seed, number, self._rank, index]).permutation(rows)
            places = order if places is None else places[order]
        begin = 0
        for size in sizes:
            chosen = slice(begin, begin + size) if places is None else places[begin : begin + size]
            yield {name: column.take(chosen) for name, column in window.items()}
            begin += size

    def _fill(self, order: Any, sizes: Sequence[int]) -> Generator[Window, None, None]:
        """Yield windows of these numbers of rows, from this rank's part of the row groups in this order."""
        chunks = self._chunks(pieces(self._dataset.rows, order, self._rank, self._size))
        rest: dict[str, Array | CSR] = {}
        held = 0
        for rows in sizes:
            window = self._room(rows)
            filled = 0
            while filled < rows:
                if not held:
                    rest = next(chunks)
                    held = len(next(iter(rest.values())))
                taken = min(held, rows - filled)
                for name, column in window.items():
                    column.put(rest[name][:taken])
                    rest[name] = rest[name][taken:]
                held -= taken
                filled += taken
            yield window

    def _room(self, rows: int) -> Window:
        """Allocate an empty window."""
        return {
            name: Sparse(name, rows, dtype, *shape) if name in self._sparse else Dense(name, rows, dtype, shape)
            for name, (dtype, shape) in self.schema.items()
        }

    def _chunks(self, cut: Sequence[Piece]) -> Iterator[dict[str, Array | CSR]]:
        """Yield the rows of these pieces as transformed arrays, some thousands at a time."""
        for piece in cut:
            group = self._dataset.groups[piece.group]
            position = 0
            with contextlib.closing(
                self._dataset.read(group, self._columns, self._chunk, use_threads=self._threads)
            ) as batches:
                for batch in batches:
                    first, last = max(piece.start - position, 0), min(piece.stop - position, batch.num_rows)
                    position += batch.num_rows
                    if first < last:
                        part = batch.slice(first, last - first)
                        chunk = self._transformation({name: convert(name, part.column(name)) for name in self._columns})
                        absent = [name for name in self.schema if name not in chunk]
                        if absent:
                            raise DataError(f"transformation_fn returned column {absent[0]!r} for some rows only")
                        yield chunk
                    if position >= piece.stop:
                        break


@dataclasses.dataclass
class _Held:
    """Row groups in memory.

    Attributes:
        window: their rows, in the order in which they were read.
        begins: index of each row group's first row in the window.
        rows: number of rows in the window.
    """

    window: Window
    begins: dict[int, int] = dataclasses.field(default_factory=dict)
    rows: int = 0


def _cast(values: Array | CSR, dtype: np.dtype[Any]) -> Array | CSR:
    """Convert numbers to this type; binary values and strings stay as they are."""
    if isinstance(values, CSR):
        return dataclasses.replace(values, values=values.values.astype(dtype))
    return values if values.dtype == object else values.astype(dtype)


def _nbytes(values: Array | CSR) -> int:
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values.nbytes + sum(len(value) for value in values)
    return values.nbytes


def _check(
    batch_size: int,
    rank: int,
    size: int,
    seed: int,
    shuffle_buffer_size: int | None,
    steps_per_epoch: int | None,
    num_workers: int,
) -> None:
    for name, value in (("batch_size", batch_size), ("size", size), ("steps_per_epoch", steps_per_epoch)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: it must be at least 1")
    for name, value in (("seed", seed), ("shuffle_buffer_size", shuffle_buffer_size), ("num_workers", num_workers)):
        if value is not None and value < 0:
            raise ConfigError(f"{name}={value}: it cannot be negative")
    if not 0 <= rank < size:
        raise ConfigError(f"rank={rank}: with size {size} it must be between 0 and {size - 1}")
