"""Who uses a data set of a store: a small file beside it says so for as long as it lasts.

Programs that train on one store at the same time do not know of each other, and all of them number their data sets from
0. By these files each takes one that no other is using.
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
"""Seconds after which a claim counts no more: what was killed on another machine could not take its own back."""

Release = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is in the file.

    Attributes:
        host: identity of the machine, as far as process ids are its.
        name: of the machine, for people.
        pid, started: of the process, and when that began, in seconds of the Unix time.
        made: when the claim was made.
    """

    host: str
    name: str
    pid: int
    started: float
    made: float

    @property
    def counts(self) -> bool:
        """Whether its process may still be using the data set."""
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
        a function that takes the claim back; or the claim of another user, who has come before or at the same moment.

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

    # Whoever has written before this look is seen, and gives way if he looks later: there are never two, if at times
    # none, and who has given way takes another data set.
    for other, whose in _others(files, url, mine):
        if whose is None or not whose.counts:
            with contextlib.suppress(StoreError):
                files.delete(other)
        else:
            release()
            return whose
    return release


def _others(files: Files, url: str, mine: str) -> list[tuple[str, Claim | None]]:
    """URLs of all other claims of ``url``, and what they say; None if that is nothing."""
    folder, _, name = url.rpartition("/")
    found = [f"{folder}/{each}" for each in files.names(folder) if each.startswith(f"{name}.in-use-")]
    return [(each, _read(files, each)) for each in found if each != mine]


def _read(files: Files, url: str) -> Claim | None:
    try:
        return Claim(**json.loads(files.read(url)))
    except (StoreError, TypeError, ValueError):
        return None  # taken back meanwhile, or nothing that we have written
