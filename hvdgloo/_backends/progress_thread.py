"""A thread that carries out operations which have to wait in between, one after another.

A wait for Gloo's send or receive must not time out, since that closes all connections. So this thread waits without a
limit, and a caller that wants the result waits for the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from hvdgloo._backends.base import first_line
from hvdgloo.errors import BackendError, HvdglooError


class ProgressThread:
    """Owns the thread, which starts with the first operation.

    Args:
        name: of the thread.
        settle: called on the thread after an operation has failed; returns when nothing that it began touches any
            memory any more.
    """

    def __init__(self, name: str, settle: Callable[[], None]) -> None:
        self._name, self._settle = name, settle
        self._queue: queue.SimpleQueue[ProgressWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: ProgressWork | None = None
        self._failure: Exception | None = None

    def begin(self, what: str, body: Callable[[], None], keep: object = None) -> ProgressWork:
        """Let the thread call ``body`` when everything before it has ended.

        After one has failed, all others fail with the same error: ranks would be out of step.

        Args:
            what: it is, for messages.
            keep: what must live until it has ended.
        """
        work = self._last = ProgressWork(what, body, keep)
        self._queue.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return work

    def close(self) -> None:
        """End the thread, unless it is stuck in an operation that never ends."""
        if self._thread is not None:
            self._queue.put(None)
            if self._last is not None and self._last.has_ended:
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    work.body()
                except Exception as error:  # noqa: BLE001 - whatever it is, the waiting thread raises it
                    self._failure = work.fail(error)
                    self._settle()
            work.end(self._failure)


class ProgressWork:
    """The Work of an operation of a progress thread."""

    def __init__(self, what: str, body: Callable[[], None], keep: object) -> None:
        self.body = body
        self._what, self._keep = what, keep
        self._failure: Exception | None = None
        self._known = threading.Lock()  # a tenth of an Event's cost
        self._known.acquire()
        self._settled = threading.Event()
        self._told = False

    def completes_within(self, timeout: float) -> bool:
        """See ``Work``. A failure is raised as soon as it is known; then again when no memory is touched any more, and
        in between this returns False."""
        if not self._known.acquire(timeout=max(0.0, timeout)):
            return False
        self._known.release()
        if self._failure is None:
            return True
        if self._told and not self._settled.wait(max(0.0, timeout)):
            return False
        self._told = True
        raise self._failure.with_traceback(None)

    @property
    def has_ended(self) -> bool:
        """True when nothing of it is under way any more."""
        return self._settled.is_set()

    def fail(self, error: Exception) -> Exception:
        """Note why it has failed, before it has ended; returns the error that is raised for it."""
        if isinstance(error, HvdglooError):
            self._failure = error
        else:
            self._failure = BackendError(f"Gloo {self._what}: {first_line(error)}")
            self._failure.__cause__ = error
        self._known.release()
        return self._failure

    def end(self, failure: Exception | None) -> None:
        """It has ended, and everything that it began; ``failure`` is an earlier one's if it was never begun."""
        self._keep = None
        self._settled.set()
        if self._failure is None:
            self._failure = failure
            self._known.release()
