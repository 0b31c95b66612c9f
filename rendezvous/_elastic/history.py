"""What has become of an elastic job's workers, in words: a line for each change, and all of them at the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hvdgloo.rendezvous._elastic.events import Changed

MOST = 20
"""Changes that the summary lists; of more, the last ones."""


def describe_change(change: Changed, before: Changed) -> str:
    """A line for the user: ``rank 1 on host h2 was lost: ...; 3 of 4 workers went on after 0.4 s``.

    Args:
        change: training goes on.
        before: the epoch in which it was before.
    """
    size, old = change.roster.size, before.roster.size
    new = len(change.roster.fresh)
    went_on = size - new
    if went_on == old:
        text = f"{_workers(old)} went on" if new else "all workers went on" if old > 1 else "the worker went on"
    elif went_on:
        text = f"{went_on} of {_workers(old)} went on"
    else:
        return f"{_reason(change, before)}; {_workers(new)} began anew after {change.stood:.1f} s"
    if new:
        text += f", with {new} new one{'' if new == 1 else 's'},"
    return f"{_reason(change, before)}; {text} after {change.stood:.1f} s"


def summarize(changes: Sequence[tuple[float, Changed]]) -> str:
    """How often the workers of a job have changed: when, why, who went on, and for how long nobody trained.

    Args:
        changes: each epoch that came to training, with the time at which it did, in seconds since the job's start.

    Returns:
        a line, and one for each change; empty if there was none.
    """
    number = len(changes) - 1
    if number < 1:
        return ""
    lines = [
        f"  at {when - change.stood:.1f} s: {describe_change(change, before)}"
        for (when, change), (_, before) in zip(changes[1:], changes, strict=False)
    ]
    times = "once" if number == 1 else f"{number} times"
    shown = f"; the last {MOST} were" if number > MOST else ""
    lost = sum(change.stood for _, change in changes[1:])
    return "\n".join([f"the workers changed {times}, in {lost:.1f} s altogether{shown}:", *lines[-MOST:]])


def _reason(change: Changed, before: Changed) -> str:
    if change.why:
        return change.why
    hosts, old = dict(change.roster.slots), dict(before.roster.slots)
    gone = [host for host in old if host not in hosts]
    came = [host for host in hosts if host not in old]
    parts = []
    if gone:
        parts.append(f"{_hosts(gone)} removed")
    if came:
        parts.append(f"{_hosts(came)} added")
    if not parts and change.roster.fresh:
        parts.append("new workers were ready")
    return " and ".join(parts) or "the slots of the hosts have changed"


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _hosts(names: Sequence[str], show: int = 8) -> str:
    more = len(names) - show
    listed = ", ".join(names[:show]) + (f" and {more} more" if more > 0 else "")
    return f"host {listed} was" if len(names) == 1 else f"hosts {listed} were"
