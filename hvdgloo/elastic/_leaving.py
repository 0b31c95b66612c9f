"""SIGTERM to a worker that no launcher watches: it leaves its job at the next commit, and no step is lost.

That is how a pod is deleted or preempted, how a container is stopped, and what Slurm's ``--signal`` can send. A
launcher's workers are told by their agent instead, which knows what else is to end on their host.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from hvdgloo.errors import RendezvousError

__all__ = ["leaving_on_sigterm"]

logger = logging.getLogger(__name__)

_PAUSE = 1.0
"""Seconds until the server is told again, if it could not be reached."""


class Leaver(Protocol):
    """A worker's membership in an elastic job.

    Attributes:
        launched: a launcher has started this worker, and sees how it ends.
    """

    launched: bool

    def leaving(self) -> None:
        """Say that this worker wants to leave at the next commit.

        Raises:
            RendezvousError: the server cannot be reached.
        """


@contextmanager
def leaving_on_sigterm(job: Leaver) -> Iterator[None]:
    """While this is entered, the first SIGTERM makes this worker leave the job; the second one ends it at once.

    It changes nothing where a launcher has started the worker, where the program deals with SIGTERM in its own way, or
    on another thread than the main one, which alone gets signals.
    """
    mine = threading.current_thread() is threading.main_thread()
    if job.launched or not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(_number: int, _frame: Any) -> None:
        # The kernel does not let a signal end the first process of a container by itself.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if os.getpid() != 1 else _end)
        # The main thread goes on training, and may hold locks of the client and of the log.
        threading.Thread(target=_leave, args=(job,), name="hvdgloo-leaving", daemon=True).start()

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (leave, _end):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(_number: int, _frame: Any) -> None:
    os._exit(128 + signal.SIGTERM)


def _leave(job: Leaver) -> None:
    logger.warning(
        "this worker was asked to end (SIGTERM), and leaves the job at its next commit; another SIGTERM ends it at once"
    )
    while True:
        try:
            job.leaving()
        except RendezvousError as error:
            logger.debug("the job was not told yet that this worker leaves: %s", error)
            time.sleep(_PAUSE)
        else:
            return
