"""This user's private folder for what belongs to running jobs: sockets, and files that say where a job can be seen."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping

from hvdgloo.errors import ConfigError

LONGEST_SOCKET = 103
"""Bytes that the path of a Unix socket may have, on the least generous system."""

ROOM = 32
"""Bytes of that which are left for names in the folder."""

SHORT = "/tmp"
"""The folder for temporary files where the usual one's name is too long."""

_NAME = "hvdgloo"


def runtime_folder(environ: Mapping[str, str]) -> str:
    """The folder. It is made if it is not there yet, and nobody but this user can look into it.

    It is ``hvdgloo`` in XDG_RUNTIME_DIR, where a login has one, and otherwise ``hvdgloo-<user id>`` in the folder for
    temporary files.

    Args:
        environ: this process's.

    Raises:
        ConfigError: there is no such place; the text says why. Somebody else may have taken the name in a folder that
            all can write to.
    """
    user = os.geteuid()
    own = environ.get("XDG_RUNTIME_DIR", "")
    paths = [os.path.join(own, _NAME)] if os.path.isabs(own) and _is_private(own) else []
    paths += [os.path.join(folder, f"{_NAME}-{user}") for folder in dict.fromkeys((tempfile.gettempdir(), SHORT))]
    reason = ""
    for path in paths:
        if len(os.fsencode(path)) > LONGEST_SOCKET - ROOM:
            reason = reason or f"{path} is too long for a socket's path"
            continue
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            reason = reason or f"{path} cannot be made: {error.strerror}"
            continue
        if _is_private(path):
            return path
        reason = reason or f"{path} is not a folder that this user alone may enter"
    raise ConfigError(f"there is no private folder for sockets: {reason}")


def agent_folder(agent_id: str, environ: Mapping[str, str]) -> str:
    """Where an agent, and the workers that it has started, have their sockets. It is not made.

    Args:
        agent_id: the job's id, and the agent's number after a full stop.
        environ: this process's.

    Raises:
        ConfigError: as ``runtime_folder`` does.
    """
    job, _, number = agent_id.rpartition(".")
    return os.path.join(runtime_folder(environ), f"{job[:12]}.{number}")


def _is_private(path: str) -> bool:
    """Whether it is a folder, and not a link to one, that belongs to this user and is closed to others."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
