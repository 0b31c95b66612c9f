"""The process's only Context: ``init()``, ``shutdown()``, and the end of the interpreter."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from hvdgloo._job import excepthook
from hvdgloo._job.context import Context, counted
from hvdgloo._job.logging import configure_logging
from hvdgloo._job.other_launchers import meeting, warn, warn_of_mpi
from hvdgloo._observe.counters import Counters
from hvdgloo._platform.imports import collector_paused
from hvdgloo._platform.spelling import followed_by
from hvdgloo.config import Config, unknown_variables
from hvdgloo.errors import ConfigError, DismissedError, InvalidArgumentError, NotInitializedError
from hvdgloo.types import Metrics

if TYPE_CHECKING:
    from hvdgloo._job.elastic import Membership
    from hvdgloo._job.group_reporting import GroupReporting, Groups

logger = logging.getLogger(__name__)

_current: Context | None = None
_membership: Membership | None = None
_group_reporting: GroupReporting | None = None
_groups: tuple[Groups, int, int] | None = None
"""The groups that are open, and the rank and size of the first, which has all ranks."""
_timelines = 0
"""Timelines that this process has begun by itself; each has a file of its own."""
_lock = threading.Lock()
_counters = Counters()
"""Of all jobs and epochs that this process takes part in."""


def init(
    ranks: Sequence[int] | None = None,
    process_sets: Sequence[Sequence[int]] = (),
    prepare: Callable[[Context], None] = lambda _: None,
) -> Context:
    """Join the job, as the environment describes it; a program that no launcher started is a job of its own.

    Args:
        ranks, process_sets: see ``join``.
        prepare: called with a new Context before any other code gets it.

    Returns:
        the Context; the same one while initialized.

    Raises:
        ConfigError: the environment names another job than the one that this process belongs to.
        whatever ``join`` and ``prepare`` raise.
    """
    global _current, _owner
    with _lock:
        _refuse_another_job()
        if _current is None:
            with collector_paused():
                from hvdgloo._job.join import connected, join  # imports the engine, the rendezvous and the data planes

            _owner = os.getpid()
            _end_group_reporting()  # the Context's takes its place
            excepthook.install()  # before anything can go wrong: a setting's error is shown like any other of ours
            config = Config.from_env()
            configure_logging(config, config.rank)
            excepthook.install(config.rank)
            if _membership is not None:  # init() after shutdown()
                return _begin(_membership, ranks, process_sets, prepare)
            with meeting(config) as config:
                counters = _counters if config.observe else None
                participant = connected(config, counters)
                if participant is not None and participant.config.elastic:
                    from hvdgloo._job.elastic import Membership

                    return _begin(Membership(participant), ranks, process_sets, prepare)
                context = join(config, participant, ranks, process_sets, counters)
                try:
                    _show(context)
                    _warn(context)
                    if config.first_timeline:
                        context.start_timeline(config.first_timeline, config.timeline_mark_cycles)
                    prepare(context)
                except BaseException:
                    context.close()
                    raise
            _current = context
        return _current


def _refuse_another_job() -> None:
    """Raise where a process that is used again, as Spark's and Ray's are, would have the last job's ranks."""
    if _current is None and _membership is None:
        return
    joined = _current.config if _current is not None else cast("Membership", _membership).config
    named = Config.from_env(only={"rendezvous", "job_id"})
    if named.rendezvous is None:
        return
    other_job = named.job_id and joined.job_id and named.job_id != joined.job_id
    if named.rendezvous != joined.rendezvous or other_job:
        past = f"the job at {joined.rendezvous}" if joined.rendezvous is not None else "a job of its own"
        raise ConfigError(
            f"hvd.init(): this process still belongs to {past}, but its environment (HVDGLOO_RENDEZVOUS) now names "
            f"another job, at {named.rendezvous}. Call hvd.shutdown() where the first one ends, or start a process for "
            "each job (on Spark, hvdgloo.spark.run does; else set spark.python.worker.reuse to false)"
        )


def _begin(
    membership: Membership,
    ranks: Sequence[int] | None,
    process_sets: Sequence[Sequence[int]],
    prepare: Callable[[Context], None],
) -> Context:
    """Join an elastic job, which goes on with a Context for each epoch; see ``elastic``."""
    global _membership
    from hvdgloo._job.environment import publish

    config = membership.config

    def install(context: Context) -> None:
        global _current
        _show(context)
        publish(context, membership.master)
        if membership.is_new:
            _warn(context)
            if config.first_timeline:
                context.start_timeline(config.first_timeline, config.timeline_mark_cycles)
        prepare(context)
        _current = context

    try:
        if ranks is not None:
            raise InvalidArgumentError(
                f"comm={list(ranks)}: the workers of an elastic job come and go, so they form one world; leave comm out"
            )
        membership.adopt(process_sets, install)
        _membership = membership
        return membership.begin()
    except BaseException as error:
        _membership = None
        membership.close("it could not join")
        if isinstance(error, DismissedError) and error.fate == "removed":
            logger.warning("%s", followed_by(error, "this worker leaves the job"))
            raise SystemExit(0) from None
        raise


def _show(context: Context) -> None:
    """Adapt to the rank all that is seen from outside: the log, the errors that end the process, and where it runs."""
    configure_logging(context.config, context.rank)
    excepthook.install(context.rank)
    _pin(context)
    for call in _in_new_context:
        call(context)


def _warn(context: Context) -> None:
    """Say what was started in the wrong way, and which variables are probably mistyped; for the latter one process of a
    host is enough."""
    warn(context)
    if context.local_rank == 0:
        for line in unknown_variables():
            logger.warning("%s", line)


def _pin(context: Context) -> None:
    """Pin the communication threads to the core that the user gave."""
    if not context.config.thread_affinity:
        return
    cores = context.config.thread_affinity.split(",")
    try:
        context.engine.pin(int(cores[context.local_rank]))
    except IndexError:
        logger.warning("HVDGLOO_THREAD_AFFINITY has no core for local rank %d; it runs on any", context.local_rank)
    except OSError as error:
        logger.warning("HVDGLOO_THREAD_AFFINITY: core %s cannot be used: %s", cores[context.local_rank], error)


def shutdown(reason: str = "") -> None:
    """End this rank's part of the job, and thereby all ranks' collectives. Does nothing when not initialized.

    In an elastic job this process remains a member, which may call ``init()`` again.

    Args:
        reason: what to tell the other ranks, if this one ends with an error.
    """
    global _current, _timelines
    if _current is not None and not reason:
        for wait in _before_shutdown:
            wait(_current.config.operation_timeout)
    with _lock:
        if _current is not None:
            context, _current = _current, None
            if context.rank == 0:
                warn_of_mpi(context.size)  # it may have been imported since init()
            context.close(reason)
            if _groups is not None:  # which outlive the Context that reported on them
                _timelines = max(_timelines, int(bool(context.config.first_timeline)))
                _begin_group_reporting(context.config)


_before_shutdown: list[Callable[[float], None]] = []


def before_shutdown(wait: Callable[[float], None]) -> None:
    """Call a function before each ``shutdown()`` that no error has caused.

    Args:
        wait: waits until operations have ended that this process has started and does not wait for; takes the most
            seconds that it may wait.
    """
    _before_shutdown.append(wait)


_in_new_context: list[Callable[[Context], None]] = []
_asked_for_ranks: list[Callable[[], None]] = []


def when_in_a_new_context(call: Callable[[Context], None]) -> None:
    """Call a function with each new Context, before any other code gets it."""
    _in_new_context.append(call)


def when_asked_for_ranks(call: Callable[[], None]) -> None:
    """Call a function whenever the program asks for this process's rank, or for the number of ranks.

    A front-end whose compiled functions keep such a number as a constant must know of it.
    """
    _asked_for_ranks.append(call)


def asked_for_ranks() -> None:
    """Note that the program is about to be told its rank, or the number of ranks."""
    for call in _asked_for_ranks:
        call()


def groups_begin(groups: Groups, rank: int, size: int) -> Counters | None:
    """Show what the process exchanges in groups of its own, until ``groups_ended`` or ``init()``.

    Args:
        rank, size: of the group that has all ranks.

    Returns:
        what to count in; None if nothing is to be counted.
    """
    global _groups
    config = Config.from_env()
    if not config.observe and not config.timeline:
        return None
    with _lock:
        if _groups is None:
            _groups = groups, rank, size
        _begin_group_reporting(config)
    return _counters


def _begin_group_reporting(config: Config) -> None:
    """Report on the groups, if there are any, and no Context does."""
    global _group_reporting, _owner, _timelines
    alone = _current is None and _membership is None
    if _groups is None or not alone or _group_reporting is not None or not (config.observer or config.timeline):
        return
    from hvdgloo._job.group_reporting import GroupReporting

    _owner = os.getpid()
    if config.first_timeline:
        _timelines += 1
    _group_reporting = GroupReporting(config, _counters, *_groups, timeline_number=_timelines)


def groups_ended() -> None:
    """Send the last report of groups that have no Context to show them."""
    global _groups
    with _lock:
        _groups = None
        _end_group_reporting()


def _end_group_reporting() -> None:
    global _group_reporting
    if _group_reporting is not None:
        reporting, _group_reporting = _group_reporting, None
        reporting.close()


def groups_after_fork_in_child() -> None:
    """Leave reports and timeline to the process that this one was forked from."""
    global _group_reporting, _groups
    _groups = None
    if _group_reporting is not None:
        _of_the_parent.append(_group_reporting)
        _group_reporting = _counters.timeline = _counters.lateness = None
        _counters.asleep = False


_of_the_parent: list[GroupReporting] = []
"""A forked child's copy of what its parent reports with, which must not be closed."""


def group_counters() -> Counters:
    """Return the process's counters, with or without a Context."""
    return _counters


def group_metrics(rank: int, size: int) -> Metrics:
    """Return the process's counts so far, with or without a Context."""
    return counted(_counters, rank, size)


def is_initialized() -> bool:
    """True between ``init()`` and ``shutdown()`` on this rank."""
    return _current is not None


def membership() -> Membership | None:
    """Return the process's membership in an elastic job; None in a job of fixed size, and before ``init()``."""
    return _membership


def current() -> Context:
    """Return the process's Context.

    Raises:
        NotInitializedError: (a ValueError) ``init()`` has not been called.
    """
    context = _current
    if context is None:
        excepthook.install()  # as init() would have done: the mistake is in the program, not this deep
        raise NotInitializedError
    return context


_owner = 0
"""The id of the process that called ``init()``: a forked child inherits the Context, and must not shut the job down."""


def _at_exit() -> None:
    global _groups
    if os.getpid() == _owner:
        _groups = None  # nothing begins any more
        reason = excepthook.uncaught()
        if _membership is not None:
            _membership.close(reason)
        shutdown(reason)
        groups_ended()


def shut_down_first_at_exit() -> None:
    """Shut down before the modules imported so far do: they may wait for something that waits for the other ranks."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


shut_down_first_at_exit()
