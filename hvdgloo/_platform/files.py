"""Files that are made or written: never through a link that another user has put in the way.

In a directory that others may write to, such as a shared one without the sticky bit, any name may turn out to be
another user's link to a file of this user's. So all of the library's files are opened here, by one of three functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import IO

PRIVATE = 0o600
"""The mode of files that this user alone may read."""

PUBLIC = 0o666
"""The mode of files that others may read, as far as the process's umask lets them."""

_LINKS = 40  # that lead to one another, as many as Linux follows


def create(path: str, mode: int = PUBLIC) -> int:
    """Return the descriptor of a new file, for reading and writing.

    Raises:
        FileExistsError: there is a file of that name, or a link, whatever it leads to.
        OSError: it cannot be made.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextlib.contextmanager
def replacing(path: str, mode: int = PUBLIC) -> Iterator[IO[bytes]]:
    """Yield a new file, which takes the place of what is at ``path`` at once when the block ends without an error.

    A link is replaced, and not what it leads to.

    Raises:
        OSError: it cannot be written; what was there before is then still whole.
    """
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name[:200]}.{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(create(part, mode), "w+b") as file:
            yield file
            file.flush()
            os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def overwrite(path: str, *, append: bool = False, private: bool = False) -> int:
    """Return the descriptor of a file that is written in place, so that a reader sees it grow.

    This user's own links and the system's (``/dev/stdout``) lead on; another user's is replaced by a file.

    Args:
        append: keep what is in it.
        private: it is for this user alone: a file of another user's is replaced, too.

    Raises:
        OSError: it cannot be opened.
    """
    for _ in range(_LINKS):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_APPEND if append else 0))
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                return create(path, PRIVATE if private else PUBLIC)
            continue
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):  # Linux and macOS; FreeBSD
                raise
            target = _own_target(path)
            if target is None:
                _unlink(path)
            else:
                path = os.path.join(os.path.dirname(path), target)
            continue
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            if private and not append and found.st_uid != os.geteuid():
                os.close(descriptor)
                _unlink(path)
                continue
            if private and found.st_uid == os.geteuid():
                os.fchmod(descriptor, PRIVATE)
            if not append:
                os.ftruncate(descriptor, 0)
        return descriptor
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def check_link(path: str) -> None:
    """Accept a directory, or a link of this user's or the system's to one.

    Raises:
        PermissionError: it is another user's link, which may lead anywhere.
    """
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"it is a link that belongs to another user (id {found.st_uid})", path)


def _own_target(path: str) -> str | None:
    """Read the target of a link of this user's or root's; None if it is another user's."""
    if not hasattr(os, "O_PATH"):
        return os.readlink(path) if os.lstat(path).st_uid in (0, os.geteuid()) else None
    # By a descriptor of the link itself, which no process can exchange between the two questions.
    link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.readlink("", dir_fd=link) if os.fstat(link).st_uid in (0, os.geteuid()) else None
    finally:
        os.close(link)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
