"""Refusals of workers, and counts of those that are there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hvdgloo.rendezvous._worker_info import WorkerInfo


class NotAcceptedError(Exception):
    """A worker cannot be admitted; the text is the reason. ``taken``: another worker has its place."""

    def __init__(self, reason: str, *, taken: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.taken = taken


def taken(holders: Iterable[WorkerInfo], info: WorkerInfo, place: str, reason: str) -> NotAcceptedError:
    """Return the refusal of a worker whose place another one has.

    Args:
        holders: workers of which one has the place.
        info: worker that asks for it.
        place: name of the place: ``rank 0``.
        reason: reason, unless a holder started the other process, which merely ran the worker's program.
    """
    for holder in holders:
        if info.parent and (holder.pid, holder.host_identity) == (info.parent, info.host_identity):
            reason = (
                f"this process was started by {place} itself (pid {holder.pid} on host {holder.host_name}): a spawned "
                "process, such as a DataLoader's worker, imports the main module again. In that module, put "
                'hvd.init() under if __name__ == "__main__"'
            )
    return NotAcceptedError(reason, taken=True)


def count_by_host(hosts: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Count workers by host name, hosts in order of their first worker.

    Hosts of one name but several identities are distinguished by the start of the identity.

    Args:
        hosts: identity and name of each worker's host.
    """
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for identity, name in hosts:
        names.setdefault(identity, name)
        counts[identity] += 1
    same = Counter(names.values())
    return {
        name if same[name] == 1 else f"{name} [{identity[:6]}]": counts[identity] for identity, name in names.items()
    }
