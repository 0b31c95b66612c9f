"""Curves over a job's life in bounded memory: when there are too many points, each two are merged into one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


def brief(value: float) -> float:
    """Round a value to four significant digits, which are shown and sent; 0 for NaN and infinity."""
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


class Recording(Generic[Key]):
    """Curves that share one axis of time, beginning at ``start``: item ``i`` is about ``width`` seconds from
    ``start + i * width``.

    Args:
        start: beginning of the axis, in seconds.
        points: largest number of points, which is even; beyond it ``width`` doubles.
        total: True if an item is the sum of the values added in its time (0 if there were none) rather than their mean
            (None if there were none).
        curves: largest number of curves; further keys are ignored, since they come from outside.
    """

    def __init__(self, start: float, points: int, *, total: bool = False, curves: int = 64) -> None:
        self.width = 1.0
        self.length = 0
        self._start = start
        self._points = points
        self._total = total
        self._most_curves = curves
        self._blank = 0.0 if total else math.nan
        self._curves: dict[Key, array[float]] = {}
        self._weights: dict[Key, float] = {}  # number of values in the mean of each curve's last item
        self._unread = 0

    def add(self, now: float, values: Mapping[Key, float]) -> None:
        """Add values for the time ``now``, or to the last item if the clock was set back."""
        index = self._reach(now)
        for key, value in values.items():
            curve = self._curves.get(key)
            if curve is None:
                if len(self._curves) == self._most_curves:
                    continue
                curve = self._curves[key] = array("d", [self._blank]) * self.length
            weight = self._weights.get(key, 0.0)
            if self._total:
                curve[index] = brief(curve[index] + value)
            elif weight:
                curve[index] = brief((curve[index] * weight + value) / (weight + 1))
            else:
                curve[index] = brief(value)
            self._weights[key] = weight + 1

    def end(self, values: Mapping[Key, float]) -> None:
        """Make these the last items of their curves, in place of the means."""
        for key, value in values.items():
            if key in self._curves:
                self._curves[key][-1] = brief(value)

    def hold(self, now: float) -> None:
        """Repeat the last items' values up to ``now``."""
        last, width = self.length - 1, self.width
        self._reach(now)
        if last < 0:
            return
        last = int(last * width // self.width)  # the axis may have become coarser
        for curve in self._curves.values():
            for index in range(last + 1, self.length):
                curve[index] = self._blank if self._total else curve[last]

    def at(self, begin: int = 0) -> list[float]:
        """Return the time at which each item begins, from item ``begin`` on."""
        return [self._start + index * self.width for index in range(begin, self.length)]

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys of the curves, in the order of their first values."""
        return iter(self._curves)

    def curve(self, key: Key, begin: int = 0) -> list[float | None]:
        """Return a curve's items from item ``begin`` on; all None (or 0, for totals) if nothing was ever added."""
        if key not in self._curves:
            return [0.0 if self._total else None] * (self.length - begin)
        return [None if value != value else value for value in self._curves[key][begin:]]

    def totals(self, key: Key, begin: int = 0) -> list[float]:
        """Return the same as ``curve`` for a recording of totals, where every item is a number."""
        return self._curves[key][begin:].tolist()

    def unread(self) -> int:
        """Return the first item that is new or has changed since the last call; 0 if ``width`` has changed."""
        first, self._unread = self._unread, max(0, self.length - 1)
        return first

    def _reach(self, now: float) -> int:
        """Make the axis long enough for ``now``; return the index that values go to."""
        index = max(0, int((now - self._start) // self.width), self.length - 1)
        while index >= self._points:
            self._halve()
            index = max(int((now - self._start) // self.width), self.length - 1)
        if index >= self.length:
            for curve in self._curves.values():
                curve.extend([self._blank] * (index + 1 - self.length))
            self.length = index + 1
            self._weights.clear()
        return index

    def _halve(self) -> None:
        """Merge each two items into one."""
        whole = self.length // 2 * 2
        for key, curve in self._curves.items():
            pairs = zip(curve[0:whole:2], curve[1:whole:2], strict=True)
            if self._total:
                shorter = array("d", [brief(a + b) for a, b in pairs])
            else:
                shorter = array("d", [b if a != a else a if b != b else brief((a + b) / 2) for a, b in pairs])
            shorter.extend(curve[whole:])
            self._curves[key] = shorter
            if key in self._weights and whole == self.length:
                self._weights[key] += self.width  # values come about once a second
        self.width *= 2
        self.length = (self.length + 1) // 2
        self._unread = 0
