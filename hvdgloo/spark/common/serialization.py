"""Saving and loading estimators, models, and pipelines with them.

A folder holds ``metadata``, JSON as pyspark writes it, with all plain values; and ``params``, a file or two for each
value that JSON cannot hold: models and optimizers in their framework's format, metadata of columns as JSON. Functions
(losses, metrics, transformations, callbacks) have no other format than cloudpickle's, and so have the classes of
torch's modules. **Unpickling executes code**: ``load`` is for folders of people who may run code as you. With
``trusted=False`` it refuses pickles; what would have to be unpickled can be given instead::

    model = TorchModel.load(path, trusted=False, model=Net(), loss=loss)

Backend and store are not saved: they are of the place where an estimator is used, not of the estimator.

Files go through Hadoop's file systems, as those of Spark itself do, so a path may be anything that Spark can write to.
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
"""What a value is saved as: contents by the endings of file names."""


class Refused(Exception):  # noqa: N818 - never leaves this package
    """A value cannot be had without unpickling, and that was not allowed."""


class Codec:
    """How the value of a Param is saved: by cloudpickle, if a framework knows nothing better."""

    def encode(self, value: Any, instance: Any) -> Files:
        """The files of a value.

        Args:
            instance: the estimator or model that has it.
        """
        return {"pkl": cloudpickle.dumps(value)}

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        """The value.

        Args:
            loaded: values of other Params: plain ones, and those whose codecs come before this one.
            trusted: whether anything may be unpickled.

        Raises:
            Refused: it is not.
        """
        if not trusted:
            raise Refused
        return cloudpickle.loads(files["pkl"])

    def complete(self, given: Any, files: Files) -> Any:
        """What a caller gave instead, completed from the files as far as that needs no unpickling."""
        return given


class _Metadata(Codec):
    """What is known of columns: it refers to types of pyspark's by name."""

    def encode(self, value: Any, instance: Any) -> Files:
        return {"json": metadata_to_json(value).encode()}

    def decode(self, files: Files, loaded: Mapping[str, Any], *, trusted: bool) -> Any:
        return metadata_from_json(files["json"].decode())


_CLOUDPICKLE = Codec()
_METADATA = _Metadata()


def _is_plain(value: Any) -> bool:
    """Whether JSON gives back exactly this."""
    if isinstance(value, list):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)


class _Folder:
    """Files below a path of Hadoop's."""

    _CHUNK = 8 << 20
    """Bytes that go through py4j at once: it sends them as text."""

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
    """Writes an estimator or a model; ``overwrite()`` first replaces what is at the path."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Write to a folder.

        Raises:
            ConfigError: the path exists, and ``overwrite()`` was not called.
        """
        if not self.shouldOverwrite and _Folder(self.sparkSession, path).exists():
            raise ConfigError(f"{path} exists already; .write().overwrite().save({path!r}) replaces it")
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
    """Reads what ``HorovodParamsWriter`` wrote."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str, trusted: bool = True, **given: Any) -> Any:
        """Read a folder; see ``HorovodReadable.load``."""
        spark = self.sparkSession
        folder = _Folder(spark, path)
        if not folder.exists():
            raise ConfigError(f"{path} does not exist")
        metadata = json.loads(spark.read.text(posixpath.join(path, "metadata")).first()[0])
        instance = self.cls()
        if "files" not in metadata or metadata["class"].rpartition(".")[2] != self.cls.__name__:
            raise ConfigError(f"{path} holds a {metadata['class']}, which {self.cls.__name__}.load() cannot read")
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
                f"{path}: {', '.join(refused)} would be unpickled, which executes code. If you trust whoever wrote it, "
                f"load it with trusted=True; else give what is missing: load(path, trusted=False, {refused[0]}=...)"
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
    """The framework's own Params first, in its order: an optimizer is rebuilt on a model's parameters."""
    return sorted(
        names, key=lambda name: list(instance._codecs).index(name) if name in instance._codecs else len(names)
    )


def _file(name: str, ending: str) -> str:
    return f"params/{name}.{ending}"


class HorovodWritable(MLWritable):
    """``save`` and ``write``, for estimators and models."""

    _codecs: ClassVar[Mapping[str, Codec]] = {}
    """How Params of a framework are saved; those that others refer to come first."""

    _not_saved: ClassVar[frozenset[str]] = frozenset()

    def write(self) -> HorovodParamsWriter:
        """A writer: ``write().overwrite().save(path)``."""
        return HorovodParamsWriter(self)


class HorovodReadable(MLReadable):
    """``load`` and ``read``, for estimators and models."""

    @classmethod
    def read(cls) -> HorovodParamsReader:
        """A reader: ``read().load(path)``."""
        return HorovodParamsReader(cls)

    @classmethod
    def load(cls, path: str, trusted: bool = True, **given: Any) -> Self:
        """Load what ``save`` wrote. **This executes code that the folder contains**, unless ``trusted=False``.

        Args:
            path: the folder.
            trusted: False to refuse pickles, in which functions and torch's modules are saved.
            given: values for Params, instead of those in the folder. A model that is given receives the saved weights.

        Raises:
            ConfigError: there is nothing of this class at the path, or pickles were refused.
        """
        loaded: Self = cls.read().load(path, trusted, **given)
        return loaded
