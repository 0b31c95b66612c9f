"""Conversion of a path or URL to a file system of ``pyarrow.fs`` and a path within it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hvdgloo._platform.spelling import followed_by
from hvdgloo.errors import ConfigError, MissingDependencyError, StoreError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

Options = Mapping[str, Any]


def local_url(path: str | os.PathLike[str]) -> str:
    """Convert a path without a scheme to an absolute ``file://`` URL; URLs are returned unchanged."""
    text = os.fspath(path)
    if "://" in text:
        return text
    if text.startswith("file:"):
        text = text.removeprefix("file:")
    return "file://" + os.path.abspath(text)


def scheme_of(url: str) -> str:
    return urlsplit(url).scheme if "://" in url else "file"


def without_scheme(url: str) -> str:
    """Return the path of a URL as a file system takes it: with its bucket or container, without its scheme."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    if scheme == "file":
        return "/" + rest.lstrip("/")
    return rest.rstrip("/")


def open_filesystem(url: str, options: Options | None = None) -> tuple[FileSystem, str]:
    """Return the file system of ``url``, and the path within it.

    Local files are read by Arrow itself; ``hdfs://`` by Arrow's binding to libhdfs, with the options ``host``,
    ``port``, ``user``, ``kerb_ticket`` and ``extra_conf``; all others by fsspec, to which the options are passed (s3fs,
    gcsfs and adlfs are separate packages).

    Raises:
        ConfigError: there is no file system for this scheme.
        MissingDependencyError: libhdfs, or the package that fsspec needs for this scheme, is not installed.
        StoreError: HDFS does not answer.
    """
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    url = local_url(url)
    scheme = scheme_of(url)
    if scheme == "file":
        return LocalFileSystem(), without_scheme(url)
    if scheme in ("hdfs", "viewfs"):
        return _hdfs(url, options or {})
    try:
        import fsspec
    except ImportError as error:
        raise MissingDependencyError(f"{url} needs fsspec: pip install 'hvdgloo[spark]'") from error
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **(options or {}))
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from error
    except ImportError as error:
        raise MissingDependencyError(f"{url} cannot be opened: {error}") from error
    return PyFileSystem(FSSpecHandler(filesystem)), path


def _hdfs(url: str, options: Options) -> tuple[FileSystem, str]:
    from pyarrow.fs import HadoopFileSystem

    parts = urlsplit(url)
    settings = {key: options[key] for key in ("user", "kerb_ticket", "extra_conf") if options.get(key)}
    host = options.get("host") or parts.hostname or "default"
    port = options.get("port") or parts.port or (0 if host == "default" else 8020)
    try:
        return HadoopFileSystem(host, port=port, **settings), parts.path
    except OSError as error:
        if any(name in str(error) for name in ("libhdfs", "libjvm")):
            advice = (
                "Arrow reads HDFS through libhdfs, which it finds by HADOOP_HOME, JAVA_HOME and CLASSPATH (`hadoop "
                "classpath --glob`): set them on all hosts"
            )
            raise MissingDependencyError(f"{url} cannot be opened: {followed_by(error, advice)}") from error
        raise StoreError(f"{url} cannot be opened: {error}") from error
