"""Stores: where things lie, what ranks are given, and files that are replaced in one step."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from hvdgloo.errors import ConfigError, MissingDependencyError, StoreError
from hvdgloo.spark.common._files import Files
from hvdgloo.spark.common.store import (
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    RemoteStore,
    Store,
)


class FakeHdfs(pyarrow.fs.FileSystemHandler):
    """HDFS as far as stores can tell: a local folder, in which nothing is renamed onto what exists.

    ``calls`` counts what would change something; the call with the number ``fails`` does not happen.
    """

    def __init__(self, root: Path) -> None:
        self.backing = pyarrow.fs.SubTreeFileSystem(str(root), pyarrow.fs.LocalFileSystem())
        self.calls = 0
        self.fails = 0

    def _changes(self) -> pyarrow.fs.FileSystem:
        self.calls += 1
        if self.calls == self.fails:
            raise OSError("the name node has gone")
        return self.backing

    def get_type_name(self) -> str:
        return "hdfs"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self.backing.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return [
            pyarrow.fs.FileInfo(f"/{info.path}", info.type, size=info.size)
            for info in self.backing.get_file_info(selector)
        ]

    def create_dir(self, path: str, recursive: bool) -> None:
        self._changes().create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._changes().delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._changes().delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._changes().delete_file(path)

    def move(self, source: str, target: str) -> None:
        backing = self._changes()
        if backing.get_file_info(target).type != pyarrow.fs.FileType.NotFound:
            raise OSError(f"{target} exists")
        backing.move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        raise NotImplementedError

    def open_input_stream(self, path: str) -> Any:
        return self.backing.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self.backing.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._changes().open_output_stream(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeHdfs, list[Any]]:
    """The file system, and with which arguments it was asked for."""
    fake, asked = FakeHdfs(tmp_path), []

    def connect(host: str, **arguments: Any) -> pyarrow.fs.FileSystem:
        asked.append((host, arguments))
        return pyarrow.fs.PyFileSystem(fake)

    monkeypatch.setattr(pyarrow.fs, "HadoopFileSystem", connect)
    return fake, asked


@pytest.fixture(params=["file", "memory", "hdfs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "hdfs":
        request.getfixturevalue("hdfs")
        return Store.create("hdfs://namenode:8020/user/me")
    return Store.create(str(tmp_path) if request.param == "file" else f"memory://{secrets.token_hex(8)}/me")


# --- paths


@pytest.mark.parametrize(
    ("prefix", "kind", "url"),
    [
        ("/data/me/", FilesystemStore, "file:///data/me"),
        ("file:///data/me", FilesystemStore, "file:///data/me"),
        ("file:/data/me", FilesystemStore, "file:///data/me"),
        ("s3://bucket/me", FilesystemStore, "s3://bucket/me"),
        ("gs://bucket/me", FilesystemStore, "gs://bucket/me"),
        ("abfs://container@account.dfs.core.windows.net/me", FilesystemStore, None),
        ("memory://me", FilesystemStore, "memory://me"),
        ("hdfs://namenode:8020/me", HDFSStore, "hdfs://namenode:8020/me"),
        ("hdfs:///me", HDFSStore, "hdfs:///me"),
    ],
)
def test_a_store_has_the_documented_layout(prefix: str, kind: type[Store], url: str | None) -> None:
    store, url = Store.create(prefix), url or prefix
    assert type(store) is kind
    assert store.prefix_path == url
    assert store.get_train_data_path() == f"{url}/intermediate_train_data"
    assert store.get_train_data_path(0) == f"{url}/intermediate_train_data.0"
    assert store.get_val_data_path(3) == f"{url}/intermediate_val_data.3"
    assert store.get_test_data_path() == f"{url}/intermediate_test_data"
    assert store.saving_runs()
    assert store.get_runs_path() == f"{url}/runs"
    assert store.get_run_path("r") == store.get_checkpoint_path("r") == f"{url}/runs/r"
    assert store.get_logs_path("r") == f"{url}/runs/r/logs"
    assert store.get_checkpoint_filename() == "checkpoint"
    assert store.get_data_metadata_path(f"{url}/x/") == f"{url}/x/_hvdgloo_metadata.json"
    assert store.get_full_path_fn()(url) == url


def test_a_relative_path_is_a_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("me", train_path="elsewhere/train", runs_path="/runs", checkpoint_filename="last.pt")
    assert store.prefix_path == f"file://{tmp_path}/me"
    assert store.get_train_data_path(1) == f"file://{tmp_path}/elsewhere/train.1"
    assert store.get_runs_path() == "file:///runs"
    assert store.get_checkpoint_filename() == "last.pt"
    assert store.get_localized_path(store.prefix_path) == f"{tmp_path}/me"


def test_a_store_that_keeps_no_runs_has_no_place_for_them(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path), save_runs=False)
    assert not store.saving_runs()
    assert store.get_checkpoint_path("r") is None
    assert store.get_logs_path("r") is None
    assert store.get_checkpoints("r") == []
    assert store.to_remote("r", 0).checkpoint_path is None


@pytest.mark.parametrize(
    ("prefix", "host", "port", "url"),
    [
        ("hdfs://namenode01:8020/user/me", None, None, "hdfs://namenode01:8020/user/me"),
        ("hdfs://namenode01:8020/user/me", "namenode01", 8020, "hdfs://namenode01:8020/user/me"),
        ("hdfs:///user/me", "namenode01", 8020, "hdfs://namenode01:8020/user/me"),
        ("hdfs:///user/me", None, None, "hdfs:///user/me"),
        ("/user/me", "namenode01", 8020, "hdfs://namenode01:8020/user/me"),
        ("/user/me", "namenode01", None, "hdfs://namenode01/user/me"),
        ("/user/me", None, None, "hdfs:///user/me"),
    ],
)
def test_hdfs_has_three_forms_of_urls(
    prefix: str, host: str | None, port: int | None, url: str, hdfs: tuple[FakeHdfs, list[Any]]
) -> None:
    store = HDFSStore(prefix, host, port, "me", "/tmp/ticket", extra_conf={"dfs.replication": "1"})
    assert store.get_full_path("/user/me/x") == store.get_full_path("hdfs:///user/me/x")
    assert store.get_train_data_path(0) == f"{url}/intermediate_train_data.0"
    store.write_text(f"{store.get_runs_path()}/note", "text")
    assert store.read("/user/me/runs/note") == b"text"
    assert store.fs.get_file_info("/user/me/runs/note").is_file
    node = url.removeprefix("hdfs://").partition("/")[0]
    address = (node.partition(":")[0] or "default", 8020 if node else 0)
    settings = {"user": "me", "kerb_ticket": "/tmp/ticket", "extra_conf": {"dfs.replication": "1"}}
    assert {(host, arguments.pop("port")) for host, arguments in hdfs[1]} == {address}
    assert all(arguments == settings for _, arguments in hdfs[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HDFSStore("file:///tmp/me"), "not a path on HDFS"),
        (lambda: HDFSStore("file:/tmp/me"), "is a local path"),
        (lambda: HDFSStore("s3://bucket/me"), "not a path on HDFS"),
        (lambda: HDFSStore("hdfs://one:8020/me", host="two"), "name different name nodes"),
        (lambda: HDFSStore("hdfs://one:8020/me", port=9000), "name different name nodes"),
        (lambda: Store.create(""), "give a path"),
        (lambda: Store.create(None), "give a path"),  # type: ignore[arg-type]
        (lambda: DBFSLocalStore("/tmp/me"), "is not on DBFS"),
        (lambda: FilesystemStore("nosuch://x/y").exists("nosuch://x/y"), "nosuch"),
    ],
)
def test_paths_of_other_file_systems_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def absent(*arguments: Any, **options: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", absent)
    with pytest.raises(MissingDependencyError, match="s3://bucket/me cannot be opened: Install s3fs"):
        Store.create("s3://bucket/me").exists("s3://bucket/me")


def test_libhdfs_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["Unable to load libjvm", "Prior attempt to load libhdfs failed", "connection refused"]

    def absent(*arguments: Any, **options: Any) -> Any:
        raise OSError(said.pop(0))

    monkeypatch.setattr(pyarrow.fs, "HadoopFileSystem", absent)
    for _ in range(2):
        with (
            pytest.raises(MissingDependencyError, match=r"hdfs://one:8020/me cannot be opened: .*CLASSPATH"),
            Store.create("hdfs://one:8020/me").probed(),
        ):
            pass
    with pytest.raises(StoreError, match="cannot be opened: connection refused"):
        Store.create("hdfs://one:8020/me").exists("hdfs://one:8020/me")


def test_storage_options_reach_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    seen = []
    real = fsspec.core.url_to_fs

    def recorded(url: str, **options: Any) -> Any:
        seen.append(options)
        return real("memory://here")

    monkeypatch.setattr(fsspec.core, "url_to_fs", recorded)
    store = Store.create("s3://bucket/me", storage_options={"key": "k"})
    remote = pickle.loads(pickle.dumps(store.to_remote("r", 0)))
    remote.write_bytes(f"{remote.run_path}/x", b"1")
    assert store.fs is not None
    assert seen == [{"key": "k"}] * 2


@pytest.mark.parametrize("path", ["dbfs:/me", "dbfs:///me", "/dbfs/me", "file:///dbfs/me", "file:/dbfs/me"])
def test_dbfs_is_a_local_folder_on_databricks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    store = Store.create(path)
    assert type(store) is DBFSLocalStore
    assert store.prefix_path == "file:///dbfs/me"
    assert store.get_full_path("dbfs:/me/x") == "file:///dbfs/me/x"
    assert store.get_localized_path("dbfs:/me/x") == store.normalize_path(f"{path}/x") == "/dbfs/me/x"
    assert type(Store.create("/tmp/me")) is FilesystemStore
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION")
    assert type(Store.create("/dbfs/me")) is FilesystemStore


# --- files


def test_files_are_written_read_listed_and_deleted(store: Store) -> None:
    folder = store.get_checkpoint_path("r")
    assert folder is not None
    path = f"{folder}/1.ckpt"
    assert not store.exists(path)
    assert store.get_checkpoints("r") == []
    with pytest.raises(StoreError, match=r"1\.ckpt cannot be read"):
        store.read(path)
    for content in (b"first", b"second"):
        store.write_bytes(path, content)
        assert store.read(path) == content
    store.write_text(f"{folder}/0.ckpt", "text")
    store.write_text(f"{folder}/checkpoint", "x")
    assert store.get_checkpoints("r") == [f"{folder}/0.ckpt", path]
    assert store.get_checkpoints("r", "point") == [f"{folder}/checkpoint"]
    assert store.files.names(folder) == ["0.ckpt", "1.ckpt", "checkpoint"]
    store.delete(path)
    store.delete(path)
    assert not store.exists(path)
    store.delete(folder)
    assert not store.exists(f"{folder}/checkpoint")


def test_a_remote_view_says_where_everything_is(store: Store) -> None:
    remote = pickle.loads(pickle.dumps(store.to_remote("r", 2)))
    assert isinstance(remote, RemoteStore)
    assert remote.train_data_path == store.get_train_data_path(2)
    assert remote.val_data_path == store.get_val_data_path(2)
    assert remote.test_data_path == store.get_test_data_path(2)
    assert (remote.saving_runs, remote.runs_path, remote.run_path) == (
        True,
        store.get_runs_path(),
        store.get_run_path("r"),
    )
    assert (remote.checkpoint_path, remote.logs_path) == (store.get_checkpoint_path("r"), store.get_logs_path("r"))
    assert (remote.checkpoint_filename, remote.logs_subdir) == ("checkpoint", "logs")
    with remote.get_local_output_dir() as folder:
        os.makedirs(f"{folder}/logs/inner")
        Path(f"{folder}/logs/inner/a").write_bytes(b"1")
        Path(f"{folder}/b").write_bytes(b"2")
        remote.sync(folder)
    assert not os.path.exists(folder)
    assert (store.read(f"{remote.logs_path}/inner/a"), remote.read(f"{remote.run_path}/b")) == (b"1", b"2")
    remote.write_text(f"{remote.run_path}/b", "3")
    assert remote.exists(f"{remote.run_path}/b")
    remote.delete(f"{remote.run_path}/b")
    assert not store.exists(f"{remote.run_path}/b")


def test_methods_that_a_program_replaces_are_asked(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    store.get_train_data_path = lambda idx=None: "/elsewhere/train"  # type: ignore[method-assign]
    store.get_local_output_dir_fn = lambda run_id: "mine"  # type: ignore[assignment,method-assign,return-value]
    remote = store.to_remote("r", 0)
    assert remote.train_data_path == "file:///elsewhere/train"
    assert remote.get_local_output_dir == "mine"  # type: ignore[comparison-overlap]


def test_data_sets_are_known_by_their_files(store: Store) -> None:
    path = store.get_train_data_path()
    assert not store.is_parquet_dataset(path)
    store.write_text(f"{path}/_SUCCESS", "")
    assert not store.is_parquet_dataset(path)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": np.arange(10)}), sink)
    store.write_bytes(f"{path}/a.parquet", sink.getvalue().to_pybytes())
    assert store.is_parquet_dataset(path)
    assert store.get_parquet_dataset(path).read().num_rows == 10
    reader = store.to_remote("r").batches(path, ["x"], batch_size=4)
    assert sorted(value for batch in reader for value in batch["x"]) == list(range(10))


# --- replacing in one step


def test_a_local_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path = Files(), tmp_path / "checkpoint"
    files.write(str(path), b"old")
    seen = []

    def crash(source: str, target: str) -> None:
        seen.append((Path(source).read_bytes(), path.read_bytes()))
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        with pytest.raises(StoreError, match="checkpoint cannot be written: no space left"):
            files.write(str(path), b"new")
    assert seen == [(b"new", b"old")]
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]
    assert path.read_bytes() == b"old"


def test_a_file_on_hdfs_is_the_old_or_the_new_one_wherever_its_writer_ends(
    hdfs: tuple[FakeHdfs, list[Any]],
) -> None:
    fake, _ = hdfs
    store = Store.create("hdfs://namenode:8020/user/me")
    path = f"{store.get_run_path('r')}/checkpoint"
    store.write_bytes(path, b"0")
    calls = fake.calls
    store.write_bytes(path, b"1")
    steps = fake.calls - calls
    assert steps >= 4
    outcomes = set()
    for number in range(1, steps + 1):
        # Over what the last writer left behind, too.
        store.write_bytes(path, b"old")
        assert store.read(path) == b"old"
        fake.calls, fake.fails = 0, number
        with pytest.raises(StoreError, match="the name node has gone"):
            store.write_bytes(path, b"new")
        fake.fails = 0
        assert store.exists(path)
        outcomes.add(store.read(path))
    assert outcomes == {b"old", b"new"}


# --- probes


def test_every_rank_finds_the_drivers_probe_where_the_store_is_shared(store: Store) -> None:
    with store.probed() as probes:
        remote = pickle.loads(pickle.dumps(store.to_remote("r", 0, probes=probes)))
        remote.check()
    assert store.files.names(store.prefix_path) == []
    assert store.to_remote("r", 0).probes == {}
    with pytest.raises(StoreError, match="is not the same directory here as on the driver's machine"):
        remote.check()


def test_a_probe_belongs_to_one_of_several_trainings_on_a_store(store: Store) -> None:
    first, second = store.probed(), store.probed()
    first.__enter__()
    with second as probes:
        remote = store.to_remote("r", 0, probes=probes)
        first.__exit__(None, None, None)
        remote.check()


def test_every_folder_of_a_store_is_probed(tmp_path: Path) -> None:
    store = LocalStore(f"{tmp_path}/a", train_path=f"{tmp_path}/b/train", runs_path=f"{tmp_path}/c/runs")
    with store.probed() as probes:
        folders = {path.rpartition("/")[0] for path in probes}
    assert folders == {f"file://{tmp_path}/{name}" for name in "abc"}


def test_a_store_that_cannot_be_written_is_found_by_the_driver(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(StoreError, match=f"the store at file://{tmp_path}/file/me cannot be written by the driver"),
        Store.create(f"{tmp_path}/file/me").probed(),
    ):
        pass
