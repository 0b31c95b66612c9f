"""Detection of a silence that is too long. Pure: the caller supplies the time.

A network that was cut closes no connection, so silence is the only sign of it, and launcher and agents take it for the
other's end. But this process may be what did not run: on a machine that is overloaded or swapping, or a virtual machine
that was moved. So only time in which this process looked counts. The later a look comes, the less it counts: a process
that gets a core for every third look waits longer.

On one host, silence proves nothing: the end of the other process closes the stream, whatever keeps the machine busy.
"""

from __future__ import annotations

STEPS = 6
"""Number of heartbeats per timeout."""

FIRST = 8.0
"""Seconds of an agent's silence that the launcher tolerates until it has told the agent another time; both send
heartbeats accordingly."""

BEFORE_START = 60.0
"""Seconds of the launcher's silence that an agent tolerates until it is told another time. It has no workers yet that
could be lost."""


class Silence:
    """The duration of a silence.

    Args:
        timeout: seconds of silence after which the other side counts as lost; infinite if it never does.
        now: in seconds, on the caller's clock, like all times.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout = timeout
        self._looked = now
        self._lasted = 0.0

    @property
    def step(self) -> float:
        """Seconds between two heartbeats, which are also the most that one look counts for."""
        return self.timeout / STEPS

    @property
    def deadline(self) -> float:
        """Earliest time at which the silence is too long, if nothing arrives until then."""
        return self._looked + self.timeout - self._lasted

    def heard(self, now: float, ago: float = 0.0) -> None:
        """Record that something arrived, ``ago`` seconds ago."""
        self._looked, self._lasted = now, ago

    def over(self, now: float) -> bool:
        """Tell whether the other side counts as lost."""
        passed, punctual = max(0.0, now - self._looked), self.step * 1.5
        self._lasted += passed if passed <= punctual else punctual * punctual / passed
        self._looked = now
        return self._lasted >= self.timeout
