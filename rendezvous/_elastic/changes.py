"""What has become of an elastic job's workers, in words."""

from __future__ import annotations

from collections.abc import Iterable

from hvdgloo.rendezvous._elastic.events import Changed


def describe_change(change: Changed) -> str:
    """One line for people: who is in training from now on, for how long nobody was, and why."""
    roster = change.roster
    some = "one worker is" if roster.size == 1 else f"{roster.size} workers are"
    text = f"epoch {roster.epoch}: {some} in training"
    text += f" ({ranks_by_host((seat.host_name, rank) for rank, seat in enumerate(roster.seats))})"
    if not change.why and len(roster.fresh) == roster.size:
        return text
    why = change.why or ("there are new workers" if roster.fresh else "the hosts have changed")
    came = f"{len(roster.fresh)} of them new, " if roster.fresh else ""
    return f"{text}, {came}after {change.stood:.1f} s without training: {why}"


def ranks_by_host(places: Iterable[tuple[str, int]]) -> str:
    """Hosts in order of their ranks: ``h1: ranks 0-1, h2: rank 2``.

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
