"""When the other side has been silent for too long. Pure: the caller brings the clock.

A network that was cut closes no connection, so silence is the only sign of it, and launcher and agents take it as the
other's end. It must not be taken for that if it was this process that did not run: a machine that is overloaded or
swapping, a virtual machine that was moved. So only time in which this process looked counts. A look that comes late
counts for the less, the later it comes: where this process gets a core for every third look, it waits for longer.

On one host silence proves nothing: the end of the other process closes the stream, whatever keeps the machine busy.
"""

from __future__ import annotations

STEPS = 6
"""The number of steps into which the timeout is divided: the other side shows life once in each."""

FIRST = 8.0
"""Seconds of an agent's silence that the launcher tolerates until it has told the agent another time; both show life
accordingly."""

BEFORE_START = 60.0
"""Seconds of the launcher's silence that an agent tolerates until it is told another time. It has no workers yet that
somebody might miss."""


class Silence:
    """For how long nothing has been heard.

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
        """The seconds between two signs of life, which are also the most that one look counts for."""
        return self.timeout / STEPS

    @property
    def deadline(self) -> float:
        """When it will be over at the earliest, if nothing is heard until then."""
        return self._looked + self.timeout - self._lasted

    def heard(self, now: float, ago: float = 0.0) -> None:
        """Something has arrived, so many seconds ago."""
        self._looked, self._lasted = now, ago

    def over(self, now: float) -> bool:
        """Whether the other side counts as lost."""
        passed, punctual = max(0.0, now - self._looked), self.step * 1.5
        self._lasted += passed if passed <= punctual else punctual * punctual / passed
        self._looked = now
        return self._lasted >= self.timeout
