"""The report about a job that has ended: its first failure, the worker's last lines, advice, and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hvdgloo.runner.console.console import Console
from hvdgloo.runner.host_setup import advice_for
from hvdgloo.runner.job.advice import advise_on_signal
from hvdgloo.runner.job.outcome import as_shown
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.left_behind import with_files
from hvdgloo.runner.transport.base import Spawner


def complete(
    result: LaunchResult,
    spec: LaunchSpec,
    spawner: Spawner,
    console: Console,
    *,
    host: Callable[[str], HostEntry],
    failed: int | None,
) -> LaunchResult:
    """Add to a job's result what the console knows about its workers, and its files.

    Args:
        result: has the outcome, and the slots with the workers' numbers. Where several ranks failed alike, the first
            failure becomes the one whose traceback the user has seen.
        host: returns the entry of a host by its agent's name.
        failed: number of the worker that failed first; None if there is none.
    """
    outcome, numbers = result.outcome, result.numbers
    first = outcome.first
    if first is not None and failed is not None and (shown := console.shown_with(failed)) in numbers:
        names = {slot.rank: slot.agent for slot in result.slots}
        outcome.first = as_shown(first, outcome, names, lambda _: numbers.index(shown))
        if outcome.first != first:
            first, failed = outcome.first, shown
    away = [slot.agent for slot in result.slots[:1] if not spawner.is_local(host(slot.agent))]
    result = with_files(result, spec, console, elsewhere="".join(away))
    if first is None:
        return result
    advice = advise_on_signal(first.reason)
    if failed is None:
        return replace(result, advice=advice)
    return replace(
        result,
        last_lines=console.tail(failed),
        exception=console.exception(failed),
        advice=advice or advice_for(spec, spawner, host(first.host), console.cause(failed)),
        in_sight=console.in_sight(failed),
    )
