"""Saving and loading of estimators, models, and pipelines with them.

A directory holds ``metadata``, JSON as pyspark writes it, with all plain values; and ``params``, a file or two for each
value that JSON cannot hold: models and optimizers in their framework's format, metadata of columns as JSON. Functions
(losses, metrics, transformations, callbacks) and the classes of torch's modules can only be pickled by cloudpickle.
**Unpickling executes code**: ``load`` is for directories of people whom you trust to run code as you. With
``trusted=False`` it refuses pickles; the pickled values can be given instead::

    model = TorchModel.load(path, trusted=False, model=Net(), loss=loss)

Backend and store are not saved, since they belong to the place where an estimator is used, not to the estimator.

Files go through Hadoop's file systems, as Spark's own do, so a path may be anything to which Spark can write.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
from pyspark.ml.util import DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from hvdgloo.errors import ConfigError
from hvdgloo.spark.common._metadata import metadata_from_json, metadata_to_json

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HorovodParamsReader", "HorovodParamsWriter", "HorovodReadable", "HorovodWritable"]

Files = dict[str, bytes]
"""Files of a saved value: contents by file extension."""


class Refused(Exception):  # noqa: N818 - never leaves this package
    """A value cannot be loaded without unpickling, which was not allowed."""


class Codec:
    """Format in which a Param's value is saved: by cloudpickle, unless a framework has a better one."""

    def encode(self, value: Any, instance: Any) -> Files:
        """Convert a value to files.

        Args:
            instance: the estimator or model that has the value.
        """
        return {"pkl": cloudpickle.dumps(value)}

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        """Convert files to the value.

        Args:
            loaded: values of other Params: plain ones, and those whose codecs come before this one.
            trusted: allow unpickling.

        Raises:
            Refused: the value has to be unpickled, and ``trusted`` is False.
        """
        if not trusted:
            raise Refused
        return cloudpickle.loads(files["pkl"])

    def complete(self, given: Any, files: Files) -> Any:
        """Complete a value that the caller gave instead, from the files as far as that needs no unpickling."""
        return given


class _Metadata(Codec):
    """Format of columns' metadata, which refers to pyspark's types by name."""

    def encode(self, value: Any, instance: Any) -> Files:
        return {"json": metadata_to_json(value).encode()}

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        return metadata_from_json(files["json"].decode())


_CLOUDPICKLE = Codec()
_METADATA = _Metadata()


def _is_plain(value: Any) -> bool:
    """Return whether a value survives conversion to JSON and back unchanged."""
    if isinstance(value, list):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)


class _Folder:
    """Files below a path in one of Hadoop's file systems."""

    _CHUNK = 8 << 20
    """Number of bytes that go through py4j at once, which sends them as text."""

    def __init__(self, spark: Any, path: str) -> None:
        self._path = path
        self._jvm = spark.sparkContext._jvm
        self._configuration = spark.sparkContext._jsc.hadoopConfiguration()

    def exists(self) -> bool:
        path = self._jvm.org.apache.hadoop.fs.Path(self._path)
        return bool(path.getFileSystem(self._configuration).exists(path))

    def write(self, name: str, data: bytes) -> None:
        path = self._jvm.org.apache.hadoop.fs.Path(posixpath.join(self._path, name))
        stream = path.getFileSystem(self._configuration).create(path, True)
        try:
            for begin in range(0, len(data), self._CHUNK):
                stream.write(bytearray(data[begin : begin + self._CHUNK]))
        finally:
            stream.close()

    def read(self, name: str) -> bytes:
        path = self._jvm.org.apache.hadoop.fs.Path(posixpath.join(self._path, name))
        stream = path.getFileSystem(self._configuration).open(path)
        data = bytearray()
        try:
            while chunk := stream.readNBytes(self._CHUNK):
                data += chunk
        finally:
            stream.close()
        return bytes(data)


class HorovodParamsWriter(MLWriter):
    """Writer of an estimator or a model; ``overwrite()`` before ``save`` allows replacing an existing path."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Write to a directory.

        Raises:
            ConfigError: the path exists, and ``overwrite()`` was not called.
        """
        if not self.shouldOverwrite and _Folder(self.sparkSession, path).exists():
            raise ConfigError(f"{path} already exists; .write().overwrite().save({path!r}) replaces it")
        super().save(path)

    def saveImpl(self, path: str) -> None:
        plain: dict[str, Any] = {}
        files: dict[str, Files] = {}
        for param, value in self.instance._paramMap.items():
            if param.name in self.instance._not_saved:
                continue
            codec = _codec(self.instance, param.name)
            if value is None or (codec is _CLOUDPICKLE and _is_plain(value)):
                plain[param.name] = value
            else:
                files[param.name] = codec.encode(value, self.instance)
        spark = self.sparkSession
        DefaultParamsWriter.saveMetadata(
            self.instance,
            path,
            spark.sparkContext,
            extraMetadata={"files": {name: list(contents) for name, contents in files.items()}},
            paramMap=plain,
        )
        folder = _Folder(spark, path)
        for name, contents in files.items():
            for ending, data in contents.items():
                folder.write(_file(name, ending), data)


class HorovodParamsReader(MLReader):
    """Reader of the directories that ``HorovodParamsWriter`` wrote."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str, trusted: bool = True, **given: Any) -> Any:
        """Read a directory; see ``HorovodReadable.load``."""
        spark = self.sparkSession
        folder = _Folder(spark, path)
        if not folder.exists():
            raise ConfigError(f"{path} does not exist")
        metadata = json.loads(spark.read.text(posixpath.join(path, "metadata")).first()[0])
        instance = self.cls()
        if "files" not in metadata or metadata["class"].rpartition(".")[2] != self.cls.__name__:
            raise ConfigError(f"{path} contains a {metadata['class']}, which {self.cls.__name__}.load() cannot read")
        unknown = [name for name in given if not instance.hasParam(name)]
        if unknown:
            raise ConfigError(f"{self.cls.__name__} has no {unknown[0]!r}")
        values = {**metadata["paramMap"], **given}
        refused = []
        for name in _in_order(instance, metadata["files"]):
            codec = _codec(instance, name)
            contents = {ending: folder.read(_file(name, ending)) for ending in metadata["files"][name]}
            if name in given:
                values[name] = codec.complete(given[name], contents)
                continue
            try:
                values[name] = codec.decode(contents, values, trusted=trusted)
            except Refused:
                refused.append(name)
        if refused:
            raise ConfigError(
                f"{path}: {', '.join(refused)} would be unpickled, which executes code. If you trust its author, load "
                f"it with trusted=True; otherwise give the value: load(path, trusted=False, {refused[0]}=...)"
            )
        instance._resetUid(metadata["uid"])
        for name, value in values.items():
            instance._set(**{name: value})
        return instance


def _codec(instance: Any, name: str) -> Codec:
    if name == "_metadata":
        return _METADATA
    found: Codec = instance._codecs.get(name, _CLOUDPICKLE)
    return found


def _in_order(instance: Any, names: Mapping[str, Any]) -> list[str]:
    """Sort Params, the framework's own first, in its order: an optimizer is rebuilt on a model's parameters."""
    return sorted(
        names, key=lambda name: list(instance._codecs).index(name) if name in instance._codecs else len(names)
    )


def _file(name: str, ending: str) -> str:
    return f"params/{name}.{ending}"


class HorovodWritable(MLWritable):
    """Base of estimators and models, with ``save`` and ``write``."""

    _codecs: ClassVar[Mapping[str, Codec]] = {}
    """Formats of a framework's Params; Params to which others refer come first."""

    _not_saved: ClassVar[frozenset[str]] = frozenset()

    def write(self) -> HorovodParamsWriter:
        """Return a writer: ``write().overwrite().save(path)``."""
        return HorovodParamsWriter(self)


class HorovodReadable(MLReadable):
    """Base of estimators and models, with ``load`` and ``read``."""

    @classmethod
    def read(cls) -> HorovodParamsReader:
        """Return a reader: ``read().load(path)``."""
        return HorovodParamsReader(cls)

    @classmethod
    def load(cls, path: str, trusted: bool = True, **given: Any) -> Self:
        """Load what ``save`` wrote. **This executes code that the directory contains**, unless ``trusted=False``.

        Args:
            path: the directory.
            trusted: False to refuse pickles, in which functions and torch's modules are saved.
            given: values for Params, instead of the saved ones. A given model receives the saved weights.

        Raises:
            ConfigError: there is nothing of this class at the path, or pickles were refused.
        """
        loaded: Self = cls.read().load(path, trusted, **given)
        return loaded
