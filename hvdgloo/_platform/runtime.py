"""This user's private directory for running jobs: sockets, and files that tell where a job can be observed."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping

from hvdgloo.errors import ConfigError

LONGEST_SOCKET = 103
"""Bytes that the path of a Unix socket may have, on the least generous system."""

ROOM = 32
"""Bytes of that which are left for names in the directory."""

SHORT = "/tmp"
"""The directory for temporary files where the usual one's name is too long."""

AGENT_SOCKET = "agent"
"""The socket in an agent's directory by which it is known to live."""

_NAME = "hvdgloo"
_OF_JOB = 12  # digits of its id; a socket's path must be short
_STALE_SECONDS = 60.0  # after which what has no socket yet, or is not published yet, will not be
_OF_AGENT = re.compile(r"[0-9a-f]+\.[0-9]+")
_OF_LAUNCHER = re.compile(r"([0-9a-f]+)\.sock")
_UNFINISHED = re.compile(r"[0-9a-f]+\.job\.new")


def runtime_folder(environ: Mapping[str, str]) -> str:
    """Return the directory. It is made if it does not exist yet, and only this user can look into it.

    It is ``hvdgloo`` in XDG_RUNTIME_DIR, where a login has one, and otherwise ``hvdgloo-<user id>`` in the directory
    for temporary files.

    Args:
        environ: this process's.

    Raises:
        ConfigError: there is no such place; the text says why. Another user may have taken the name in a directory that
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
        reason = reason or f"{path} is not a directory that this user alone may enter"
    raise ConfigError(f"there is no private directory for sockets: {reason}")


def agent_folder(agent_id: str, environ: Mapping[str, str]) -> str:
    """Return the directory for the sockets of an agent and of the workers that it has started. It is not made.

    Args:
        agent_id: the job's id, and the agent's number after a full stop.
        environ: this process's.

    Raises:
        ConfigError: as ``runtime_folder`` does.
    """
    job, _, number = agent_id.rpartition(".")
    return os.path.join(runtime_folder(environ), f"{job[:_OF_JOB]}.{number}")


def remove_stale(folder: str) -> None:
    """Remove from this user's directory what processes have left there that were killed, of agents and of launchers.

    A socket at which no process listens any more tells of it, wherever its process has run: containers may share the
    directory, and have process ids of their own. What has no socket has to be old. No process is connected to, so none
    is woken.
    """
    try:
        names = set(os.listdir(folder))
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        if _OF_AGENT.fullmatch(name):
            if _is_deserted(os.path.join(path, AGENT_SOCKET), folder=path):
                import shutil  # which most jobs need not import for this

                shutil.rmtree(path, ignore_errors=True)
        elif (of_launcher := _OF_LAUNCHER.fullmatch(name)) is not None:
            if f"{of_launcher[1]}.job" not in names and _is_deserted(path):
                _unlink(path)
        elif _UNFINISHED.fullmatch(name) and _is_old(path):
            _unlink(path)


def _is_deserted(path: str, folder: str = "") -> bool:
    """Tell whether no process listens at a Unix socket any more; without a socket, whether its ``folder`` is old."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)  # a listener for streams refuses with another error, and hears nothing of it
        except ConnectionRefusedError:
            return True
        except FileNotFoundError:
            return bool(folder) and _is_old(folder)
        except OSError:
            pass
        return False


def _is_old(path: str) -> bool:
    try:
        return time.time() - os.lstat(path).st_mtime > _STALE_SECONDS
    except OSError:
        return False  # another process has removed it


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _is_private(path: str) -> bool:
    """Tell whether it is a directory, and not a link to one, that belongs to this user and is closed to others."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
