"""Batches of a Parquet data set for one rank, shuffled, in bounded memory."""

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
"""Bytes of a window at most, where its rows are not given."""

_SEQUENTIAL = 16 << 20
"""Bytes of a window that is not shuffled, and so need not be large."""

_CHUNK = 4 << 20
"""Bytes that are decoded at a time."""

_SAMPLE = 64
"""Rows from which shapes and sizes are learnt."""


class ParquetBatches:
    """The batches of one rank: an iterable over ``{column: array}``, one epoch each time it is iterated over.

    All ranks together read every row once in an epoch. Their numbers of rows differ by one at most, and all take the
    same number of steps. Any Parquet files of flat columns will do, however many row groups they have: those that Spark
    writes, with vectors too, and others'.

    An array in a batch has the batch's rows as its first dimension, and belongs to the caller. Scalars have no
    further dimension, arrays and vectors (dense, sparse and mixed; float64) have one, binary values are ``bytes`` in an
    array of objects. dtypes are the file's, unless ``dtype`` is given; decimal numbers are float64.

    With ``shuffle``, the order is a function of ``seed`` and epoch: row groups are read in a random order, the same for
    all ranks, and rows are drawn at random from a window of those that come next. A thread fills the next window while
    batches are drawn from this one: memory is two windows and what is being decoded, however large the data set is.

    Row groups of a data set that is no larger than one window stay in memory once they have been read, for the epochs
    that follow; not if there is a ``transformation_fn``, which may be random.

    Args:
        path: a folder or file: a local path, or a URL (``filesystem`` given: a path within it).
        columns: those to read; None for all.
        batch_size: rows of a batch; the last of an epoch may be shorter. (Where ``batch_size`` is 1 and a rank has one
            row fewer than others, the others' last batch has two.)
        rank, size: of this reader among those that share the data set.
        shuffle: False reads rows in the order of the files.
        seed: of the order; 0 or larger.
        shuffle_buffer_size: rows of the window; 0 is no shuffling; None is what fits into an eighth of the memory that
            this process may use, and 256 MB at most.
        inmemory_cache_all: keep this rank's rows in memory and only draw them in another order in each epoch. They are
            then the same rows in all epochs.
        steps_per_epoch: batches in an epoch, if not as many as there are: a larger number goes round into the next
            shuffle, after a smaller one the next epoch goes on with another shuffle.
        transformation_fn: is given a pandas DataFrame of some rows and returns one of the same rows; without parameters
            it returns such a function.
        edit_fields: what transformation_fn adds or changes: tuples of a name, a numpy dtype, a row's shape, and
            whether it may be null.
        removed_fields: names that transformation_fn needs and batches do not.
        num_workers: with more than one, columns are decoded by several threads.
        dtype: of all numbers in batches. Windows hold them so, and half of float64's memory is enough for float32.
        filesystem: of ``pyarrow.fs``.
        storage_options: for fsspec, with a URL.

    Attributes:
        rows: of this rank in one pass over the data.
        total_rows: of all ranks.
        schema: ``{column: (dtype, shape of a row)}`` of batches.

    Raises:
        DataError: no Parquet file, unknown column, a column that is no number, fewer rows than ranks; while it is read:
            a null, or rows of different lengths.
        StoreError: there is nothing at ``path``.
        ConfigError: an argument that cannot be used.
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
        """Batches in an epoch: the same number on every rank."""
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is; without a call the epochs follow one another from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        passes = -(-self._steps // len(self._sizes))
        batches = itertools.chain.from_iterable(
            self._pass(number) for number in range(epoch * passes, (epoch + 1) * passes)
        )
        return itertools.islice(batches, self._steps)

    def close(self) -> None:
        """Frees the rows that are kept. Iterations end their threads themselves."""
        self._all = self._held = None

    def __enter__(self) -> ParquetBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sample(self) -> tuple[dict[str, Array | CSR], int]:
        """Some rows as batches have them, and how many bytes a row has at most."""
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
        """The batches of one pass over the data."""
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
            # One window is filled while the last one is used. It was freed before that began: never are there three.
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
        """All row groups that have been read, those of this cut among them, and where in them the cut's rows are."""
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
            self._held = None  # it may have a part of a row group
            raise
        begins = held.begins
        return held.window, np.concatenate(
            [np.arange(begins[piece.group] + piece.start, begins[piece.group] + piece.stop) for piece in cut]
        )

    def _draw(
        self, window: Window, sizes: Sequence[int], number: int, index: int, places: Indices | None = None
    ) -> Iterator[Batch]:
        """Cuts a window into batches.

        Args:
            places: where in the window their rows are, if there are others in it.
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
        """Windows of these numbers of rows, from this rank's cut of the row groups in this order."""
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
        """An empty window."""
        return {
            name: Sparse(name, rows, dtype, *shape) if name in self._sparse else Dense(name, rows, dtype, shape)
            for name, (dtype, shape) in self.schema.items()
        }

    def _chunks(self, cut: Sequence[Piece]) -> Iterator[dict[str, Array | CSR]]:
        """The rows of these pieces as arrays, after the transformation, some thousands at a time."""
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
        begins: where in it each row group begins.
        rows: how many there are.
    """

    window: Window
    begins: dict[int, int] = dataclasses.field(default_factory=dict)
    rows: int = 0


def _cast(values: Array | CSR, dtype: np.dtype[Any]) -> Array | CSR:
    """Numbers in this type; binary values and strings as they are."""
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
            raise ConfigError(f"{name} is {value}; it has to be at least 1")
    for name, value in (("seed", seed), ("shuffle_buffer_size", shuffle_buffer_size), ("num_workers", num_workers)):
        if value is not None and value < 0:
            raise ConfigError(f"{name} is {value}; it cannot be negative")
    if not 0 <= rank < size:
        raise ConfigError(f"rank is {rank}; with size {size} it has to be between 0 and {size - 1}")
