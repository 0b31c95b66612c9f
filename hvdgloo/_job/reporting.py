"""The thread that reports on a rank. It costs a job's start nothing: all else is imported once the job is under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdgloo._net.event_loop import WakeUp

if TYPE_CHECKING:
    from hvdgloo._observe.reporter import Reporter

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 2.0

_FAILING_SECONDS = 0.2
"""Seconds that a failing rank has for its last report: others wait for its failure, and the server may have failed."""


class Reporting:
    """The reports of one rank, from now on.

    Args:
        make: returns the object that does the work, given what ends its waits; called on the thread.
        delay: seconds until it is.
        looked_at: returns whether an observer looks; called if the rank's part of the job ends before that.
        at_once: True if the receiver takes everything at once, or not at all; False if it has to answer.
    """

    def __init__(
        self, make: Callable[[WakeUp], Reporter], delay: float, looked_at: Callable[[], bool], *, at_once: bool = True
    ) -> None:
        self._make, self._delay, self._looked_at, self._at_once = make, delay, looked_at, at_once
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._reporter: Reporter | None = None
        self._wake_up = WakeUp()  # already here, so that a job has as many descriptors at its start as later
        self._thread = threading.Thread(target=self._run, name="hvdgloo-reporter", daemon=True)
        self._thread.start()

    def close(self, *, failing: bool = False) -> None:
        """Say a last time how things are, and end the thread; if that takes long, it goes on by itself.

        Args:
            failing: the rank's part of the job ends with an error.
        """
        with self._lock:
            self._closed.set()
            if self._reporter is not None:
                self._reporter.end()
        self._thread.join(_FAILING_SECONDS if failing and not self._at_once else _JOIN_SECONDS)

    def _run(self) -> None:
        try:
            if self._closed.wait(self._delay) and not self._looked_at():
                return
            reporter = self._make(self._wake_up)
            with self._lock:
                self._reporter = reporter
                if self._closed.is_set():
                    reporter.end()
            reporter.run()
        except Exception:
            logger.exception("this rank is not reported on any more")
        finally:
            self._wake_up.close()
