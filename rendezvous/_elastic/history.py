"""Changes of an elastic job's workers in words: a line for each change, and a summary at the end. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdgloo.rendezvous._elastic.events import Changed
from hvdgloo.rendezvous._membership.assignment import Assignment
from hvdgloo.topology import abbreviated

MOST = 20
"""Largest number of changes that the summary lists: the last ones."""


def describe_change(change: Changed, before: Changed) -> str:
    """Describe a change in a line: ``rank 1 on host h2 was lost: ...; 3 of 4 workers went on after 0.4 s``.

    Args:
        change: the change after which training continued.
        before: the change before it.
    """
    return f"{_reason(change, before)}; {describe_survivors(change, before)}"


def describe_survivors(change: Changed, before: Changed) -> str:
    """Describe a change without its reason: ``3 of 4 workers went on after 0.4 s``."""
    size, old = change.assignment.size, before.assignment.size
    new = len(change.assignment.fresh)
    went_on = size - new
    if went_on == old:
        text = f"{_workers(old)} went on" if new else "all workers went on" if old > 1 else "the worker went on"
    elif went_on:
        text = f"{went_on} of {_workers(old)} went on"
    else:
        return f"{_workers(new)} started again after {change.stood:.1f} s"
    if new:
        text += f", with {new} new one{'' if new == 1 else 's'},"
    return f"{text} after {change.stood:.1f} s"


def describe_epoch(assignment: Assignment) -> str:
    """Describe the members in training: ``epoch 1: 3 workers are in training (h1: ranks 0-1, h2: rank 2)``."""
    some = "1 worker is" if assignment.size == 1 else f"{assignment.size} workers are"
    ranks = ranks_by_host((member.host_name, rank) for rank, member in enumerate(assignment.members))
    return f"epoch {assignment.epoch}: {some} in training ({ranks})"


def ranks_by_host(places: Iterable[tuple[str, int]]) -> str:
    """List hosts in order of their ranks: ``h1: ranks 0-1, h2: rank 2``.

    Args:
        places: (host, rank), in any order; the ranks of a host are consecutive.
    """
    ranks: dict[str, list[int]] = {}
    for host, rank in sorted(places, key=lambda place: place[1]):
        ranks.setdefault(host, []).append(rank)
    return ", ".join(
        f"{host}: rank {some[0]}" if len(some) == 1 else f"{host}: ranks {some[0]}-{some[-1]}"
        for host, some in ranks.items()
    )


def summarize(changes: Sequence[tuple[float, Changed]]) -> str:
    """Summarize the changes of a job's workers: times, reasons, survivors, and time without training.

    Args:
        changes: each epoch that reached training, with the time at which it did, in seconds since the job's start.

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
    hosts, old = (
        {member.host: member.host_name or member.host for member in each.assignment.members}
        for each in (change, before)
    )
    gone = [name for host, name in old.items() if host not in hosts]
    came = [name for host, name in hosts.items() if host not in old]
    parts = []
    if gone:
        parts.append(f"{_hosts(gone)} removed")
    if came:
        parts.append(f"{_hosts(came)} added")
    if not parts and change.assignment.fresh:
        parts.append("a new worker was ready" if len(change.assignment.fresh) == 1 else "new workers were ready")
    return " and ".join(parts) or "the slots of the hosts have changed"


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _hosts(names: Sequence[str], show: int = 8) -> str:
    return f"host {names[0]} was" if len(names) == 1 else f"hosts {abbreviated(names, show)} were"
