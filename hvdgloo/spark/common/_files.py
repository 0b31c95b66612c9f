"""Files of a store, on any file system: reading and atomic replacement."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hvdgloo._platform.files import replacing
from hvdgloo.errors import StoreError
from hvdgloo.spark.data import ParquetBatches
from hvdgloo.spark.data._filesystems import open_filesystem

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


@dataclasses.dataclass(frozen=True)
class Files:
    """Access to files by their URLs. It holds no connections, and so can be sent to other processes.

    Attributes:
        options: options for fsspec or libhdfs, as for ``open_filesystem``.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def open(self, url: str) -> tuple[FileSystem, str]:
        return open_filesystem(url, self.options)

    def exists(self, url: str) -> bool:
        from pyarrow.fs import FileType

        filesystem, path = self.open(url)
        with _errors(url, "looked at"):
            kind = filesystem.get_file_info(path).type
            return bool(kind != FileType.NotFound) or self._rescued(filesystem, path) is not None

    def read(self, url: str) -> bytes:
        """Return a file's content.

        Raises:
            StoreError: the file does not exist or cannot be read.
        """
        filesystem, path = self.open(url)
        with _errors(url, "read"):
            with filesystem.open_input_file(self._rescued(filesystem, path) or path) as file:
                content: bytes = file.read()
            return content

    def write(self, url: str, content: bytes) -> None:
        """Replace a file atomically: readers, even after a crash, get either the old content or the new.

        Raises:
            StoreError: the file cannot be written; the old content is intact.
        """
        from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

        filesystem, path = self.open(url)
        with _errors(url, "written"):
            if isinstance(filesystem, LocalFileSystem):
                _replace_locally(path, content)
            elif isinstance(filesystem, PyFileSystem) and isinstance(filesystem.handler, FSSpecHandler):
                # One request, or one that completes several: an object is there as a whole or not at all.
                backing = filesystem.handler.fs
                backing.makedirs(path.rpartition("/")[0], exist_ok=True)
                backing.pipe_file(path, content)
            else:
                self._replace_by_renaming(filesystem, path, content)

    def _replace_by_renaming(self, filesystem: FileSystem, path: str, content: bytes) -> None:
        """Replace a file on HDFS, where the target of a rename must not exist, so that the old file has to go first.

        By then the new file has a name under which readers find it if this process ends in between.
        """
        from pyarrow.fs import FileType

        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        part, whole = f"{path}.{secrets.token_hex(4)}.part", _whole(path)
        with filesystem.open_output_stream(part) as file:
            file.write(content)
        rescued = self._rescued(filesystem, path)
        if rescued is not None:
            filesystem.move(rescued, path)
        elif filesystem.get_file_info(whole).type != FileType.NotFound:
            filesystem.delete_file(whole)
        filesystem.move(part, whole)
        if filesystem.get_file_info(path).type != FileType.NotFound:
            filesystem.delete_file(path)
        filesystem.move(whole, path)

    @staticmethod
    def _rescued(filesystem: FileSystem, path: str) -> str | None:
        """Return the file that was to replace ``path``, if the writer ended after deleting ``path``; otherwise None."""
        from pyarrow.fs import FileType, LocalFileSystem

        if isinstance(filesystem, LocalFileSystem):
            return None
        absent, whole = filesystem.get_file_info([path, _whole(path)])
        return _whole(path) if absent.type == FileType.NotFound and whole.type == FileType.File else None

    def delete(self, url: str) -> None:
        """Delete a file, or a directory with its contents, if it exists."""
        from pyarrow.fs import FileType

        filesystem, path = self.open(url)
        with _errors(url, "deleted"):
            kind = filesystem.get_file_info(path).type
            if kind == FileType.Directory:
                filesystem.delete_dir(path)
            elif kind != FileType.NotFound:
                filesystem.delete_file(path)

    def move(self, source: str, target: str) -> None:
        """Rename a file or directory; ``target`` must not exist."""
        filesystem, path = self.open(source)
        _, goal = self.open(target)
        with _errors(target, "written"):
            parent = goal.rpartition("/")[0]
            if parent:
                filesystem.create_dir(parent, recursive=True)
            filesystem.move(path, goal)

    def names(self, url: str) -> list[str]:
        """Return the names of the files in a directory, sorted; empty if there is no such directory."""
        from pyarrow.fs import FileSelector, FileType

        filesystem, path = self.open(url)
        with _errors(url, "read"):
            found = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
            return sorted(info.base_name for info in found if info.type == FileType.File)

    def upload(self, folder: str, url: str) -> None:
        """Copy all files of a local directory, including subdirectories, into the directory ``url``."""
        for where, _, names in os.walk(folder):
            inner = os.path.relpath(where, folder)
            for name in names:
                with open(os.path.join(where, name), "rb") as file:
                    parts = [] if inner == "." else inner.split(os.sep)
                    self.write("/".join([url.rstrip("/"), *parts, name]), file.read())

    def batches(self, url: str, columns: Any = None, **arguments: Any) -> ParquetBatches:
        """Return a reader of the data set at ``url``; see ``ParquetBatches``."""
        return ParquetBatches(url, columns, storage_options=self.options, **arguments)


def _whole(path: str) -> str:
    return f"{path}.new"


def _replace_locally(path: str, content: bytes) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    with replacing(path) as file:
        file.write(content)
        file.flush()
        # If it were renamed before its content is on disk, the file could be empty after a crash of the machine.
        os.fsync(file.fileno())


@contextlib.contextmanager
def _errors(url: str, what: str) -> Iterator[None]:
    """Convert a file system's errors to a StoreError that names the file."""
    try:
        yield
    except StoreError:
        raise
    # Any class, since s3fs, gcsfs and adlfs raise their own.
    except Exception as error:
        raise StoreError(f"{url} cannot be {what}: {error or type(error).__name__}") from error
