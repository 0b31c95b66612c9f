"""The failed attempts of an epoch's members to connect with each other, and the host that is probably the reason."""

from __future__ import annotations

from collections import Counter

from hvdgloo.rendezvous._membership.assignment import Assignment

ATTEMPTS = 3
"""The number of times that the same workers may fail to connect before one of their hosts is left out."""


class ConnectionAttempts:
    """The attempts since the last training.

    Attributes:
        failures: number of failed attempts of the same workers.
    """

    def __init__(self) -> None:
        self.failures: Counter[frozenset[str]] = Counter()
        self._accusations: Counter[str] = Counter()

    def accuse(self, host: str) -> None:
        """Record that others could not connect with a worker of this host."""
        self._accusations[host] += 1

    def failed(self, assignment: Assignment) -> str | None:
        """Count a failed attempt.

        Returns:
            None if the same workers may try again; otherwise, the host without which others may connect, or an empty
            string if no host was accused.
        """
        workers = frozenset(assignment.ranks)
        self.failures[workers] += 1
        if self.failures[workers] < ATTEMPTS:
            return None
        order = list(dict.fromkeys(member.host for member in assignment.members))
        accused = max(
            self._accusations.items(),
            key=lambda item: (item[1], order.index(item[0]) if item[0] in order else -1),
            default=("", 0),
        )[0]
        self.clear()
        return accused

    def clear(self) -> None:
        """Forget all attempts, because the workers are connected, or one of their hosts is left out."""
        self.failures.clear()
        self._accusations.clear()
