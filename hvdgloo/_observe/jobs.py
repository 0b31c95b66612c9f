"""Where running jobs can be seen: a file for each in the user's private folder, which ``hvdgloo-run top`` looks up."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import msgspec

from hvdgloo._net.codec import from_json, to_json
from hvdgloo._platform.files import PRIVATE, create
from hvdgloo._platform.runtime import remove_stale
from hvdgloo.errors import ConfigError

_ENDING = ".job"
_OF_ID = 12  # digits; a socket's path must be short


class JobFile(msgspec.Struct, frozen=True):
    """A running job.

    Attributes:
        id: of the job, without meaning.
        pid: of its launcher.
        command: as the user typed it but for secrets.
        started: in seconds since 1970.
        unix: path of the Unix socket at which it can be seen.
        token: that has to be shown there: the status token, which reads.
        address: of its page, without a token; empty if it has none.
        control: the token that may have steps traced, too; empty if nobody may.
    """

    id: str
    pid: int
    command: str
    started: float
    unix: str
    token: str
    address: str = ""
    control: str = ""


def socket_path(folder: str, id: str) -> str:
    """Where the job with this id is to listen."""
    return os.path.join(folder, f"{id[:_OF_ID]}.sock")


@contextmanager
def published(job: JobFile, folder: str) -> Iterator[None]:
    """Lets the job be found in ``folder``, which must be the user's alone.

    The file is locked while this process lives, so that one that was left behind is known for what it is, even where
    process ids mean something else (containers that share the folder). What others have left behind is removed.

    Raises:
        ConfigError: the file cannot be written.
    """
    jobs(folder)
    path = os.path.join(folder, f"{job.id[:_OF_ID]}{_ENDING}")
    new = f"{path}.new"  # so that nobody reads half a file
    try:
        with suppress(FileNotFoundError):
            os.unlink(new)
        descriptor = create(new, PRIVATE)
    except OSError as error:
        raise _unwritable(path, error) from None
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        try:
            # Not a POSIX lock: those are gone as soon as anything in this process opens and closes the file.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(to_json(job))
            os.replace(new, path)
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(path)


def jobs(folder: str) -> list[JobFile]:
    """The running jobs that have been published, the last one that was started first.

    What launchers and agents have left behind that were killed is removed. Nobody is woken for that.
    """
    remove_stale(folder)
    found = []
    for name in _names(folder):
        path = os.path.join(folder, name)
        try:
            with open(path, "rb") as file:
                job = from_json(file.read(), JobFile)
                over = _is_free(file)
        except (OSError, ValueError):
            continue  # it has just ended, or is of another version
        if over:
            for left in (path, job.unix):
                with suppress(OSError):
                    os.unlink(left)
        else:
            found.append(job)
    return sorted(found, key=lambda job: job.started, reverse=True)


def _is_free(file: BinaryIO) -> bool:
    """Whether no launcher has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two who look do not take each other for one
    except BlockingIOError:
        return False
    return True


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror or error}")


def _names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(_ENDING)]
    except FileNotFoundError:
        return []
