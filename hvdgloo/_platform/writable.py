"""Checks that a file could be written, without writing it, and the directory that it needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

logger = logging.getLogger(__name__)

INCOMPLETE = "INCOMPLETE: "
"""Begins the last event of a timeline that could not be written to its end; the reason follows."""


def make_directory_of(path: str) -> None:
    """Create the directories that lead to a file, and note it in the log: a path may be mistyped.

    Raises:
        OSError: they cannot be created.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        logger.info("the directory %s did not exist; it was created for %s", folder, os.path.basename(path))


def why_not_writable(path: str) -> str:
    """Return why no file can be written at ``path``, whose missing directories would be created; empty if nothing is
    known to prevent it (a full disk shows only later).
    """
    if os.path.isdir(path):
        return "it is a directory"
    if os.path.exists(path):
        return "" if os.access(path, os.W_OK) else "permission denied"
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        return f"{folder} is not a directory"
    # Some file systems (/proc) claim to be writable and are not; that shows only when the file is opened.
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"permission denied in {folder}"


def why_not_replaceable(path: str) -> str:
    """Return why no file can be put at ``path`` at once, by way of another one next to it; empty if nothing is known to
    prevent it. A file is made for that in the nearest directory that exists, and is removed before this returns.
    """
    reason = why_not_writable(path) if os.path.basename(path) else "it does not end with the name of a file"
    if reason:
        return reason
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    import tempfile  # which few need

    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"no file can be made in {folder}: {error.strerror or error}"
    return ""


def unwritable(names: Iterable[str], cwd: str) -> tuple[str, ...]:
    """Return the files that cannot be written, each with the reason; relative ones are in ``cwd``."""
    reasons = {name: why_not_writable(os.path.join(cwd, name)) for name in names}
    return tuple(f"{name} cannot be written: {reason}" for name, reason in reasons.items() if reason)
