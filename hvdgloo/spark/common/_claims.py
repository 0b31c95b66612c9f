"""Claims on a store's data sets: a small file next to a data set marks it as in use.

Programs that train on one store at the same time do not know of each other, and all of them number their data sets from
0. These files let each program choose one that no other is using.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable

import psutil

from hvdgloo.errors import StoreError
from hvdgloo.rendezvous import host_identity
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.spark.common._files import Files

_FORGOTTEN_S = 7 * 24 * 3600.0
"""Seconds after which a claim expires, since a process killed on another machine could not withdraw it."""

Release = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Claim:
    """Content of the file.

    Attributes:
        host: identity of the machine or container within which process ids are unique.
        name: the machine's name, for messages.
        pid, started: the process's id, and its start in seconds of Unix time.
        made: time at which the claim was made.
    """

    host: str
    name: str
    pid: int
    started: float
    made: float

    @property
    def counts(self) -> bool:
        """True if the claim's process may still be using the data set."""
        if self.host != host_identity():
            return time.time() - self.made < _FORGOTTEN_S
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.name}"


def claim(files: Files, url: str) -> Release | Claim:
    """Claim the data set at ``url`` for this process.

    Returns:
        a function that withdraws the claim; or the claim of another process, made before or at the same moment.

    Raises:
        StoreError: the store cannot be written.
    """
    mine = f"{url}.in-use-{secrets.token_hex(8)}"
    process = psutil.Process()
    own = Claim(host_identity(), host_name(), process.pid, process.create_time(), time.time())
    files.write(mine, json.dumps(dataclasses.asdict(own)).encode())

    def release() -> None:
        with contextlib.suppress(StoreError):
            files.delete(mine)

    # A claim written before this check is seen here, and its process withdraws if it checks later than us. So two never
    # succeed, although both may withdraw; a process that withdrew takes another data set.
    for other, whose in _others(files, url, mine):
        if whose is None or not whose.counts:
            with contextlib.suppress(StoreError):
                files.delete(other)
        else:
            release()
            return whose
    return release


def _others(files: Files, url: str, mine: str) -> list[tuple[str, Claim | None]]:
    """Return the URLs of all other claims on ``url``, and their contents; None if unreadable."""
    folder, _, name = url.rpartition("/")
    found = [f"{folder}/{each}" for each in files.names(folder) if each.startswith(f"{name}.in-use-")]
    return [(each, _read(files, each)) for each in found if each != mine]


def _read(files: Files, url: str) -> Claim | None:
    try:
        return Claim(**json.loads(files.read(url)))
    except (StoreError, TypeError, ValueError):
        return None  # withdrawn meanwhile, or not written by us
