"""Stores, in which estimators keep intermediate data, checkpoints and logs for the driver, Spark and all ranks.

::

    <prefix>/intermediate_train_data[.<number>]    Parquet, and likewise val and test
    <prefix>/runs/<run_id>/<checkpoint file>
    <prefix>/runs/<run_id>/logs/

A program may replace a store's method by a function of its own (``store.get_train_data_path = lambda idx=None: ...``):
all code here goes through the methods.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hvdgloo.errors import ConfigError, StoreError
from hvdgloo.spark.common._files import Files
from hvdgloo.spark.data import ParquetBatches
from hvdgloo.spark.data._filesystems import local_url

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from pyarrow.parquet import ParquetDataset

METADATA_FILE = "_hvdgloo_metadata.json"
"""Name of a file in a data set's directory. Readers of Parquet skip names that begin with an underscore."""


@dataclasses.dataclass(frozen=True)
class RemoteStore:
    """The ranks' view of a store: paths, and access to them. It can be pickled, and needs no Spark.

    The paths are None where the store keeps no runs.
    """

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], AbstractContextManager[str]]
    sync: Callable[[str], None]
    files: Files
    probes: Mapping[str, str]

    @property
    def storage_options(self) -> dict[str, Any]:
        return self.files.options

    def exists(self, path: str) -> bool:
        return self.files.exists(path)

    def read(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            StoreError: the file does not exist or cannot be read.
        """
        return self.files.read(path)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Replace a file atomically.

        Raises:
            StoreError: the file cannot be written; the old content is intact.
        """
        self.files.write(path, data)

    def write_text(self, path: str, text: str) -> None:
        self.write_bytes(path, text.encode())

    def delete(self, path: str) -> None:
        self.files.delete(path)

    def batches(self, path: str, columns: Any = None, **arguments: Any) -> ParquetBatches:
        """Return a reader of the data set at ``path``; see ``ParquetBatches``."""
        return self.files.batches(path, columns, **arguments)

    def check(self) -> None:
        """Check that this process sees the store to which the driver wrote.

        Raises:
            StoreError: it does not: the store is local to the driver's machine.
        """
        for path, token in self.probes.items():
            if not self.files.exists(path) or self.files.read(path) != token.encode():
                raise StoreError(
                    f"{path.rpartition('/')[0]} is not the same directory here as on the driver's machine: a store "
                    f"must be on a file system that the driver and all executors share (NFS, HDFS, S3, ...)"
                )


class Store:
    """A place for a training's data and results. ``Store.create`` finds the class for a path."""

    @staticmethod
    def create(prefix_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Store:
        """Create the store for a path: a DBFSLocalStore for DBFS on Databricks, an HDFSStore for ``hdfs://``, otherwise
        a FilesystemStore.

        Raises:
            ConfigError: the argument is not a path.
        """
        if not isinstance(prefix_path, (str, os.PathLike)) or not os.fspath(prefix_path):
            raise ConfigError(f"Store.create({prefix_path!r}): give a path or a URL, such as '/shared/me'")
        prefix_path = os.fspath(prefix_path)
        if is_databricks() and DBFSLocalStore.matches_dbfs(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)

    # Defined by subclasses.

    @property
    def prefix_path(self) -> str:
        """URL of the store."""
        raise NotImplementedError

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for access to its file system."""
        raise NotImplementedError

    def get_train_data_path(self, idx: int | None = None) -> str:
        raise NotImplementedError

    def get_val_data_path(self, idx: int | None = None) -> str:
        raise NotImplementedError

    def get_test_data_path(self, idx: int | None = None) -> str:
        raise NotImplementedError

    def saving_runs(self) -> bool:
        """Return whether checkpoints and logs are kept."""
        raise NotImplementedError

    def get_runs_path(self) -> str:
        raise NotImplementedError

    def get_full_path(self, path: str) -> str:
        """Return the URL of a path in this store's file system."""
        raise NotImplementedError

    # Derived from these.

    @property
    def files(self) -> Files:
        return Files(self.storage_options)

    def filesystem(self) -> FileSystem:
        """Return the file system, as one of ``pyarrow.fs``."""
        return self.files.open(self.prefix_path)[0]

    def get_run_path(self, run_id: str) -> str:
        return f"{self.get_runs_path()}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the directory of this run's checkpoints; None if none are kept."""
        return self.get_run_path(run_id) if self.saving_runs() else None

    def get_checkpoint_filename(self) -> str:
        return "checkpoint"

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the run's checkpoint files with this suffix, sorted."""
        folder = self.get_checkpoint_path(run_id)
        if folder is None:
            return []
        names = self.files.names(self.get_full_path(folder))
        return [f"{folder}/{name}" for name in names if name.endswith(suffix)]

    def get_logs_path(self, run_id: str) -> str | None:
        """Return the directory of this run's logs; None if none are kept."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}" if self.saving_runs() else None

    def get_logs_subdir(self) -> str:
        return "logs"

    def get_data_metadata_path(self, path: str) -> str:
        """Return the path of the JSON file that describes the data set at ``path``."""
        return f"{path.rstrip('/')}/{METADATA_FILE}"

    def get_full_path_fn(self) -> Callable[[str], str]:
        return self.get_full_path

    def get_localized_path(self, path: str) -> str:
        """Return a path of this store without its scheme, as its file system takes it."""
        return self.files.open(self.get_full_path(path))[1]

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether there is a data set of Parquet files at ``path``."""
        try:
            return self.get_parquet_dataset(path) is not None
        except (OSError, ValueError, StoreError):
            return False

    def get_parquet_dataset(self, path: str) -> ParquetDataset:
        from pyarrow.parquet import ParquetDataset

        filesystem, local = self.files.open(self.get_full_path(path))
        dataset = ParquetDataset(local, filesystem=filesystem)
        if not dataset.files:
            raise StoreError(f"{path} contains no Parquet file")
        return dataset

    def exists(self, path: str) -> bool:
        return self.files.exists(self.get_full_path(path))

    def read(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            StoreError: the file does not exist or cannot be read.
        """
        return self.files.read(self.get_full_path(path))

    def read_serialized_keras_model(
        self, ckpt_path: str, model: Any = None, custom_objects: Mapping[str, Any] | None = None
    ) -> str:
        """Return the Keras model of a checkpoint as text.

        Args:
            ckpt_path: a ``.keras`` or HDF5 file in this store, of a model or of its weights only.
            model: the model to which the weights belong; it is not changed. Not needed for a file of a whole model.
            custom_objects: the model's custom classes and functions, by name.

        Returns:
            the bytes of a file that ``keras.models.load_model`` reads, in base64.

        Raises:
            StoreError: the file does not exist or cannot be read.
            ConfigError: (a ValueError) the file contains only weights, and not this model's.
        """
        from hvdgloo.spark.keras._models import whole_model

        return base64.b64encode(whole_model(self.read(ckpt_path), model, custom_objects or {})).decode()

    def write_bytes(self, path: str, data: bytes) -> None:
        """Replace a file atomically.

        Raises:
            StoreError: the file cannot be written; the old content is intact.
        """
        self.files.write(self.get_full_path(path), data)

    def write_text(self, path: str, text: str) -> None:
        self.write_bytes(path, text.encode())

    def delete(self, path: str) -> None:
        """Delete a file or directory if it exists."""
        self.files.delete(self.get_full_path(path))

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """Return a function that makes a temporary local directory, for frameworks that write only local files."""
        return functools.partial(_local_output_dir, run_id)

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies the contents of a local directory into the run's directory."""
        return functools.partial(_sync, self.files, self.get_full_path(self.get_run_path(run_id)))

    def to_remote(
        self, run_id: str, dataset_idx: int | None = None, *, probes: Mapping[str, str] | None = None
    ) -> RemoteStore:
        """Return the ranks' view of this store.

        Args:
            probes: the files from ``probed``, for ``RemoteStore.check``.
        """

        def full(path: str) -> str:
            return self.get_full_path(path)

        checkpoint, logs = self.get_checkpoint_path(run_id), self.get_logs_path(run_id)
        return RemoteStore(
            train_data_path=full(self.get_train_data_path(dataset_idx)),
            val_data_path=full(self.get_val_data_path(dataset_idx)),
            test_data_path=full(self.get_test_data_path(dataset_idx)),
            saving_runs=self.saving_runs(),
            runs_path=full(self.get_runs_path()),
            run_path=full(self.get_run_path(run_id)),
            checkpoint_path=None if checkpoint is None else full(checkpoint),
            logs_path=None if logs is None else full(logs),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
            files=self.files,
            probes=dict(probes or {}),
        )

    @contextlib.contextmanager
    def probed(self) -> Iterator[dict[str, str]]:
        """Keep small files in the store, which ``RemoteStore.check`` looks for on every rank, while the context lasts.

        Yields:
            the files' contents by their URLs, for ``to_remote``.

        Raises:
            StoreError: the store cannot be written.
        """
        folders = {self.get_full_path(self.prefix_path).rstrip("/")}
        paths = [self.get_train_data_path(), *([self.get_runs_path()] if self.saving_runs() else [])]
        for path in map(self.get_full_path, paths):
            if not any(path.startswith(f"{folder}/") for folder in folders):
                folders.add(path.rstrip("/").rpartition("/")[0])
        token = secrets.token_hex(8)
        for folder in sorted(folders):
            self.files.open(folder)  # so that an error names the directory, not a file in it
        # The names are unique to this call: two estimators may train on one store at once.
        probes = {f"{folder}/.hvdgloo-probe-{token}": token for folder in sorted(folders)}
        try:
            for path in probes:
                try:
                    self.files.write(path, token.encode())
                except StoreError as error:
                    raise StoreError(
                        f"the store at {path.rpartition('/')[0]} cannot be written by the driver: {error.__cause__}"
                    ) from error
            yield probes
        finally:
            for path in probes:
                with contextlib.suppress(StoreError):
                    self.files.delete(path)


class AbstractFilesystemStore(Store):
    """Store with the documented layout below a prefix.

    Args:
        prefix_path: the URL or path of the store.
        train_path, val_path, test_path, runs_path: their paths, if not below the prefix.
        save_runs: keep checkpoints and logs.
        storage_options: options for access to the file system.
        checkpoint_filename: name of the checkpoint in a run's directory.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self._storage_options = dict(storage_options or {})
        self._prefix_path = self.get_full_path(prefix_path).rstrip("/")
        self._train_path = self._below(train_path, "intermediate_train_data")
        self._val_path = self._below(val_path, "intermediate_val_data")
        self._test_path = self._below(test_path, "intermediate_test_data")
        self._runs_path = self._below(runs_path, "runs")
        self._save_runs = save_runs
        self._checkpoint_filename = checkpoint_filename

    def _below(self, path: str | None, name: str) -> str:
        return f"{self._prefix_path}/{name}" if path is None else self.get_full_path(path).rstrip("/")

    @property
    def prefix_path(self) -> str:
        return self._prefix_path

    @property
    def storage_options(self) -> dict[str, Any]:
        return dict(self._storage_options)

    def get_train_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._test_path, idx)

    def saving_runs(self) -> bool:
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs_path

    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename or super().get_checkpoint_filename()


class FilesystemStore(AbstractFilesystemStore):
    """A store on a file system supported by fsspec: local files, ``s3://``, ``gs://``, ``abfs://``, ``memory://``, ...

    A path without a scheme is local, and is made absolute.
    """

    def get_full_path(self, path: str) -> str:
        return local_url(path)

    @property
    def fs(self) -> Any:
        """The file system as one of fsspec."""
        import fsspec

        return fsspec.core.url_to_fs(self.prefix_path, **self.storage_options)[0]


LocalStore = FilesystemStore
"""Name of FilesystemStore in earlier versions of Horovod."""


class HDFSStore(AbstractFilesystemStore):
    """A store on HDFS, through Arrow's binding to libhdfs (needs ``HADOOP_HOME``, ``JAVA_HOME`` and ``CLASSPATH``).

    Args:
        prefix_path: ``hdfs://namenode:8020/path``; or ``hdfs:///path`` or ``/path``, with the name node from ``host``
            and ``port``, or otherwise from Hadoop's configuration.
        host, port: the name node.
        user: the user on whose behalf files are read and written.
        kerb_ticket: path of a Kerberos ticket cache.
        driver, temp_dir: without effect; older versions of Arrow needed them.
        extra_conf: Hadoop settings.

    Raises:
        ConfigError: the URL has another scheme, or a name node that contradicts ``host`` or ``port``.
    """

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        temp_dir: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        del driver, temp_dir
        if "://" in prefix_path and not self.matches(prefix_path):
            raise ConfigError(
                f"{prefix_path} is not a path on HDFS: HDFSStore takes hdfs://host:port/path, hdfs:///path and /path"
            )
        if prefix_path.startswith("file:"):
            raise ConfigError(f"{prefix_path} is a local path: use LocalStore, or Store.create")
        parts = urlsplit(prefix_path)
        for name, given, said in (("host", host, parts.hostname), ("port", port, parts.port)):
            if given and said and str(given) != str(said):
                raise ConfigError(f"{prefix_path} and {name}={given!r} name different name nodes")
        self._host, self._port = parts.hostname or host, parts.port or port
        settings = {
            "host": self._host,
            "port": self._port,
            "user": user,
            "kerb_ticket": kerb_ticket,
            "extra_conf": dict(extra_conf or {}),
        }
        given_options = kwargs.pop("storage_options", None) or {}
        kwargs["storage_options"] = given_options | {key: value for key, value in settings.items() if value}
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether this is a URL of HDFS."""
        return path.startswith("hdfs://")

    def get_full_path(self, path: str) -> str:
        if self.matches(path):
            parts = urlsplit(path)
            if parts.netloc or not self._host:
                return path
            path = parts.path
        node = "" if not self._host else self._host if not self._port else f"{self._host}:{self._port}"
        return f"hdfs://{node}/{path.lstrip('/')}"

    @property
    def fs(self) -> FileSystem:
        """The file system as one of ``pyarrow.fs``."""
        return self.filesystem()


class DBFSLocalStore(FilesystemStore):
    """A store on Databricks' file system, through the directory ``/dbfs`` on every machine."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        if not self.matches_dbfs(prefix_path):
            raise ConfigError(f"{prefix_path} is not on DBFS: its paths begin with dbfs:/ or /dbfs/")
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Return whether this is a path on DBFS, in any spelling."""
        return _DBFS.match(path) is not None

    @staticmethod
    def normalize_path(path: str) -> str:
        """Convert any spelling of a path on DBFS to a local path: ``/dbfs/...``."""
        return _DBFS.sub("/dbfs/", path)

    def get_full_path(self, path: str) -> str:
        return super().get_full_path(self.normalize_path(path))


_DBFS = re.compile(r"(dbfs:/+|file:/+dbfs/+|/dbfs/+)")


def is_databricks() -> bool:
    """Return whether this program runs on Databricks."""
    return bool(os.environ.get("DATABRICKS_RUNTIME_VERSION"))


def _numbered(path: str, idx: int | None) -> str:
    return path if idx is None else f"{path}.{idx}"


@contextlib.contextmanager
def _local_output_dir(run_id: str) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix=f"{os.path.basename(run_id)}-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(files: Files, run_path: str, folder: str) -> None:
    files.upload(folder, run_path)
