"""Marks of what happens often, such as commits, over a job's life in bounded memory: when there are too many, each two
are merged into one."""

from __future__ import annotations

from hvdgloo._observe import view

MOST = 64
"""Number of marks of a kind on charts that are some hundred pixels wide."""


class Marks:
    """The marks of one kind. Those that begin within ``width`` seconds are one, and ``width`` grows with their number.

    Args:
        kind: see ``view.Mark``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._width = 1.0
        self._process: int | None = None  # whose total is ``_total``
        self._total = 0
        self._marks: list[tuple[float, float, int]] = []  # first and last time, and number

    def count(self, process: int, total: int, at: float) -> None:
        """Add what has happened since the last call.

        Args:
            process: id of the process that reports.
            total: number since that process began.
            at: time of the last one.
        """
        new = total - self._total
        latest = self._marks[-1][1] if self._marks else float("-inf")
        if process != self._process and self._marks:
            # Another process is rank 0 now. Its total includes what the one before it has reported.
            new = int(total > 0 and at > latest + 1.0)
        self._process, self._total = process, total
        if new > 0:
            self._add(max(at, latest), new)

    def all(self) -> list[view.Mark]:
        """Return the marks in the order of time."""
        return [view.Mark(last, self._kind, number) for _, last, number in self._marks]

    def _add(self, at: float, number: int) -> None:
        marks = self._marks
        if marks and at - marks[-1][0] < self._width:
            first, _, before = marks[-1]
            marks[-1] = first, at, before + number
            return
        marks.append((at, at, number))
        if len(marks) > MOST:
            pairs = zip(marks[0:MOST:2], marks[1:MOST:2], strict=True)
            merged = [(first, last, one + other) for (first, _, one), (_, last, other) in pairs]
            self._marks = [*merged, *marks[MOST:]]
            self._width *= 2
