"""When the other side has been silent for too long. Pure: the caller brings the clock.

A network that was cut closes no connection, so silence is the only sign of it, and launcher and agents take it as the
other's end. It must not be taken for that if it was this process that slept: a machine that is swapping, a virtual
machine that was moved. Only time in which this process looked counts; if it did not look for a while, that counts as
one step, in which what has arrived in the meantime can be read.
"""

from __future__ import annotations

STEPS = 6
"""The number of steps into which the timeout is divided: the other side shows life once in each."""

FIRST = 8.0
"""Seconds of silence that an agent tolerates until it has been told another time; so the launcher shows life
accordingly."""


class Silence:
    """For how long nothing has been heard.

    Args:
        timeout: seconds of silence after which the other side counts as lost.
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

    def heard(self, now: float) -> None:
        """Something has arrived."""
        self._looked, self._lasted = now, 0.0

    def over(self, now: float) -> bool:
        """Whether the other side counts as lost."""
        self._lasted += min(max(0.0, now - self._looked), self.step * 1.5)
        self._looked = now
        return self._lasted >= self.timeout
