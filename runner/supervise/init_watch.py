"""Workers that wait in ``hvd.init()`` for others: the missing ranks, their processes, and the remedy.

The rendezvous knows which workers have called ``hvd.init()``; the launcher knows which processes it has started and
which have ended. Only both together distinguish a slow worker from one that has ended and never will call it.

Pure, except for ``look``, which asks the rendezvous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdgloo.runner.console.progress import Arriving, Backoff, first_report, seconds
from hvdgloo.runner.job.outcome import Failure

_NAMED = 16
_LOOK_AGAIN = 1.0  # seconds; only while a worker has ended that may not have called hvd.init()


@dataclass(frozen=True)
class Arrivals:
    """The rendezvous's knowledge of a start.

    Attributes:
        arrived: number of workers that have called ``hvd.init()``.
        missing: the ranks that have not.
        failure: the reason if the start has failed.
    """

    arrived: int = 0
    missing: Sequence[int] = ()
    failure: str = ""

    @property
    def waited_for(self) -> Sequence[int]:
        """Ranks that others wait for; none in a job that does not use ``hvd.init()`` at all."""
        return self.missing if self.arrived else ()


class InitWatch:
    """A watch over the workers' start.

    Args:
        look: asks the rendezvous.
        hosts: rank to host name.
        timeout: the start timeout, in seconds.
        verbose: report sooner.
    """

    def __init__(
        self,
        look: Callable[[], Arrivals],
        hosts: Mapping[int, str],
        *,
        timeout: float,
        verbose: bool = False,
    ) -> None:
        self._look = look
        self._hosts = hosts
        self._timeout = timeout
        self._first = first_report(verbose)
        self._arrivals = Arrivals()
        self._pids: dict[int, int] = {}
        self._gone: set[int] = set()
        self._any_ended = False
        self._since: float | None = None
        self._backoff: Backoff | None = None
        self.next = -math.inf
        """Time of the next ``report``; infinity once all workers have arrived."""

    def spawned(self, rank: int, pid: int) -> None:
        """Record that a worker was started as this process of its host."""
        self._pids[rank] = pid

    def ended(self, rank: int, status: int) -> None:
        """Record a worker's end. A failure speaks for itself; a worker that succeeded may be missed by others."""
        self._any_ended = True
        if status == 0 and self.next < math.inf:
            self._gone.add(rank)
            self.next = -math.inf
        self._see()

    def arriving(self) -> Arriving | None:
        """Return the number of workers that have started and that have called ``hvd.init()``; None once all have, or a
        worker has ended."""
        self._see()
        if self.next == math.inf or self._any_ended:
            return None
        return Arriving(len(self._hosts), len(self._pids), self._arrivals.arrived)

    def report(self, now: float) -> str:
        """Return a line for the log, if one is due."""
        if now < self.next:
            return ""
        self._see()
        if self.next < math.inf:
            self.next = now + self._pause()
        missing = self._arrivals.waited_for
        if not missing:
            return ""
        if self._backoff is None or self._since is None:
            self._since, self._backoff = now, Backoff(now, self._first)
        if not self._backoff.due(now):
            return ""
        return (
            f"hvd.init() has waited {seconds(now - self._since)} for {self._describe(missing)}, "
            f"which {'has' if len(missing) == 1 else 'have'} not called it yet "
            "(py-spy dump --pid PROCESS shows what a process does)"
        )

    def verdict(self) -> Failure | None:
        """Return the failure that makes this start hopeless, if any: the start timeout, or a worker that has ended.

        The failures of the waiting workers are then consequences of it.
        """
        arrivals = self._arrivals
        gone = next((rank for rank in arrivals.waited_for if rank in self._gone), None)
        if gone is not None:
            reason = f"ended without calling hvd.init(), in which {_ranks(arrivals.arrived)} waited for it"
            return Failure(gone, self._hosts[gone], 1, reason)
        if arrivals.failure and arrivals.waited_for:
            return self._too_late(arrivals)
        return None

    def _too_late(self, arrivals: Arrivals) -> Failure:
        first, *others = arrivals.waited_for
        reason = f"had not called hvd.init() within {self._timeout:g} s of the last rank that did (--start-timeout)"
        if others:
            reason += f", nor had {self._describe(others)}"
        return Failure(first, self._hosts[first], 1, reason)

    def _pause(self) -> float:
        return min(_LOOK_AGAIN, self._first) if self._gone else self._first

    def _see(self) -> None:
        if self.next == math.inf:
            return
        self._arrivals = self._look()
        if self._arrivals.arrived and not self._arrivals.missing:
            self.next = math.inf

    def _describe(self, ranks: Sequence[int]) -> str:
        named = ", ".join(f"{rank} ({self._place(rank)})" for rank in ranks[:_NAMED])
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"

    def _place(self, rank: int) -> str:
        pid = f", process {self._pids[rank]}" if rank in self._pids else ", not started yet"
        return f"{self._hosts.get(rank, '?')}{pid}"


def _ranks(number: int) -> str:
    return f"{number} other rank{'s' if number != 1 else ''}"
