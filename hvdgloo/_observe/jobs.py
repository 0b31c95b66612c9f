"""Registry of running jobs: a file for each in the user's private directory, where ``hvdgloo-run top`` finds it."""

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
        id: id of the job, without meaning.
        pid: process id of its launcher.
        command: the command as the user typed it, without secrets.
        started: start of the job, in seconds since 1970.
        unix: path of the Unix socket at which the job can be observed.
        token: status token, which must be sent there and may only read.
        address: address of the job's page, without a token; empty if it has none.
        control: control token, which may also have steps traced; empty if that is not allowed.
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
    """Return the path at which the job with this id is to listen."""
    return os.path.join(folder, f"{id[:_OF_ID]}.sock")


@contextmanager
def published(job: JobFile, folder: str) -> Iterator[None]:
    """Let the job be found in the directory ``folder``, which must be the user's alone.

    The file is locked while this process lives, so that a stale one is recognised, even where process ids mean
    something else (containers that share the directory). Stale files of other jobs are removed.

    Raises:
        ConfigError: the file cannot be written.
    """
    jobs(folder)
    path = os.path.join(folder, f"{job.id[:_OF_ID]}{_ENDING}")
    new = f"{path}.new"  # so that no process reads half a file
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
    """List this user's running jobs, the newest first.

    Files of other users are passed over: the directory of this user may have been filled by root, or be shared by
    containers whose users differ. Files of launchers and agents that were killed are removed, which wakes no process.
    """
    remove_stale(folder)
    found = []
    for name in _names(folder):
        path = os.path.join(folder, name)
        try:
            with open(path, "rb", opener=_without_waiting) as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    continue
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


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)  # a named pipe would be waited for


def _is_free(file: BinaryIO) -> bool:
    """Return whether no launcher has locked the file."""
    try:
        fcntl.flock(
            file, fcntl.LOCK_SH | fcntl.LOCK_NB
        )  # shared, so that two readers do not take each other for a launcher
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
