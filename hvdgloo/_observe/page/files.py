"""The page's static files, from the package: each is read once, and its digest is its tag."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "woff2": "font/woff2",
}
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class File:
    """A file to be sent. ``tag`` is the ETag of its contents, in quotes as HTTP has it."""

    data: bytes
    content_type: str
    tag: str


@functools.cache
def files() -> Mapping[str, File]:
    """Return all files below ``static``, by path. No other file is ever opened, whatever a request asks for."""
    return dict(_below(resources.files("hvdgloo._observe.page") / "static", ""))


def _below(folder: Traversable, prefix: str) -> list[tuple[str, File]]:
    found = []
    for entry in folder.iterdir():
        if not _PLAIN.fullmatch(entry.name):
            continue  # an editor's backup
        if entry.is_dir():
            found += _below(entry, f"{prefix}{entry.name}/")
        elif (kind := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
            data = entry.read_bytes()
            found.append((prefix + entry.name, File(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')))
    return found
