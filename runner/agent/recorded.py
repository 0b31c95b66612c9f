"""Errors that workers record before they end, in the format of ``torch.distributed.elastic.multiprocessing.errors``.

That module's decorator ``record`` writes the error to the file that TORCHELASTIC_ERROR_FILE names. Each worker has its
own file, in a directory that only this user can enter. Its agent locks that directory: one without a lock was left by
an agent that was killed together with everything that would have cleaned up, and the next agent to end removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile

_PREFIX = "hvdgloo-recorded-"
_UNLOCKED = ".new"  # end of the name until the lock is held
_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_MOST = 1024 * 1024  # bytes of a file
_LONGEST = 400  # characters of an error


def folder_of(agent_id: str) -> str:
    """Return the directory in which an agent's workers record their errors."""
    return os.path.join(tempfile.gettempdir(), f"{_PREFIX}{agent_id}")


class RecordedErrors:
    """The errors that one agent's workers have recorded."""

    def __init__(self) -> None:
        self._folder = ""
        self._lock: int | None = None

    def attend(self, agent_id: str) -> None:
        """Create the directory, so that workers can record errors from now on."""
        folder = folder_of(agent_id)
        with contextlib.suppress(OSError):  # a full disk, say: then nothing is recorded
            os.mkdir(folder + _UNLOCKED, 0o700)
            self._lock = os.open(folder + _UNLOCKED, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            os.rename(folder + _UNLOCKED, folder)
            self._folder = folder

    def variables(self, number: int) -> dict[str, str]:
        """Return the variable that a worker must find in its environment."""
        return {_VARIABLE: self._path(number)} if self._folder else {}

    def error(self, number: int) -> str:
        """Return the error that a failed worker recorded, in one line; empty if there is none."""
        try:
            with open(self._path(number), encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST)
        except OSError:
            return ""
        import json  # which no agent needs whose workers record nothing

        try:
            message = json.loads(text)["message"]
            told = str(message["message"] if isinstance(message, dict) else message)
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""
        line = " ".join(told.split())[:_LONGEST]
        return "".join(letter if letter.isprintable() else "?" for letter in line)

    def close(self) -> None:
        """Remove all files, and those that other agents of this user could not remove."""
        if self._folder:
            remove_recorded(self._folder)
            remove_abandoned()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"{number}.json")


def remove_recorded(folder: str) -> None:
    """Remove a directory and its files, if it exists."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def remove_abandoned() -> None:
    """Remove this user's directories that no agent locks."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX) or entry.name.endswith(_UNLOCKED):
                continue
            with contextlib.suppress(OSError):  # it has just been removed, or is locked, or another user's
                lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(lock).st_uid == os.getuid():
                        remove_recorded(entry.path)
                finally:
                    os.close(lock)
