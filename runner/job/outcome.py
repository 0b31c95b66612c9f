"""The outcome of a job: values that the supervisor fills in, and that the command line and ``run`` put into words."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

_ECHO = re.compile(r"hvdgloo\.errors\.(?:JobShutdownError|PeerLostError): .*?\brank (\d+) \(host ")

_LOST = re.compile(
    r"hvdgloo\.errors\.PeerLostError: .*?\brank \d+ \(host .*?\) (was lost: .*?)(?:; this rank was in .*)?$"
)

_CONNECTION_LOST = 255  # ssh's status for any failure of its own
_LAST_SIGNAL = 64


@dataclass(frozen=True)
class Failure:
    """The failure of the first worker, or the loss of an agent.

    Attributes:
        rank: None for an agent.
        host: the host's name.
        status: exit status, or minus the signal.
        reason: in words: ``exited with status 3``, ``was killed by signal 9 (SIGKILL)``.
    """

    rank: int | None
    host: str
    status: int
    reason: str

    @property
    def exit_code(self) -> int:
        """Exit status as a shell reports it: 128+N for signal N."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def signal(self) -> int | None:
        return -self.status if self.status < 0 else None


@dataclass
class JobOutcome:
    """The outcome of a job.

    Attributes:
        first: the failure that stopped it.
        interrupted: the signal that stopped it.
        statuses: exit status of each worker that was started, or minus the signal; None if its agent was lost.
        grace: seconds that the workers had to end after the signal that asked them to.
        overdue: workers that had not ended by then, and were killed.
    """

    first: Failure | None = None
    interrupted: int | None = None
    statuses: dict[int, int | None] = field(default_factory=dict)
    grace: float = 0.0
    overdue: list[int] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Exit status of the job: 0 only if every worker exited with 0."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        return self.first.exit_code if self.first is not None else 0


_WAS_IN = re.compile(r"; this rank was in (\S+, called at .+)$")

_LEFT = (
    "ended with status 0 while others were still in collective operations{}, which therefore failed; give all ranks "
    "the same number of steps, or use hvd.join()"
)


def named_culprit(cause: str) -> int | None:
    """Return the rank that a worker's error names as the reason for its own failure, if any."""
    named = _ECHO.match(cause)
    return int(named[1]) if named is not None else None


def _said_of_it(cause: str) -> str:
    """Return how a rank ended, according to the error of a rank that waited for it."""
    said = _LOST.search(cause)
    return said[1] if said is not None else "failed"


def blame(outcome: JobOutcome, hosts: Mapping[int, str], cause: Callable[[int], str]) -> Failure | None:
    """Return the failure to report: the first one, unless it only echoes another one.

    A worker that ends with an uncaught exception tells its peers on the way out, and they may exit before it does.
    Their errors then name it: ``JobShutdownError: rank 2 (host ...) ...``.

    Args:
        hosts: rank to host name.
        cause: returns the line with a rank's error; empty if the rank printed none.
    """
    found = outcome.first
    seen: set[int] = set()
    while found is not None and found.rank is not None and found.rank not in seen:
        seen.add(found.rank)
        named = named_culprit(cause(found.rank))
        rank = found.rank if named is None else named
        status = outcome.statuses.get(rank)
        if rank != found.rank and status == 0:
            # No worker failed on its own: one left while the others were still at work.
            was_in = _WAS_IN.search(cause(found.rank))
            which = "" if was_in is None else f" (rank {found.rank} in {was_in[1]})"
            return Failure(rank, hosts[rank], found.status, _LEFT.format(which))
        if rank == found.rank or not status:
            break
        # Having printed its error, the worker may have been terminated by us before it could exit on its own.
        ended_by_us = status == -signal.SIGTERM
        reason = _said_of_it(cause(found.rank)) if ended_by_us else describe_status(status)
        found = Failure(rank, hosts[rank], found.status if ended_by_us else status, reason)
    return found


def as_shown(failure: Failure, outcome: JobOutcome, hosts: Mapping[int, str], shown: Callable[[int], int]) -> Failure:
    """Return the failure of the rank whose traceback the user has seen, where several ranks failed alike.

    Args:
        hosts: rank to host name.
        shown: returns the rank whose traceback was shown in place of a rank's equal one.
    """
    if failure.rank is None:
        return failure
    rank = shown(failure.rank)
    alike = rank in hosts and outcome.statuses.get(rank) == failure.status
    return replace(failure, rank=rank, host=hosts[rank]) if alike else failure


def describe_loss(status: int | None, said_why: bool) -> str:
    """Describe what happened to an agent, from the exit status of the command that leads to it."""
    if status is None:
        return "closed its stream"
    if status == _CONNECTION_LOST:
        # ssh prints the reason, unless the command on the other host was killed.
        return "lost its connection" if said_why else "was killed, or lost its connection"
    if status < 0:
        return f"or the command that leads to it {describe_status(status)}"
    if 128 < status <= 128 + _LAST_SIGNAL:
        return describe_status(128 - status)
    return describe_status(status)


def describe_status(status: int) -> str:
    """Describe a status: ``exited with status 3``, ``was killed by signal 9 (SIGKILL)``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-status}{name}"
