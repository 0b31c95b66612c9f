"""Output of ``hvdgloo-rendezvous`` while workers arrive and leave, and the reasons for it to end by itself."""

from __future__ import annotations

import math
import os
import queue
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hvdgloo.rendezvous._elastic.events import Action, Changed, Ended, Tell
from hvdgloo.rendezvous._elastic.history import describe_change, describe_epoch, describe_survivors, ranks_by_host
from hvdgloo.rendezvous._server.server import RendezvousServer
from hvdgloo.rendezvous._server.service import Refused

if TYPE_CHECKING:  # a server without a page does not need it
    from hvdgloo.rendezvous._job_observer import JobObserver

PROGRAM = "hvdgloo-rendezvous"
_LOOK_AGAIN = 0.5  # seconds; only --once needs to poll, for connections that have ended
_GONE_TIME = 1.0  # seconds without any worker after which --once ends: between shutdown() and init() there is none
_BETWEEN_STRANGERS = 30.0  # seconds between two lines about refused requests
_BETWEEN_LINES = 0.2  # seconds; a thousand workers that register together make a few lines, not a thousand


def watch_fixed(server: RendezvousServer, once: bool, observer: JobObserver | None = None) -> int:
    """Report on a fixed number of workers, until there is a reason to end; return the exit status.

    Args:
        once: end when all workers have arrived and left, or did not arrive.
        observer: the job's observer, which is told the same.
    """
    last, failure, deserted = "", "", _Deserted()
    for stamp in _moments(server, once):
        if observer is not None:
            observer.look(server.status())
        if server.last_failure != failure:
            failure = server.last_failure
            complain(failure)
            if observer is not None:
                observer.complain(failure)
            if once:
                return 1
        epoch = server.status()["epochs"][-1]
        text = _describe(epoch)
        if text != last and epoch["state"] != "failed":
            last = text
            say(f"{stamp} {text}")
        gone = epoch["state"] == "complete" and not server.status()["store"]["connected_clients"]
        if once and deserted.for_good(gone, time.monotonic()):
            say("no worker is connected any more")
            break
    return 0


def watch_elastic(
    server: RendezvousServer, actions: queue.SimpleQueue[Action], once: bool, observer: JobObserver | None = None
) -> int:
    """Report on the workers of an elastic job, until there is a reason to end; return the exit status.

    Args:
        actions: the actions of its ``ElasticEpochs``; those that are not for people are skipped.
        once, observer: as for ``watch_fixed``.
    """
    last, status, ended = "", 0, False
    before: Changed | None = None
    told: set[str] = set()  # since the last change
    for stamp in _moments(server, once):
        if observer is not None:
            observer.look(server.status())
        while not actions.empty():
            action = actions.get_nowait()
            if observer is not None and isinstance(action, Tell):
                observer.tell(action.text)
                if action.left_out is not None:
                    observer.left_out(action.left_out[1])
            match action:
                case Tell(text) if text != last:
                    told.add(text)
                    say(f"{stamp} {text}")
                case Changed():
                    if before is not None:
                        describe = describe_survivors if action.why in told else describe_change
                        say(f"{stamp} {describe(action, before)}")
                        told.clear()
                    say(f"{stamp} {describe_epoch(action.assignment)}")
                    ended, last, before = False, "", action
                case Ended(text, failure):
                    ended, status, before = True, int(failure is not None), None
                    if failure is None:
                        say(f"{stamp} {text}")
                    else:
                        complain(f"the job has failed: {text}")
        job = server.status()["elastic"]
        waiting = f"waiting for {job['waiting_for']}"
        if job["phase"] == "waiting" and waiting != last:
            last = waiting
            say(f"{stamp} {waiting}")
        if once and ended and not server.status()["store"]["connected_clients"]:
            say("no worker is connected any more")
            break
    return status


class _Deserted:
    """A detector of whether a server's workers have left for good, or only until they call init() again."""

    def __init__(self) -> None:
        self._since: float | None = None

    def for_good(self, gone: bool, now: float) -> bool:
        """Return whether there have been no workers for long; ``gone`` tells whether there are none now."""
        if not gone:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= _GONE_TIME


def _moments(server: RendezvousServer, once: bool) -> Iterator[str]:
    """Yield the time, as printed, whenever something has happened; refused requests are reported here."""
    started, seen = time.monotonic(), -1
    strangers = _Strangers()
    while True:
        patience = _LOOK_AGAIN if once else 3600.0
        seen = server.wait_for_change(seen, timeout=min(patience, strangers.due_in(time.monotonic())))
        time.sleep(_BETWEEN_LINES)
        stranger = strangers.line(server.refused, time.monotonic())
        if stranger:
            complain(stranger)
        yield f"[{time.monotonic() - started:7.1f} s]"


class _Strangers:
    """A reporter of refused requests: of the first at once, of further ones at intervals, as there may be many."""

    def __init__(self) -> None:
        self._told = 0
        self._waiting = False
        self._next = -math.inf

    def line(self, refused: Refused, now: float) -> str:
        """Return the line to print now, if any."""
        new = refused.count - self._told
        self._waiting = new > 0 and now < self._next
        if not new or self._waiting:
            return ""
        self._told, self._next = refused.count, now + _BETWEEN_STRANGERS
        requests = "a request" if new == 1 else f"{new} requests"
        last = "" if new == 1 else ", the last"
        return f"refused {requests}{last} from {refused.address}: {refused.reason}"

    def due_in(self, now: float) -> float:
        """Return the seconds until the next line, if nothing happens."""
        return max(0.0, self._next - now) if self._waiting else math.inf


def _describe(epoch: dict[str, Any]) -> str:
    if epoch["state"] != "complete":
        return str(epoch["summary"])
    placed = ranks_by_host((worker["host"], worker["rank"]) for worker in epoch["workers"])
    number = epoch["expected"]
    return f"{'the only worker is' if number == 1 else f'all {number} workers are'} in ({placed})"


def complain(line: str) -> None:
    """Print a line on standard error, with the program's name."""
    sys.stderr.write(f"{PROGRAM}: {line}\n")
    sys.stderr.flush()


def say(line: str) -> None:
    """Print a line on standard output."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output is gone, but workers still need the server. At exit Python would flush, and complain.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
