"""Calls of a function on agents that connected by themselves, as ``hvdgloo.run.run`` makes them on hosts it reaches."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from hvdgloo._job import excepthook
from hvdgloo.config import without_place
from hvdgloo.errors import LaunchError
from hvdgloo.runner.elastic.options import FAILURES_ON_ONE_HOST, ElasticOptions
from hvdgloo.runner.function_results import ResultFiles, conclude
from hvdgloo.runner.inbound.listener import TaskListener
from hvdgloo.runner.inbound.stream import InboundStream
from hvdgloo.runner.job.environment import for_other_hosts, working_directory
from hvdgloo.runner.job.host_sources import Inventory
from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.job.spec import ElasticSpec, HostEntry, LaunchSpec, Output, Times
from hvdgloo.runner.launch import launch
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.signals import LIBRARY_SIGNALS
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Ending
from hvdgloo.runner.worker import function_task

_REASON_TIME, _KILL_TIME = 3.0, 0.5
"""Seconds that the other system has to say why it has lost an agent; and that it was the one who killed a worker, which
in most cases it was not.
"""


_INTERVAL = 0.5
"""Seconds between two looks at which agents are here."""


class InboundSpawner:
    """Takes agents that have connected, instead of starting any."""

    def __init__(self, listener: TaskListener) -> None:
        self._listener = listener

    def start(self, host: HostEntry) -> InboundStream:
        assert host.profile is not None
        return self._listener.hand_over(host.profile.key)

    def is_local(self, host: HostEntry) -> bool:
        return False

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        return Diagnosis(Cause.OTHER, self._listener.reason or "its task has ended")


def run_function(
    listener: TaskListener,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    output: Output = Output(),  # noqa: B008 - it never changes
    times: Times = Times(),  # noqa: B008 - it never changes
    nics: Sequence[str] = (),
    np: int | None = None,
    elastic: ElasticOptions | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in a worker process next to each connected task, and wait for all of them.

    Workers have the environment, the working directory and the module path of their task, and in addition ``env``, and
    this process's settings of hvdgloo.

    Args:
        listener: whose ``gather`` has returned.
        env: variables for all workers.
        stdout, stderr: for what workers print, each line with its rank; by default this process's.
        output: what becomes of it.
        times: time limits. However long this process is silent, an agent goes on for as long as this process's machine
            acknowledges what the agent sends.
        nics: which addresses hosts use for each other, as for ``--nics``.
        np: the agents that the start of an elastic job waits for; by default the fewest.
        elastic: how the number of workers may change, for a listener at which tasks may come and go (``count=None``);
            None if it is fixed. Each agent is another slot, and a lost one takes only its own worker with it.

    Returns:
        the results in the order of ranks; in an elastic job, of those workers that were there at the end.

    Raises:
        ConfigError: the numbers of an elastic job contradict each other.
        LaunchError, JobFailedError, KeyboardInterrupt, Exception: as ``hvdgloo.run.run`` does.
    """
    excepthook.install()
    given = dict(env or {})
    environ = _environment(given)
    hosts = _hosts(listener) if elastic is None else ()
    secret = listener.secret
    spec = LaunchSpec(
        command=function_task.command(sys.executable),
        hosts=hosts,
        np=len(hosts) or None,
        cwd=working_directory(os.environ),
        environ=environ,
        exported=frozenset(given),
        export_all=False,
        secret=secret,
        function=function_task.pack_function(func, args, kwargs or {}, secret, paths_of_their_own=True),
        network_interfaces=tuple(nics),
        times=times,
        output=output,
        elastic=None if elastic is None else _elastic(listener, np, elastic, environ),
    )
    with ResultFiles(secret) as results:
        around = Surroundings(
            stdout or sys.stdout,
            stderr or sys.stderr,
            quiet=not output.verbose,
            signals=LIBRARY_SIGNALS,
            results=results,
            spawner=InboundSpawner(listener),
            outside=listener.passed_to,
        )
        return conclude(explained(launch(spec, around), listener), results)


def _elastic(
    listener: TaskListener, np: int | None, options: ElasticOptions, environ: Mapping[str, str]
) -> ElasticSpec:
    """Return the elastic job whose hosts are the agents that are connected, each with one slot."""
    options = replace(options, discovery=listener, failures_per_host=FAILURES_ON_ONE_HOST, interval=_INTERVAL)
    spec = options.spec(Inventory((), options.size(np)), environ)
    assert spec is not None, "a discovery makes it elastic"
    return replace(spec, entry=listener.entry)


def _hosts(listener: TaskListener) -> tuple[HostEntry, ...]:
    """Return all tasks that ``gather`` returned. Raise an error if one has left, as the job would be smaller."""
    try:
        return listener.hosts()
    except LaunchError as error:
        raise LaunchError(listener.await_reason(_REASON_TIME) or str(error)) from None


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables sent to tasks: this process's settings, and the given ones."""
    return without_place({**for_other_hosts(os.environ, frozenset(), export_all=False), **given})


def explained(report: LaunchResult, listener: TaskListener) -> LaunchResult:
    """Return the report with the other system's reason for the loss of an agent or the end of a killed worker."""
    first = report.outcome.first
    if first is None or not _from_outside(first):
        return report
    why = listener.await_reason(_REASON_TIME if first.rank is None else _KILL_TIME)
    if not why or why in first.reason:
        return report
    report.outcome.first = replace(first, reason=f"{first.reason}: {why}")
    return report


def _from_outside(failure: Failure) -> bool:
    """Return whether something other than the worker itself may have caused a failure."""
    return failure.rank is None or failure.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
