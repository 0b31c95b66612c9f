"""A Parquet data set as described by its footers, without reading rows: its files, their row groups, its columns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdgloo.errors import DataError, StoreError
from hvdgloo.spark.data._columns import CSR, Array, convert, is_list
from hvdgloo.spark.data._filesystems import Options, open_filesystem

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem
    from pyarrow.parquet import FileMetaData

_FOOTERS_AT_ONCE = 16
"""Number of footers requested at once: they are small, and an object store answers slowly."""

_LARGE = 32 << 20
"""Compressed size in bytes from which a row group is read through buffers instead of in one piece."""

_BUFFER = 1 << 20


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A row group.

    Attributes:
        path: its file's path within the file system.
        index: its number in the file.
        rows: number of rows.
        nbytes: size of all columns in the file.
    """

    path: str
    index: int
    rows: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The Parquet files of one directory (or one file), sorted by name.

    Attributes:
        url: the given URL, for messages.
        schema: Arrow's schema of the first file.
    """

    url: str
    filesystem: FileSystem
    footers: dict[str, FileMetaData]
    schema: pa.Schema

    @classmethod
    def open(cls, url: str, filesystem: FileSystem | None = None, options: Options | None = None) -> Dataset:
        """Read the footers.

        Args:
            url: a path or URL; within ``filesystem`` if one is given.

        Raises:
            StoreError: there is nothing at ``url``, or it cannot be read.
            DataError: it contains no Parquet file, or files differ in their columns' types.
        """
        from pyarrow.parquet import ParquetFile

        path = url
        if filesystem is None:
            filesystem, path = open_filesystem(url, options)
        paths = list_files(filesystem, path, url)
        if not paths:
            raise DataError(f"{url} contains no Parquet file")

        def footer(path: str) -> FileMetaData:
            try:
                with filesystem.open_input_file(path) as file:
                    return ParquetFile(file).metadata
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be read as Parquet: {error}") from error

        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            footers = dict(zip(paths, pool.map(footer, paths), strict=True))
        schemas = {path: footer.schema.to_arrow_schema() for path, footer in footers.items()}
        first, schema = next(iter(schemas.items()))
        for path, other in schemas.items():
            if _kinds(other) != _kinds(schema):
                raise DataError(f"files of {url} differ in their columns: {_difference(first, schema, path, other)}")
        return cls(url, filesystem, footers, schema)

    @functools.cached_property
    def groups(self) -> list[RowGroup]:
        return [
            RowGroup(path, index, group.num_rows, sum(group.column(i).total_compressed_size for i in range(width)))
            for path, footer in self.footers.items()
            for width in [footer.num_columns]
            for index, group in ((i, footer.row_group(i)) for i in range(footer.num_row_groups))
        ]

    @functools.cached_property
    def rows(self) -> NDArray[np.int64]:
        """Number of rows in each row group."""
        return np.array([group.rows for group in self.groups], np.int64)

    @property
    def total_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def row_bytes(self) -> float:
        """Average size of a row in bytes, before compression."""
        total: int = sum(
            footer.row_group(index).total_byte_size
            for footer in self.footers.values()
            for index in range(footer.num_row_groups)
        )
        return total / max(self.total_rows, 1)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Check that the columns exist.

        Raises:
            DataError: one does not.
        """
        unknown = [name for name in columns if name not in self.schema.names]
        if unknown:
            raise DataError(
                f"{self.url} has no column {', '.join(map(repr, unknown))}; it has {', '.join(self.schema.names)}"
            )

    def sample(self, columns: Sequence[str], rows: int) -> dict[str, Array | CSR]:
        """Read the first rows, at most ``rows``."""
        group = next(group for group in self.groups if group.rows)
        with contextlib.closing(self.read(group, columns, rows, use_threads=False)) as chunks:
            chunk = next(chunks)
        return {name: convert(name, chunk.column(name)) for name in columns}

    def read(
        self, group: RowGroup, columns: Sequence[str], chunk: int, *, use_threads: bool = True
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows of a row group, ``chunk`` rows at a time.

        Raises:
            StoreError: its file no longer exists.
            DataError: the file is damaged, although its footer is intact.
        """
        from pyarrow.parquet import ParquetFile

        with self._opened(group.path) as file:
            try:
                parquet = ParquetFile(
                    file, metadata=self.footers[group.path], buffer_size=_BUFFER if group.nbytes > _LARGE else 0
                )
                yield from parquet.iter_batches(chunk, [group.index], columns=list(columns), use_threads=use_threads)
            except (OSError, ValueError) as error:  # pyarrow's own errors are both
                raise DataError(f"row group {group.index} of {group.path} cannot be read: {error}") from error

    def _opened(self, path: str) -> Any:
        try:
            return self.filesystem.open_input_file(path)
        except FileNotFoundError as error:
            raise StoreError(
                f"{path} no longer exists: {self.url} was deleted or replaced while it was being read"
            ) from error


def list_files(filesystem: FileSystem, path: str, url: str) -> list[str]:
    """Return the sorted paths of the files at ``path``, without Spark's and Hadoop's hidden ones (``_SUCCESS``)."""
    from pyarrow.fs import FileSelector, FileType

    try:
        info = filesystem.get_file_info(path)
        if info.type == FileType.NotFound:
            raise StoreError(f"there is no data set at {url}")
        if info.type == FileType.File:
            return [path]
        found = filesystem.get_file_info(FileSelector(path, recursive=True))
    except OSError as error:
        raise StoreError(f"{url} cannot be read: {error}") from error
    top = len(path.rstrip("/")) + 1
    return sorted(
        info.path
        for info in found
        if info.type == FileType.File
        and info.size
        and not any(part.startswith(("_", ".")) for part in info.path[top:].split("/"))
    )


def _kinds(schema: pa.Schema) -> list[tuple[str, Any]]:
    return [(field.name, _kind(field.type)) for field in schema]


def _kind(kind: pa.DataType | None) -> Any:
    """Return the part of a type that must be the same in all files; programs differ in marking values nullable."""
    import pyarrow as pa

    if kind is None:
        return None
    if is_list(kind):
        return type(kind), _kind(kind.value_type)
    if pa.types.is_struct(kind):
        return [(field.name, _kind(field.type)) for field in kind]
    return kind


def _difference(first: str, schema: pa.Schema, path: str, other: pa.Schema) -> str:
    for name in dict.fromkeys([*schema.names, *other.names]):
        one, two = (each.field(name).type if name in each.names else None for each in (schema, other))
        if _kind(one) != _kind(two):
            return f"{name!r} is {one or 'absent'} in {first}, {two or 'absent'} in {path}"
    return f"{first} and {path} have them in different orders"
