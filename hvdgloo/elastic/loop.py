"""``elastic.run``: a training function that goes on after its job has lost or gained workers.

One turn of the loop is one epoch of the job: the worker is placed in it, reset callbacks run, all members get the
newest state, and the function trains until it returns, a peer is lost, or hosts come or go. Whatever fails on the way,
in a callback or while the state is being sent, too, only leads to the next turn.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hvdgloo._collectives.agreement import highest
from hvdgloo._job import process
from hvdgloo._platform.spelling import followed_by
from hvdgloo.elastic._leaving import leaving_on_sigterm
from hvdgloo.elastic._values import digest
from hvdgloo.elastic.news import notification_manager
from hvdgloo.elastic.state import State, Updates
from hvdgloo.errors import (
    DismissedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
)

if TYPE_CHECKING:
    from hvdgloo.rendezvous import Placement

__all__ = ["run", "run_fn"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MOST_RESETS = 3
"""After so many resets of the same workers, with no commit in between, an error is taken for the program's own."""


class Job(Updates, Protocol):
    """A worker's membership in an elastic job."""

    def enter(self) -> Placement:
        """Register this worker, which called ``elastic.run``; returns once it is connected with an epoch's members.

        Raises:
            DismissedError: there is no place for it.
        """

    def again(self, serial: int, digest: str, error: BaseException | None) -> Placement:
        """Leave the epoch, and get into the next one; returns once it is connected there.

        Args:
            serial: of what this worker saved last; -1 if it has never had the job's state.
            digest: of the same; equal where two workers hold the same.
            error: why it leaves; None if hosts come or go.

        Raises:
            DismissedError: there is no place for it.
        """

    def synced(self) -> None:
        """Report that this worker has the state of its epoch."""

    def finished(self) -> None:
        """Report that the training has finished: there will be no further epoch."""

    def listen(self, listener: Callable[[int], None] | None) -> None:
        """Call ``listener`` in another thread with each update (see ``Updates``) that is announced; None ends it."""


Failure = Callable[[BaseException], HorovodInternalError | None]


def itself(error: BaseException) -> HorovodInternalError | None:
    """Return the exception if it is a failure of the job; otherwise None."""
    return error if isinstance(error, HorovodInternalError) else None


def run_fn(
    func: Callable[..., T], reset: Callable[[], Any] | None = None, *, failure: Failure = itself
) -> Callable[..., T]:
    """Make a training function elastic: ``hvd.elastic.run`` of each framework.

    Args:
        func: takes a ``State``, and whatever else it is given. It is called again, from the top, each time the job's
            workers have changed; it goes on where the state says.
        reset: accepted for programs that pass it: the job itself forms its next epoch.
        failure: which failure of the job an exception of the framework stands for; None if it is an error of the
            program.

    Returns:
        a function that returns what ``func`` returns in the end. In a job of fixed size it syncs the state and calls
        ``func`` once.

    Raises (the function returned):
        SystemExit: (0) the job goes on without this worker, whose host was removed.
        DismissedError: the job has failed, or there are no further epochs as others have finished.
        HorovodInternalError: the training has failed three times without a commit in between; or the failure is the
            program's own: a MismatchError, or a NotInitializedError.
        whatever else ``func`` raises.
    """

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> T:
        if not isinstance(state, State):
            raise InvalidArgumentError(
                f"a function under elastic.run takes a State first, not a {type(state).__name__}: the state class of "
                "your framework, such as hvd.elastic.TorchState, or hvdgloo.elastic.ObjectState"
            )
        job = process.membership()
        if job is None:
            state.sync()
            return func(state, *args, **kwargs)
        with leaving_on_sigterm(job):
            return Loop(job, state, failure).run(lambda: func(state, *args, **kwargs))

    return elastic


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Make a training function elastic: it goes on after its job has lost or gained workers.

    ::

        @hvd.elastic.run
        def train(state, ...):
            ...

    Args:
        func: takes a ``State`` first. It is called again, from the top, each time the job's workers have changed, and
            goes on where the state says.

    Returns:
        a function that returns what ``func`` returns in the end; see ``run_fn``.
    """
    return run_fn(func)


def _forget_where(error: BaseException | None) -> None:
    """Drop the traceback of an error that the job survived: it would keep alive the objects that the function worked
    on, and the engine that the error ended, which has the error itself."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # causes may form a circle
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Loop:
    """One worker's turns.

    Args:
        job: its membership.
        state: what it trains.
        failure: see ``run_fn``.
    """

    def __init__(self, job: Job, state: State, failure: Failure = itself) -> None:
        self._job = job
        self._state = state
        self._failure = failure
        self._members: tuple[object, ...] = ()
        self._reached = -1  # the serial that all members had after the last sync
        self._resets = 0  # since the last commit, or with other members
        self._is_over = False

    def run(self, func: Callable[[], T]) -> T:
        """Call ``func`` until it returns; see ``run_fn``."""
        self._state._updates = self._job
        self._job.listen(self._heard)
        reason: BaseException | None = None  # why the last turn has ended
        try:
            while True:
                try:
                    self._begin(self._place(reason), reason)
                    _forget_where(reason)
                    reason = None
                    value = func()
                    break
                except HostsUpdatedInterrupt as update:
                    reason = update
                except Exception as error:
                    reason = self._survived(error)
                    if reason is None:
                        raise
            self._job.finished()
            return value
        finally:
            self._job.listen(None)
            self._state._updates = None

    def _place(self, reason: BaseException | None) -> Placement:
        """Get into the job's next epoch, or into the first one for which there is no reason."""
        state = self._state
        try:
            if reason is None:
                return self._job.enter()
            if isinstance(reason, HostsUpdatedInterrupt):
                state.save()
            digest = state._digest()  # first: it waits for a save that is not complete yet
            error = None if isinstance(reason, HostsUpdatedInterrupt) else reason
            return self._job.again(self._serial(), digest, error)
        except DismissedError as dismissed:
            self._is_over = True
            if dismissed.fate == "removed":
                logger.warning("%s", followed_by(dismissed, "this worker leaves the job"))
                raise SystemExit(0) from None
            if dismissed.fate == "over" and isinstance(reason, HorovodInternalError):
                raise reason from dismissed
            raise

    def _begin(self, placement: Placement, reason: BaseException | None) -> None:
        """Do what precedes the function: restore the last save, call reset callbacks, and give all the newest state."""
        state, progress = self._state, self._state._progress
        newest = highest(state._context(), "elastic.serial", (self._serial(),))[0]
        self._require_progress(placement, newest, reason)
        if isinstance(reason, HorovodInternalError):
            state.restore()
        if not placement.fresh:
            state.on_reset()
        # Callbacks may have changed something, and not the same everywhere.
        fingerprint = int(digest(state._fingerprint())[:15], 16)
        most, least = highest(state._context(), "elastic.state", (fingerprint, -fingerprint))
        with progress.syncing(newest, placement.root, placement.everyone and most == -least):
            state.sync()
        self._job.synced()

    def _require_progress(self, placement: Placement, newest: int, reason: BaseException | None) -> None:
        """Raise the last error if the same workers fail again and again. All members see the same and decide alike."""
        hosts = placement.topology.hosts
        members = tuple((hosts[worker.host].identity, worker.pid) for worker in placement.topology.workers)
        if members != self._members:
            self._resets = 0
        elif isinstance(reason, HorovodInternalError):
            self._resets = 1 if newest > self._reached else self._resets + 1
        self._members, self._reached = members, newest + 1
        if isinstance(reason, HorovodInternalError) and self._resets >= _MOST_RESETS:
            self._is_over = True
            logger.error("the same workers have failed %d times since the last commit; this ends the job", self._resets)
            raise reason

    def _serial(self) -> int:
        progress = self._state._progress
        return progress.serial if progress.is_shared else -1

    def _survived(self, error: Exception) -> HorovodInternalError | None:
        """Return the failure if it leads to the job's next epoch; otherwise None."""
        failure = self._failure(error)
        if self._is_over or isinstance(failure, (MismatchError, NotInitializedError)):
            return None
        return failure

    def _heard(self, update: int) -> None:
        self._state._announce(update)
        notification_manager.handle_hosts_updated(time.time(), update)
