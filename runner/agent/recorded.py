"""Errors that workers record before they end, in the format of ``torch.distributed.elastic.multiprocessing.errors``.

That module's decorator ``record`` writes the error to the file that TORCHELASTIC_ERROR_FILE names. Each worker has its
own file, in a directory that only this user can enter.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_MOST = 1024 * 1024  # bytes of a file
_LONGEST = 400  # characters of an error


def folder_of(agent_id: str) -> str:
    """Return the directory in which an agent's workers record their errors."""
    return os.path.join(tempfile.gettempdir(), f"hvdgloo-errors-{agent_id}")


class RecordedErrors:
    """The errors that one agent's workers have recorded."""

    def __init__(self) -> None:
        self._folder = ""

    def attend(self, agent_id: str) -> None:
        """Create the directory, so that workers can record errors from now on."""
        folder = folder_of(agent_id)
        with contextlib.suppress(OSError):  # a full disk, say: then nothing is recorded
            os.mkdir(folder, 0o700)
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
        """Remove all files."""
        if self._folder:
            remove_recorded(self._folder)

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"{number}.json")


def remove_recorded(folder: str) -> None:
    """Remove a directory and its files, if it exists."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
