"""A job of ranks as threads for ``hvdgloo.elastic``'s loop: epochs are worlds, and a script says who is in which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hvdgloo.rendezvous import Placement
from hvdgloo.topology import Topology


def placement(
    epoch: int = 0,
    rank: int = 0,
    size: int = 1,
    *,
    root: int = 0,
    everyone: bool = False,
    fresh: bool | None = None,
    pid: int = 100,
) -> Placement:
    """A place in an epoch whose members are processes of one host, numbered from ``pid``."""
    topology = Topology.local(size, pid=pid)
    is_first = epoch == 0 if fresh is None else fresh
    new = frozenset(range(size)) if is_first else frozenset[int]()
    return Placement(rank, topology, root, everyone, new)


@dataclass
class Again:
    """A worker's request for its next epoch."""

    serial: int
    digest: str
    error: BaseException | None


@dataclass
class FakeJob:
    """A worker's membership that follows a script.

    Attributes:
        script: what ``enter`` and then each ``again`` returns, or raises.
        asked: what the worker said, each time.
        log: calls, in order.
        news: what ``update`` returns.
    """

    script: list[Placement | BaseException]
    asked: list[Again] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    news: tuple[int, int] = (0, 0)
    listener: Callable[[int], None] | None = None

    def enter(self) -> Placement:
        self.log.append("enter")
        return self._next()

    def again(self, serial: int, digest: str, error: BaseException | None) -> Placement:
        self.log.append("again")
        self.asked.append(Again(serial, digest, error))
        self.news = (self.news[0] + 1, 0)
        return self._next()

    def synced(self) -> None:
        self.log.append("synced")

    def finished(self) -> None:
        self.log.append("finished")

    def update(self) -> tuple[int, int]:
        return self.news

    def listen(self, listener: Callable[[int], None] | None) -> None:
        self.listener = listener

    def announce(self, flags: int) -> None:
        self.news = (self.news[0] + 1, flags)
        if flags and self.listener is not None:
            self.listener(flags)

    def _next(self) -> Placement:
        answer = self.script.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer
